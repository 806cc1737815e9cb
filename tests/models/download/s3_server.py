"""moto, an S3 server that others wrote, in a process of its own; and a few answers it cannot be made to give.

``make setup`` installs moto into a folder of its own, because its dependencies would hold ours back.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener
from xml.etree import ElementTree

from minio import Minio
from tests.patience import PATIENCE

urlopen = build_opener(ProxyHandler({})).open  # a proxy of this machine must not see these
MOTO = Path(sys.prefix) / "s3-server"
_ALLOW = '{{"Version": "2012-10-17", "Statement": [{{"Effect": "Allow", "Action": {}, "Resource": "*"}}]}}'


@dataclass(frozen=True)
class Keys:
    """Credentials of one user."""

    access: str
    secret: str

    @property
    def environ(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret}


@dataclass(frozen=True)
class Bucket:
    """A bucket on a running moto that checks signatures and permissions.

    Attributes:
        endpoint: its address.
        admin: may do everything; ``client`` uses it.
        reader: may list and get.
        stranger: may do nothing.
    """

    endpoint: str
    client: Minio
    admin: Keys
    reader: Keys
    stranger: Keys
    name: str = "models"

    def put(self, key: str, content: bytes, *, part_bytes: int = 0, acl: str = "private") -> None:
        """Write an object, in parts of a multipart upload if asked."""
        self.client.put_object(
            self.name,
            key,
            io.BytesIO(content),
            len(content),
            part_size=part_bytes,
            metadata={"x-amz-acl": acl},
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _post(url: str, body: bytes, kind: str) -> bytes:
    answer: bytes = urlopen(Request(url, body, {"Content-Type": kind}), timeout=PATIENCE).read()
    return answer


def _user(endpoint: str, name: str, *actions: str) -> Keys:
    """A new user of moto's IAM who may do ``actions``."""

    def ask(action: str, **parameters: str) -> bytes:
        body = urlencode({"Action": action, "Version": "2010-05-08", "UserName": name} | parameters)
        # moto finds the service by what a signature says.
        request = Request(
            endpoint,
            body.encode(),
            {
                "Content-Type": "application/x-www-form-urlencoded",
                "Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/iam/aws4_request",
            },
        )
        answer: bytes = urlopen(request, timeout=PATIENCE).read()
        return answer

    ask("CreateUser")
    if actions:
        policy = _ALLOW.format(json.dumps(actions))
        ask("PutUserPolicy", PolicyName="p", PolicyDocument=policy)
    made = ElementTree.fromstring(ask("CreateAccessKey"))
    texts = {element.tag.rpartition("}")[2]: element.text or "" for element in made.iter()}
    return Keys(texts["AccessKeyId"], texts["SecretAccessKey"])


@contextmanager
def running_moto() -> Iterator[Bucket]:
    """An empty bucket on moto, until the end of the block."""
    assert MOTO.is_dir(), f"{MOTO} is missing: run make setup"
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, "PYTHONPATH": str(MOTO)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                urlopen(f"{endpoint}/moto-api/", timeout=PATIENCE).close()
                break
            except URLError:
                assert process.poll() is None, "moto did not start"
                assert time.monotonic() < deadline, "moto does not answer"
                time.sleep(0.05)
        admin = _user(endpoint, "admin", "s3:*")
        reader = _user(endpoint, "reader", "s3:ListBucket", "s3:GetObject")
        stranger = _user(endpoint, "stranger")
        client = Minio(
            endpoint.removeprefix("http://"),
            admin.access,
            admin.secret,
            secure=False,
            region="us-east-1",
        )
        client.make_bucket("models")
        check_permissions(endpoint, True)
        yield Bucket(endpoint, client, admin, reader, stranger)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def check_permissions(endpoint: str, checked: bool) -> None:
    """Whether moto refuses what is not signed or not allowed."""
    _post(f"{endpoint}/moto-api/reset-auth", b"0" if checked else b"inf", "text/plain")


@dataclass
class Canned:
    """A server that answers like S3 with what a test wants.

    Attributes:
        error: code and HTTP status of the answer to everything, if any.
        page: a body that is no XML, answered to everything with ``page_status``.
        files: content by name, below ``folder``; ``etags`` what is said about them.
        headers: more headers of a content.
        flip: how many contents begin with a wrong byte.
        knows_parts: whether the size of a part can be asked for.
        breaks: how many connections end after half of their content.
        requests: (path and query, headers) of every request.
    """

    error: tuple[str, int] | None = None
    page: bytes | None = None
    page_status: int = 200
    files: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    flip: int = 0
    breaks: int = 0
    knows_parts: bool = True
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    endpoint: str = ""


class _CannedHandler(BaseHTTPRequestHandler):
    canned: Canned

    def log_message(self, *arguments: object) -> None:
        """Tests look at ``canned.requests`` instead."""

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/xml"} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.canned.breaks and "/m.gguf" in self.path:
            self.canned.breaks -= 1
            body = body[: len(body) // 2]
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        canned = self.canned
        canned.requests.append((self.path, dict(self.headers)))
        if self.path == "/credentials":
            given = {"AccessKeyId": "ASIAROLE", "SecretAccessKey": "s", "Token": "t"}
            body = json.dumps({**given, "Expiration": "2099-01-01T00:00:00Z"}).encode()
            return self.answer(200, body, Content_Type="application/json")
        if canned.page is not None:
            return self.answer(canned.page_status, canned.page, Content_Type="text/html")
        if canned.error is not None:
            code, status = canned.error
            text = f"<Error><Code>{code}</Code><Message>Told by {code}.</Message></Error>"
            return self.answer(status, text.encode())
        parts = urlsplit(self.path)
        if "list-type" in parse_qs(parts.query):
            items = "".join(
                f"<Contents><Key>{name}</Key><Size>{len(content)}</Size>"
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>&quot;{canned.etags[name]}&quot;</ETag></Contents>"
                for name, content in canned.files.items()
            )
            space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
            text = f"<ListBucketResult {space}><Name>models</Name>{items}</ListBucketResult>"
            return self.answer(200, text.encode())
        if "partNumber" in parts.query and not canned.knows_parts:
            return self.answer(501, b"")
        content = canned.files[parts.path.rpartition("/")[2]]
        if canned.flip:
            canned.flip -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        begins = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        return self.answer(206 if begins else 200, content[begins:], **canned.headers)

    def do_HEAD(self) -> None:
        self.do_GET()


@contextmanager
def running_canned() -> Iterator[Canned]:
    """The server, until the end of the block."""
    canned = Canned()
    handler = type("Handler", (_CannedHandler,), {"canned": canned})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    canned.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield canned
    finally:
        server.shutdown()
        server.server_close()
