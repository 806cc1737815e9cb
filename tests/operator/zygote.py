"""Starts operator processes without paying for their imports each time.  Only for tests.

Run as a program: it imports the operator once, then forks one child per line of JSON on its standard input
(``{"arguments": [...], "log": path}``) and answers with the child's process id.  The child is a process of
its own in every respect that matters here: it can be killed and shares nothing with the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = ["ForkedProcess", "Zygote"]


class ForkedProcess:
    """An operator process that the zygote started."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log

    def kill(self) -> None:
        """SIGKILL, and the process is gone when this returns."""
        deadline = time.monotonic() + 60
        while True:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.005)


class Zygote:
    """The program below, as seen from a test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: list[str], log: Path) -> ForkedProcess:
        """Start ``kerf-operator`` with ``arguments``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            line = json.dumps({"arguments": arguments, "log": str(log)})
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, "the zygote has ended"
        return ForkedProcess(int(answer), log)

    def close(self) -> None:
        """End it; its children must have been killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def _serve() -> None:
    import kerf_operator.app  # imported before the first fork
    from kerf_operator.__main__ import main

    assert kerf_operator.app
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave no zombie
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            silence = os.open(os.devnull, os.O_RDONLY)
            os.dup2(silence, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = ["kerf-operator", *request["arguments"]]
            main()
            os._exit(0)
        print(pid, flush=True)  # noqa: T201


if __name__ == "__main__":
    _serve()
