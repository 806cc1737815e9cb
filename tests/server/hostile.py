"""Makes requests that no well-meaning client sends, from a seed.

Most are a right request that is broken in one place, since what is wrong everywhere is refused at the
first check and reaches no other.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.server.tiny import MAX_LENGTH

from kerf_runtime.server.schema import ChatRequest, CompletionRequest
from kerf_runtime.server.unsupported import UNSUPPORTED

__all__ = ["RIGHT", "Case", "make_cases"]

RIGHT = {
    "/v1/completions": {"model": "tiny", "prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "ab"}],
        "max_tokens": 2,
    },
}
WRONG = [
    *(-(10**30), -1, 10**30, 2**63, 1.5, "x", "", "\x00", [], [None], {}, {"a": []}, True),
    *([-1], [[]], ["a", 1], [10**9], {"1": 1e9}, {"x": 1}, {"-1": 0}, "\ud800", [{}], [[-1]]),
    *({"role": "user"}, [{"role": 1}], [{"role": "user", "content": [{"type": "x"}]}]),
    *(float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, -0.0),
    *("z" * 3000, list(range(3000)), [1] * 2 * MAX_LENGTH, ["a"] * 100),
]
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, *UNSUPPORTED, "what"})
PATHS = [
    "/",
    "/v1",
    "/v1/completions/",
    "/v1/models/%ff%00",
    "/../../etc/passwd",
    "//",
    "/health?x=%",
]
METHODS = [
    "GET",
    "HEAD",
    "PUT",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "PATCH",
    "CONNECT",
    "POST",
    "BREW",
    "post",
]
JUNK_HEADERS = [
    b"Authorization: Bearer \xff\xfe",
    b"Accept: application/openmetrics-text; version=; q=x, */*;;;=",
    b"Content-Type: application/json; charset=\xff",
    b"Content-Encoding: gzip",
    b"X-Request-ID: " + b"\x80" * 300,
    b"X-Request-ID: a\tb",
    b"Expect: 100-continue",
    b"Connection: upgrade, keep-alive, close",
    b"Upgrade: websocket",
    b"Range: bytes=0-0,-1",
    b"Host: [::1]:99999999",
    b"Cookie: " + b"a=b;" * 1000,
    b"Accept-Encoding: " + b"x," * 1000,
]


@dataclass(frozen=True)
class Case:
    """Bytes for a connection.  ``complete``: the server has what it needs and must answer."""

    kind: str
    data: bytes
    complete: bool = True


def make_cases(count: int, seed: int = 7) -> list[Case]:
    """``count`` cases, every kind among them."""
    chance = random.Random(seed)
    kinds = list(_KINDS)
    chosen = [*kinds, *chance.choices(kinds, weights=[_KINDS[k][1] for k in kinds], k=count)]
    return [_KINDS[kind][0](chance, kind) for kind in chosen[:count]]


def _request(
    path: str,
    body: bytes,
    *,
    method: str = "POST",
    headers: tuple[bytes, ...] = (),
    length: bool = True,
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: x", *headers]
    if not any(h.lower().startswith(b"content-type") for h in headers):
        lines.append(b"Content-Type: application/json")
    if length:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def _right(chance: random.Random) -> tuple[str, bytes]:
    path = chance.choice(sorted(RIGHT))
    return path, json.dumps(RIGHT[path]).encode()


def _wrong_field(chance: random.Random, kind: str) -> Case:
    path = chance.choice(sorted(RIGHT))
    body = {**RIGHT[path], chance.choice(FIELDS): chance.choice(WRONG)}
    return Case(kind, _request(path, json.dumps(body).encode()))


def _cut_body(chance: random.Random, kind: str) -> Case:
    path, body = _right(chance)
    return Case(kind, _request(path, body[: chance.randrange(len(body))]))


def _flipped_byte(chance: random.Random, kind: str) -> Case:
    path, body = _right(chance)
    at = chance.randrange(len(body))
    return Case(kind, _request(path, body[:at] + bytes([chance.randrange(256)]) + body[at + 1 :]))


def _noise(chance: random.Random, kind: str) -> Case:
    return Case(kind, _request(_right(chance)[0], chance.randbytes(chance.randrange(1, 300))))


def _other_encoding(chance: random.Random, kind: str) -> Case:
    path, body = _right(chance)
    recode: Callable[[bytes], bytes] = chance.choice(
        [
            lambda b: b.decode().encode("utf-16"),
            lambda b: b"\xef\xbb\xbf" + b,
            lambda b: b.replace(b"ab", b"\xc3\x28\xed\xa0\x80"),
            gzip.compress,
        ]
    )
    return Case(kind, _request(path, recode(body)))


def _deep(chance: random.Random, kind: str) -> Case:
    depth = chance.choice([100, 1000, 100_000])
    value = chance.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])
    name = chance.choice(FIELDS).encode()
    path, body = _right(chance)
    return Case(kind, _request(path, body[:-1] + b', "' + name + b'": ' + value + b"}"))


def _digits(chance: random.Random, kind: str) -> Case:
    number = chance.choice(
        [b"9" * 5000, b"1e400", b"-" + b"9" * 4000, b"0." + b"1" * 9000, b"1e-9999"]
    )
    name = chance.choice(FIELDS).encode()
    path, body = _right(chance)
    return Case(kind, _request(path, body[:-1] + b', "' + name + b'": ' + number + b"}"))


def _wrong_target(chance: random.Random, kind: str) -> Case:
    path = chance.choice([*PATHS, *RIGHT, "/metrics", "/ready"])
    method = chance.choice(METHODS)
    body = b"" if method == "CONNECT" else _right(chance)[1]
    return Case(kind, _request(path, body, method=method))


def _junk_headers(chance: random.Random, kind: str) -> Case:
    path, body = _right(chance)
    headers = tuple(chance.sample(JUNK_HEADERS, chance.randrange(1, 4)))
    return Case(kind, _request(path, body, headers=headers))


def _flipped_head(chance: random.Random, kind: str) -> Case:
    path, body = _right(chance)
    data = bytearray(_request(path, body))
    data[chance.randrange(len(data) - len(body))] = chance.randrange(256)
    return Case(kind, bytes(data), complete=False)


def _chunked(chance: random.Random, kind: str) -> Case:
    path, body = _right(chance)
    at = chance.randrange(1, len(body))
    good = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:at], body[at:])]
    broken, complete = chance.choice(
        [
            (b"".join([*good, b"0\r\n\r\n"]), True),
            (b"".join([*good, b"0\r\nX: y\r\n\r\n"]), True),
            (good[0] + b"xyz\r\n" + good[1], True),
            (good[0][:-2] + b"!!" + good[1], True),
            (good[0] + b"-5\r\nabcde\r\n0\r\n\r\n", True),
            (b"f" * 30 + b"\r\n" + body, True),
            (b"5;" + b"e" * 100_000, True),
            (b"".join(good), False),
            (good[0] + b"ffffff\r\n" + body, False),
        ]
    )
    head = _request(path, b"", headers=(b"Transfer-Encoding: chunked",), length=False)
    return Case(kind, head + broken, complete)


def _oversized(chance: random.Random, kind: str) -> Case:
    path, body = _right(chance)
    size = chance.choice([8 * 2**20 + 1, 10**12, 10**19])
    head = _request(path, b"", headers=(b"Content-Length: %d" % size,), length=False)
    return Case(kind, head + body)


def _unfinished(chance: random.Random, kind: str) -> Case:
    path, body = _right(chance)
    data = _request(path, body)
    return Case(kind, data[: chance.randrange(len(data))], complete=False)


def _pipelined(chance: random.Random, kind: str) -> Case:
    path, body = _right(chance)
    return Case(kind, _request(path, body) + chance.choice([_request(path, body), b"\x00" * 50]))


_KINDS: dict[str, tuple[Callable[[random.Random, str], Case], float]] = {
    "wrong field": (_wrong_field, 40),
    "cut body": (_cut_body, 6),
    "flipped byte": (_flipped_byte, 8),
    "noise": (_noise, 3),
    "other encoding": (_other_encoding, 4),
    "deep": (_deep, 2),
    "digits": (_digits, 4),
    "wrong target": (_wrong_target, 8),
    "junk headers": (_junk_headers, 8),
    "flipped head": (_flipped_head, 4),
    "chunked": (_chunked, 8),
    "oversized": (_oversized, 2),
    "unfinished": (_unfinished, 2),
    "pipelined": (_pipelined, 3),
}
"""How each kind is made, and how often relative to the others."""
