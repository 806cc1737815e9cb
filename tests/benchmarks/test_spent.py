"""What a server spends, read from its metrics and from the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from benchmarks.spent import Steps, cpu_seconds, most_frequent, steps_between, steps_of

from kerf_runtime.errors import EngineError

METRICS = """
# TYPE kerf_step_duration_seconds histogram
kerf_step_duration_seconds_bucket{mode="FULL",le="0.004"} 3.0
kerf_step_duration_seconds_count{mode="FULL"} 128.0
kerf_step_duration_seconds_sum{mode="FULL"} 0.512
kerf_step_duration_seconds_count{mode="PIECEWISE"} 2.0
kerf_step_duration_seconds_sum{mode="PIECEWISE"} 0.03
kerf_requests_running 0.0
"""


def test_steps_are_read_by_mode():
    assert steps_of(METRICS) == {"FULL": Steps(128, 0.512), "PIECEWISE": Steps(2, 0.03)}


def test_steps_between_leave_out_what_was_before():
    before = {"FULL": Steps(28, 0.112), "PIECEWISE": Steps(2, 0.03)}
    made = steps_between(before, steps_of(METRICS))
    assert made.keys() == {"FULL"}
    assert most_frequent(made).mean == (0.512 - 0.112) / 100


def test_cpu_time_of_a_server_is_told_apart_from_that_of_its_engine():
    spin = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    code = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {spin + chr(10) + 'print(1, flush=True)'!r} + '; input()'])\n"
        "input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, "serve"], **pipes) as process:
        assert process.stdout.readline() == b"1\n"
        spent = cpu_seconds(os.getpid())
        process.communicate(b"\n\n")
    assert spent["engine"] >= 0.3
    assert 0 <= spent["http"] < spent["engine"]


def test_a_server_that_is_gone_is_an_error():
    with pytest.raises(EngineError, match="0 servers are running"):
        cpu_seconds(os.getpid())
