"""An engine process without torch: everything is real but its core, which the tests tell what to do."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from kerf_runtime.engine import core, process
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.messages import AddRequest, Started, TokenOutput
from kerf_runtime.engine.phases import Progress
from kerf_runtime.errors import CaptureError, EngineError

__all__ = ["DIE", "FAIL_AND_LINGER", "STUCK_SECONDS", "run_scripted_engine"]

DIE = 1001
"""The first token of a prompt that kills the engine."""
FAIL_AND_LINGER = 1002
"""The first token of a prompt that makes it fail, and take half a minute to exit."""
STUCK_SECONDS = 1003
"""The first token of a prompt whose step takes as many seconds as the second token says."""


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
                threading.Thread(target=time.sleep, args=(30,)).start()
                raise CaptureError("the step failed")
            if token == STUCK_SECONDS:
                time.sleep(left[0])
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


def run_scripted_engine(args: EngineArgs, addresses: process.Addresses, spawned: float) -> None:
    """In place of ``process._main``; says that it is alive ten times as often."""
    process.ALIVE_SECONDS = 0.1  # type: ignore[attr-defined]
    core.EngineCore = ScriptedCore  # type: ignore[misc,assignment]
    process._main(args, addresses, spawned)
