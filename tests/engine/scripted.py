"""An engine process without torch: everything is real but its core, which the tests tell what to do."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from kerf_runtime.engine import core, process
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.messages import AddRequest, Started, TokenOutput
from kerf_runtime.engine.phases import Progress
from kerf_runtime.errors import CaptureError, EngineError

__all__ = [
    "DIE",
    "FAIL_AND_LINGER",
    "GO_ON",
    "STUCK",
    "run_late_engine",
    "run_scripted_engine",
]

DIE = 1001
"""The first token of a prompt that kills the engine."""
FAIL_AND_LINGER = 1002
"""The first token of a prompt that makes it fail, and not exit."""
STUCK = 1003
"""The first token of a prompt whose step goes on when the test says so."""
GO_ON = "KERF_TEST_GO_ON"
"""Environment variable with a path: an engine that waits for the test goes on once it exists."""


class ScriptedCore:
    """Answers every request with its own prompt, a token per step."""

    def __init__(self, args: EngineArgs, *, spawned: float) -> None:
        self._left: dict[str, list[int]] = {}

    def startup(self, progress: Progress) -> None:
        progress("import", "nothing", None)

    def started_message(self) -> Started:
        return Started(128, 2000, (2,), {})

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: AddRequest) -> None:
        self._left[request.request_id] = list(request.prompt_token_ids)

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def step(self) -> list[TokenOutput]:
        outputs = []
        for name, left in list(self._left.items()):
            token = left.pop(0)
            if token == DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            if token == FAIL_AND_LINGER:
                threading.Thread(target=time.sleep, args=(3600,)).start()
                raise CaptureError("the step failed")
            if token == STUCK:
                _wait_for_the_test()
            outputs.append(TokenOutput(name, [token], None if left else "length"))
            if not left:
                del self._left[name]
        return outputs

    captures_pending = False

    def capture_next(self) -> None:
        raise EngineError("nothing is pending")

    def report(self) -> dict[str, Any]:
        return {}

    def stats(self) -> dict[str, Any]:
        return {"running": len(self._left)}


def _wait_for_the_test() -> None:
    while not Path(os.environ[GO_ON]).exists():
        time.sleep(0.005)


def run_late_engine(args: EngineArgs, addresses: process.Addresses, spawned: float) -> None:
    """As ``run_scripted_engine``, but it connects when the test says so."""
    _wait_for_the_test()
    run_scripted_engine(args, addresses, spawned)


def run_scripted_engine(args: EngineArgs, addresses: process.Addresses, spawned: float) -> None:
    """In place of ``process._main``; says that it is alive ten times as often."""
    process.ALIVE_SECONDS = 0.1  # type: ignore[attr-defined]
    core.EngineCore = ScriptedCore  # type: ignore[misc,assignment]
    process._main(args, addresses, spawned)
