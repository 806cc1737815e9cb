"""The thread settings that a container's CPU limit calls for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kerf_runtime.engine.threads import cpu_limit, prepare_environment


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"cpu.max": "max 100000"}, None, id="v2 without a limit"),
        pytest.param({"cpu.max": "150000 100000"}, 2, id="v2 rounds up"),
        pytest.param({"cpu.max": "10000 100000"}, 1, id="v2 below one CPU"),
        pytest.param({"cpu.max": "nonsense"}, None, id="unreadable"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4, id="v1"
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, id="v1 without"
        ),
        pytest.param({}, None, id="no cgroups"),
    ],
)
def test_the_limit_is_read_from_the_cgroup(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_limit(tmp_path) == expected


def test_a_limit_below_the_cpus_sets_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu.max").write_text("200000 100000")
    prepare_environment(tmp_path)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    (tmp_path / "cpu.max").write_text("100000 100000")
    prepare_environment(tmp_path)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("3", "ACTIVE")
