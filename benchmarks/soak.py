"""Random requests on a whole server: ``python -m benchmarks.soak [--requests 50000] [--output FILE]``.

Clients ask for completions and chats of random lengths and parameters, plain and streamed, some of them
wrong, some too many for the queue, and some leave while they are answered.  What is looked for is what
must not happen: memory that grows, a request or a token that is in no counter, a block that is not free
in the end.  The program fails if one of them is seen.  The model is a small random Llama on the CPU, so
that requests are short and many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from benchmarks.soak_counters import difference, scrape, settled
from benchmarks.tiny_server import MODEL, tiny_server

from kerf_runtime.cli.bench_record import header

__all__ = ["Books", "Soak", "compare", "growths", "run", "table", "to_record"]

GROWTH_LIMIT = 16 * 2**20
"""Bytes by which a process may grow after the first fifth of the requests: the allocators' own books."""
_SAMPLE_SECONDS = 0.5
_ANSWER_SECONDS = 120.0


@dataclass(frozen=True)
class Ask:
    """One request: its bytes, how many answers a right one has, and whether the client leaves."""

    data: bytes
    answers: int
    leaves: bool


@dataclass
class Books:
    """What the clients did and saw."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    """Of answers that were read."""
    answers: int = 0
    """Of requests that were answered with 200."""
    left: int = 0
    """Requests whose client left; each asked for one answer."""


@dataclass
class Soak:
    """The outcome: what clients and server counted, and the memory of the server's processes."""

    books: Books
    counted: dict[str, Any]
    seconds: float
    memory: dict[str, list[int]]


