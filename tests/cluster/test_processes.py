"""Processes of an instance: started once, ended for sure, never confused with others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hack.cluster import ClusterError
from hack.cluster.processes import Owner, Processes
from hack.cluster.waiting import wait_until
from tests.patience import PATIENCE

SLEEP = ["sleep", "3600"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN);"
    " print('deaf', flush=True); time.sleep(3600)",
]


@pytest.fixture
def processes(tmp_path):
    table = Processes(tmp_path / "pid", tmp_path / "log")
    yield table
    table.stop(*table.names(), deadline_s=0)


def test_a_running_process_is_not_started_twice(processes):
    processes.start("one", SLEEP)
    first = processes.pid("one")
    processes.start("one", SLEEP)
    assert processes.pid("one") == first


def test_another_table_on_the_same_folder_sees_and_stops_it(processes, tmp_path):
    processes.start("one", SLEEP)
    other = Processes(tmp_path / "pid", tmp_path / "log")
    assert other.pid("one") == processes.pid("one")
    other.stop("one")
    assert processes.pid("one") is None


def test_a_process_that_ended_by_itself_is_reported_with_the_end_of_its_log(processes):
    processes.start("one", ["sh", "-c", "sleep 0.1; echo could not bind; exit 1"])
    wait_until(lambda: processes.pid("one") is None, what="the process to end", deadline_s=PATIENCE)
    with pytest.raises(ClusterError, match=r"one has ended by itself\n  \| could not bind"):
        processes.require_alive("one")


def test_a_zombie_counts_as_ended():
    child = subprocess.Popen(SLEEP)
    owner = Owner(child.pid, _started(child.pid))
    assert owner.is_running()
    child.send_signal(signal.SIGKILL)
    wait_until(lambda: not owner.is_running(), what="the child to be a zombie", deadline_s=PATIENCE)
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()


def test_a_recycled_process_id_is_not_taken_for_ours(processes, tmp_path):
    (tmp_path / "pid").mkdir()
    (tmp_path / "pid" / "old").write_text(f"{os.getpid()} 1\n")
    assert processes.pid("old") is None
    processes.stop("old")  # and this test is still alive
    assert processes.names() == []


def test_a_process_that_ignores_term_is_killed_after_the_deadline(processes, capsys):
    processes.start("deaf", STUBBORN)
    wait_until(
        lambda: "deaf" in processes.log("deaf").read_text(), what="the handler", deadline_s=PATIENCE
    )
    processes.stop("deaf", deadline_s=0.3)
    assert processes.pid("deaf") is None
    assert "deaf did not end within 0 s and is killed" in capsys.readouterr().err


def _started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
