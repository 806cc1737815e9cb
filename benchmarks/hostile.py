"""Wrong requests by the thousand on a whole server: ``make hostile``, or ``python -m benchmarks.hostile``.

Three things are done to it, one after the other: requests that no well-meaning client sends
(``tests/server/hostile.py`` makes them), requests that the OpenAPI document allows and that it forbids
(schemathesis makes them), and clients that leave at random moments.  Afterwards the server must be as it was
before: the same processes, the same answer, nothing running, no block in use.  The program fails otherwise.
The model is a small random Llama on the CPU; what is hostile to a server has nothing to do with its size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from benchmarks.hostile_clients import (
    ANSWER_SECONDS,
    CLOSED,
    HANG,
    MODES,
    REFUSED,
    Answer,
    explore,
    leave_all,
    throw,
)
from benchmarks.soak_counters import difference, settled
from benchmarks.tiny_server import tiny_server
from tests.server.hostile import RIGHT, make_cases

from kerf_runtime.cli.bench_record import header

__all__ = ["Outcome", "compare", "run", "table", "to_record"]

_THROWN = {200, 400, 404, 405, 413}
"""What a hostile request may be answered with.  200: what is still right although it was changed."""
_EXPLORED = {200, 400, 404}
_NEVER_RIGHT = ("cut body", "noise", "deep", "oversized")
_SHOWN = 3


@dataclass
class Outcome:
    """What was sent, how it was answered, and how the server was afterwards."""

    thrown: Counter[tuple[str, Answer]] = field(default_factory=Counter)
    """Hostile requests by kind and answer."""
    explored: dict[tuple[str, str], Counter[Answer]] = field(default_factory=dict)
    """By path and mode."""
    contradictions: list[str] = field(default_factory=list)
    """Answers that are not as the OpenAPI document says."""
    left: Counter[str] = field(default_factory=Counter)
    """Clients by the moment they left."""
    crashes: list[str] = field(default_factory=list)
    """Processes that ended, or that no longer answer."""
    same_answer: bool = True
    counted: dict[str, Any] = field(default_factory=dict)
    """Of the server, see ``soak_counters``."""
    seconds: float = 0.0

    def answers(self) -> Counter[Answer]:
        """Of all requests together."""
        total: Counter[Answer] = Counter()
        for (_, answer), n in self.thrown.items():
            total[answer] += n
        for answers in self.explored.values():
            total += answers
        return total


def run(
    url: str,
    processes: Callable[[], dict[str, int | None]],
    *,
    requests: int,
    examples: int,
    clients: int,
    seed: int = 7,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Do all of it to a server that serves nobody else, and compare nothing yet.

    Args:
        processes: asks for the server's process ids, by name; None for one that is gone.
        requests: hostile ones.
        examples: of schemathesis, for each path and mode.
        clients: that leave.
        say: what comes next.
    """
    outcome = Outcome()
    before, pids, answer = settled(url), processes(), _right_answer(url)
    began = time.monotonic()
    for what, do in _stages(outcome, url, requests, examples, clients, seed):
        say(what)
        do()
        outcome.crashes = [
            f"the {name} process is not the one of before, after {what}"
            for name, pid in processes().items()
            if pid is None or pid != pids[name]
        ]
        if outcome.crashes:
            break
    outcome.seconds = time.monotonic() - began
    if not outcome.crashes:
        try:
            outcome.counted = difference(before, settled(url))
            outcome.same_answer = _right_answer(url) == answer
        except httpx.HTTPError as error:
            outcome.crashes.append(f"the server answers no right request afterwards: {error!r}")
    return outcome


