"""What a failure of a connection says, and what it must not say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import urllib3

from kerf_runtime.models.download.transport import connections, explain, parse_address


@pytest.fixture
def silent() -> Iterator[tuple[str, socket.socket]]:
    """A port that takes connections; the test decides what happens then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}", server


def failure(address: str, path: str = "/file?X-Amz-Signature=secret", **request: object) -> str:
    pool = connections(parse_address(address, where=None), {}, redirects=5)
    with pytest.raises(urllib3.exceptions.HTTPError) as raised:
        pool.request("GET", address + path, **request)
    return explain(raised.value, address.partition("//")[2]).reason


def test_a_server_that_says_nothing(silent: tuple[str, socket.socket]) -> None:
    address, _ = silent
    message = failure(address, timeout=0.1)
    assert message == f"{address.partition('//')[2]} does not answer"


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n"])
def test_a_server_that_speaks_something_else_or_hangs_up(
    silent: tuple[str, socket.socket], answer: bytes
) -> None:
    address, server = silent

    def serve() -> None:
        connection, _ = server.accept()
        connection.recv(65536)
        connection.sendall(answer)
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    message = failure(address)
    thread.join()
    assert message.startswith(f"the connection to {address.partition('//')[2]} broke: ")
    assert "secret" not in message


def test_redirects_without_end_do_not_show_a_signed_address(
    silent: tuple[str, socket.socket],
) -> None:
    address, server = silent

    def serve() -> None:
        head = f"HTTP/1.1 302 Found\r\nLocation: {address}/again?X-Amz-Signature=secret\r\n"
        for _ in range(6):
            connection, _peer = server.accept()
            connection.recv(65536)
            connection.sendall(f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    message = failure(address)
    thread.join()
    assert "too many redirects" in message
    assert "secret" not in message