def make_ask(chance: random.Random) -> Ask:
    """A random request: nine in ten are right."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": chance.randint(1, 12)}
    chat = chance.random() < 0.3
    text = "".join(chance.choices("abcdefgh ", k=chance.choice([1, 5, 20, 60, 120])))
    if chat:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    for name, value in (
        ("temperature", chance.choice([0, 0.7, 1.0])),
        ("top_p", 0.9),
        ("top_k", 20),
        ("seed", chance.randrange(1000)),
        ("presence_penalty", 0.5),
        ("logit_bias", {"65": 5}),
        ("stop", ["e", "ab"]),
        ("min_tokens", 1),
        ("logprobs", True if chat else 2),
        ("stream", True),
    ):
        if chance.random() < (0.5 if name == "stream" else 0.15):
            body[name] = value
    leaves = chance.random() < 0.08
    if leaves:
        body |= {"max_tokens": 60, "ignore_eos": True}
    elif chance.random() < 0.15:
        body["n"] = chance.randint(2, 3)
    if not leaves and chance.random() < 0.1:
        body |= chance.choice([{"max_tokens": -1}, {"what": 1}, {"model": "x"}, {"stop": [1]}])
    payload = json.dumps(body).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    data = head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload
    return Ask(data, body.get("n", 1), leaves)


async def run(
    url: str,
    pids: dict[str, int],
    *,
    requests: int,
    clients: int,
    seed: int = 0,
    seconds: float = 1e9,
) -> Soak:
    """Send ``requests``, or as many as there is time for, and compare nothing yet.

    Args:
        url: of a server of ``MODEL`` that serves nobody else.
        pids: processes whose memory is watched, by name.
        clients: how many ask at a time; above the server's places some are refused.
    """
    host, port = urlparse(url).hostname, urlparse(url).port
    books, chance = Books(), random.Random(seed)
    before = await asyncio.to_thread(scrape, url)
    memory: dict[str, list[int]] = {name: [] for name in pids}
    began = time.monotonic()
    stop_at = began + seconds

    def asks() -> Iterator[Ask]:
        while books.sent < requests and time.monotonic() < stop_at:
            books.sent += 1
            yield make_ask(chance)

    pending = asks()

    async def client(own: random.Random) -> None:
        reader = writer = None
        for ask in pending:
            if writer is None or writer.is_closing():
                reader, writer = await asyncio.open_connection(host, port)
            assert reader is not None
            writer.write(ask.data)
            await writer.drain()
            if ask.leaves:
                books.left += 1
                if own.random() < 0.5:
                    await reader.read(1)
                else:
                    await asyncio.sleep(own.random() * 0.05)
                writer.close()
                continue
            async with asyncio.timeout(_ANSWER_SECONDS):
                status, closes = await _read_answer(reader)
            books.statuses[status] += 1
            if status == 200:
                books.answers += ask.answers
            if closes:
                writer.close()
            if status == 429:
                await asyncio.sleep(0.2 + own.random())
        if writer is not None:
            writer.close()

    async def watch() -> None:
        while True:
            for name, pid in pids.items():
                memory[name].append(_resident(pid))
            await asyncio.sleep(_SAMPLE_SECONDS)

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client(random.Random(chance.random())))
    spent = time.monotonic() - began
    after = await asyncio.to_thread(settled, url)
    watching.cancel()
    return Soak(books, difference(before, after), spent, memory)


def compare(soak: Soak) -> list[str]:
    """Everything that does not add up."""
    books, counted = soak.books, soak.counted
    refused = {s: n for s, n in counted["http"].items() if s not in (200, 499)}
    # Of those who left nobody knows whether they would have been refused, except the server.
    left_refused = sum(refused.values()) - sum(n for s, n in books.statuses.items() if s != 200)
    ended = counted["ended"]
    sums = [
        ("requests sent", books.sent, "requests counted", sum(counted["http"].values())),
        (
            "answers of admitted requests",
            books.answers + books.left - left_refused,
            "answers that ended",
            sum(ended[reason] for reason in ("stop", "length", "abort", "error")),
        ),
        ("errors", 0, "answers that ended in one", ended["error"]),
        ("5xx", 0, "counted", sum(n for status, n in refused.items() if status >= 500)),
        ("requests above the queue's limit", refused.get(429, 0), "refused", ended["refused"]),
        (
            "rows of graphs",
            sum(size * n for mode, size, n in counted["dispatch"] if mode != "NONE"),
            "real and padding tokens in graphs",
            sum(n for mode, n in counted["real"].items() if mode != "NONE")
            + sum(counted["padding"].values()),
        ),
        (
            "steps dispatched",
            sum(n for *_, n in counted["dispatch"]),
            "steps timed",
            counted["steps"],
        ),
        ("compilations and captures after start-up", 0, "counted", counted["late"]),
        ("requests running or waiting in the end", 0, "counted", counted["alive"]),
    ]
    problems = [f"{left}: {a}, {right}: {b}" for left, a, right, b in sums if round(a) != round(b)]
    if counted["used"]:
        problems.append(f"{counted['used']:.2%} of the KV cache is in use in the end")
    for name, growth in growths(soak.memory).items():
        if growth > GROWTH_LIMIT:
            problems.append(f"the {name} process grew by {growth / 2**20:.1f} MiB")
    return problems


def growths(memory: dict[str, list[int]]) -> dict[str, int]:
    """Bytes from the second fifth of the samples to the last, medians each; 0 of too few samples."""
    found = {}
    for name, samples in memory.items():
        fifth = len(samples) // 5
        found[name] = (
            int(statistics.median(samples[-fifth:]) - statistics.median(samples[fifth : 2 * fifth]))
            if fifth >= 5
            else 0
        )
    return found


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Read one whole answer; its status, and whether the server closes the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: (\d+)", head)
    if length is not None:
        await reader.readexactly(int(length[1]))
    else:
        while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
            await reader.readexactly(size + 2)
        await reader.readuntil(b"\r\n")
    return int(head.split()[1]), b"connection: close" in head


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def table(record: dict[str, Any]) -> Iterator[str]:
    """The section of benchmarks/README.md."""
    found = record["results"]
    yield (
        f"{found['sent']} requests of {record['workload']['clients']} clients in {found['seconds']:.0f} s: "
        f"{found['statuses'].get('200', 0)} answered, "
        f"{sum(n for s, n in found['statuses'].items() if s != '200')} refused, {found['left']} left by their "
        f"clients. What did not add up: {'; '.join(found['problems']) or 'nothing'}."
    )
    yield ""
    yield "| process | MiB after a fifth | MiB in the end | median of the last fifth less that of the second, MiB |"
    yield "|---|---|---|---|"
    for name, row in found["memory"].items():
        cells = (row["after"], row["end"], row["growth"])
        yield f"| {name} | {' | '.join(f'{cell / 2**20:.1f}' for cell in cells)} |"


def to_record(soak: Soak, *, clients: int) -> dict[str, Any]:
    """The record for benchmarks/results."""
    grown = growths(soak.memory)
    facts = header("benchmarks.soak")
    return {
        **facts,
        "command": ["python", "-m", "benchmarks.soak", *facts["command"][1:]],
        "model": "a random Llama of three layers",
        "workload": {"clients": clients},
        "results": {
            "sent": soak.books.sent,
            "seconds": soak.seconds,
            "statuses": {str(status): n for status, n in sorted(soak.books.statuses.items())},
            "answers": soak.books.answers,
            "left": soak.books.left,
            "ended": dict(soak.counted["ended"]),
            "httpStatuses": {str(k): n for k, n in sorted(soak.counted["http"].items())},
            "realTokens": dict(soak.counted["real"]),
            "paddingTokens": dict(soak.counted["padding"]),
            "steps": soak.counted["steps"],
            "memory": {
                name: {
                    "after": samples[len(samples) // 5],
                    "end": samples[-1],
                    "growth": grown[name],
                }
                for name, samples in soak.memory.items()
            },
            "problems": compare(soak),
        },
    }


def main() -> int:
    """Start a server, soak it, stop it; 1 if something does not add up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument(
        "--seconds", type=float, default=1800.0, help="stop sending after this long"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the record there as JSON")
    options = parser.parse_args()
    # Few places and a short queue, so that some requests wait and some are refused.
    overrides = ("compilation.level=0", "engine.maxNumSeqs=8", "engine.maxQueueLen=24")
    with tiny_server(*overrides) as server:
        engine = server.engine
        assert engine is not None  # the server is ready
        soak = asyncio.run(
            run(
                server.url,
                {"HTTP": server.process.pid, "engine": engine},
                requests=options.requests,
                clients=options.clients,
                seed=options.seed,
                seconds=options.seconds,
            )
        )
        code = server.stop()
    record = to_record(soak, clients=options.clients)
    problems: list[str] = record["results"]["problems"]
    if code != 0:
        problems.append(f"the server ended with {code}")
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    print("\n".join(table(record)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