def _stages(
    outcome: Outcome, url: str, requests: int, examples: int, clients: int, seed: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is done, in words and in deed."""

    def thrown() -> None:
        cases = make_cases(requests, seed)
        kinds = [case.kind for case in cases]
        outcome.thrown.update(zip(kinds, throw(url, cases), strict=True))

    def explored(path: str, mode: str) -> None:
        seen, contradictions = explore(url, path, mode, examples, seed=seed)
        outcome.explored[path, mode] = seen
        outcome.contradictions += contradictions

    def left() -> None:
        outcome.left = leave_all(url, clients)

    yield f"{requests} hostile requests", thrown
    for path in sorted(RIGHT):
        for mode in MODES:
            yield f"{examples} {mode} requests to {path}", partial(explored, path, mode)
    yield f"{clients} clients that leave", left


def _right_answer(url: str) -> str:
    """What a right request is answered with, greedily: the same for ever."""
    body = {**RIGHT["/v1/completions"], "temperature": 0, "max_tokens": 8}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_SECONDS)
    return str(response.raise_for_status().json()["choices"][0]["text"])


def compare(outcome: Outcome) -> list[str]:
    """Everything that must not be."""
    problems = list(outcome.crashes)
    answers = outcome.answers()
    for answer, words in (
        (HANG, f"requests without an answer in {ANSWER_SECONDS:.0f} s"),
        (CLOSED, "requests whose connection was closed without an answer"),
    ):
        if answers[answer]:
            problems.append(f"{answers[answer]} {words}")
    kinds = {(kind, answer): n for (kind, answer), n in outcome.thrown.items() if n}
    for (kind, answer), n in sorted(kinds.items(), key=str):
        wrong = isinstance(answer, int) and answer not in _THROWN
        if wrong or (kind in _NEVER_RIGHT and answer == 200):
            problems.append(f"{n} hostile requests ({kind}) answered with {answer}")
    for (path, mode), seen in outcome.explored.items():
        for answer, n in seen.items():
            wrong = isinstance(answer, int) and answer not in _EXPLORED
            if n and (wrong or (mode == "negative" and answer == 200)):
                problems.append(f"{n} {mode} requests to {path} answered with {answer}")
    if outcome.left[REFUSED]:
        problems.append(f"{outcome.left[REFUSED]} clients could not connect, or were cut off")
    if outcome.contradictions:
        shown = "; ".join(outcome.contradictions[:_SHOWN])
        problems.append(f"{len(outcome.contradictions)} answers against the document: {shown}")
    if not outcome.same_answer:
        problems.append("the same request is answered differently afterwards")
    if outcome.counted:
        problems += _compare_counters(outcome.counted)
    return problems


def _compare_counters(counted: dict[str, Any]) -> Iterator[str]:
    """What the server's own counters say."""
    if failed := sum(n for status, n in counted["http"].items() if status >= 500):
        yield f"the server counted {failed:.0f} answers of 5xx"
    if counted["used"]:
        yield f"{counted['used']:.2%} of the KV cache is in use in the end"
    if counted["alive"]:
        yield f"{counted['alive']:.0f} requests are running or waiting in the end"
    if counted["late"]:
        yield f"{counted['late']:.0f} compilations or captures after start-up"
    if not counted["ended"]["abort"]:
        yield "no request was aborted: the clients did not leave in time"


def table(record: dict[str, Any]) -> Iterator[str]:
    """The section of benchmarks/README.md."""
    found = record["results"]
    yield (
        f"In {found['seconds']:.0f} s. A hostile request that is right after all is answered with 200; one that is "
        f"not whole needs no answer. Problems: {'; '.join(found['problems']) or 'none'}."
    )
    yield ""
    columns = sorted({answer for row in found["answers"] for answer in row["answers"]})
    yield f"| requests | sent | {' | '.join(columns)} |"
    yield f"|---|---|{'---|' * len(columns)}"
    for row in found["answers"]:
        cells = [str(row["answers"].get(answer, 0)) for answer in columns]
        yield f"| {row['requests']} | {sum(row['answers'].values())} | {' | '.join(cells)} |"
    yield ""
    yield "| crashes | hangs | clients that left | answers aborted for that | KV blocks in use in the end |"
    yield "|---|---|---|---|---|"
    used = "unknown" if found["cacheUsed"] is None else f"{found['cacheUsed']:.2%} of all"
    cells = [
        found["crashes"],
        found["hangs"],
        found["left"],
        "unknown" if found["aborted"] is None else found["aborted"],
        used if found["cacheUsed"] != 0 else 0,
    ]
    yield f"| {' | '.join(map(str, cells))} |"


def to_record(outcome: Outcome) -> dict[str, Any]:
    """The record for benchmarks/results."""
    hostile: Counter[Answer] = Counter()
    kinds: dict[str, Counter[Answer]] = {}
    for (kind, answer), n in outcome.thrown.items():
        hostile[answer] += n
        kinds.setdefault(kind, Counter())[answer] += n
    rows = [
        ("hostile", hostile),
        *(
            (f"schemathesis, {mode}: {path}", found)
            for (path, mode), found in outcome.explored.items()
        ),
        ("together", outcome.answers()),
    ]
    facts = header("benchmarks.hostile")
    return {
        **facts,
        "command": ["python", "-m", "benchmarks.hostile", *facts["command"][1:]],
        "model": "a random Llama of three layers",
        "results": {
            "seconds": outcome.seconds,
            "answers": [{"requests": name, "answers": _plain(found)} for name, found in rows],
            "hostileByKind": {kind: _plain(found) for kind, found in sorted(kinds.items())},
            "crashes": len(outcome.crashes),
            "hangs": outcome.answers()[HANG],
            "left": outcome.left.total(),
            "leftWhen": dict(sorted(outcome.left.items())),
            "aborted": round(outcome.counted["ended"]["abort"]) if outcome.counted else None,
            "cacheUsed": outcome.counted.get("used"),
            "problems": compare(outcome),
        },
    }


def _plain(answers: Counter[Answer]) -> dict[str, int]:
    return {str(answer): n for answer, n in sorted(answers.items(), key=str) if n}


def main() -> int:
    """Start a server, do all of it, stop it; 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="hostile ones")
    parser.add_argument(
        "--examples", type=int, default=500, help="requests of schemathesis for each path and mode"
    )
    parser.add_argument("--clients", type=int, default=500, help="clients that leave")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the record there as JSON")
    options = parser.parse_args()
    with tiny_server("compilation.level=0") as server:
        outcome = run(
            server.url,
            lambda: {
                "HTTP": server.process.pid if server.process.poll() is None else None,
                "engine": server.engine,
            },
            requests=options.requests,
            examples=options.examples,
            clients=options.clients,
            seed=options.seed,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
        code = server.stop()
    if code != 0:
        outcome.crashes.append(f"the server ended with {code}")
    record = to_record(outcome)
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    print("\n".join(table(record)))
    return 1 if record["results"]["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
