"""Servers over the fake engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from tests.patience import PATIENCE
from tests.server.fakes import FakeClient, running_server

Serve = Callable[..., httpx.Client]


@pytest.fixture(scope="session")
def plain_server() -> Iterator[httpx.Client]:
    """One server for all tests that change nothing: starting one takes a third of a second."""
    with (
        running_server(FakeClient().make_ready()) as (url, _),
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        yield http


@pytest.fixture(scope="session")
def uncompiled_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """``kerf serve`` with a tiny model; no compilation and no graphs, which change no token.

    Tests must leave it running.
    """
    from tests.server.test_end_to_end import Server
    from tests.server.tiny import write_tiny_checkpoint, write_tiny_document

    root = tmp_path_factory.mktemp("uncompiled")
    model, document = write_tiny_checkpoint(root / "model"), write_tiny_document(root / "tiny.yaml")
    options = ("--set", "compilation.level=0", "--set", "compilation.cudagraphMode=NONE")
    server = Server("-f", str(document), "--model-path", str(model), *options)
    # Somebody must read the log, or the server would wait for room in the pipe.
    threading.Thread(target=server.process.stderr.read, daemon=True).start()
    yield server
    server.http.close()
    server.process.kill()
    server.process.wait(PATIENCE)


@pytest.fixture
def serve(plain_server: httpx.Client) -> Iterator[Serve]:
    """``serve(client, **settings)``: an HTTP client of a running server, with ``.state`` added.

    Without arguments it is the shared one.
    """
    with ExitStack() as stack:

        def start(client: FakeClient | None = None, **settings: Any) -> httpx.Client:
            if client is None and not settings:
                return plain_server
            url, state = stack.enter_context(
                running_server(client or FakeClient().make_ready(), **settings)
            )
            http = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))
            http.state = state  # type: ignore[attr-defined]
            return http

        yield start
