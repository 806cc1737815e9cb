"""The clock of tests stands still while the machine does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.patience import PATIENCE, eventually

ROOT = Path(__file__).parents[1]
CODE = """
import time
from tests.patience import given_time
began = time.monotonic()
with given_time() as given:
    print("begun", flush=True)
    input()
    print(given.seconds, time.monotonic() - began)
"""


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_time_in_which_a_process_is_stopped_does_not_count() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: is_stopped(process.pid))
        stopped = time.monotonic()
        time.sleep(0.5)
        pause = time.monotonic() - stopped
        os.kill(process.pid, signal.SIGCONT)
        output, _ = process.communicate("\n", timeout=PATIENCE)
    given, passed = map(float, output.split())
    assert given <= passed - pause + 0.02
