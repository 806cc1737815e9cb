"""The control plane comes up, survives being asked twice, runs beside others, leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hack.cluster import ClusterError, ControlPlane, controlplane
from hack.cluster import instance as instances
from hack.cluster.controlplane import CONTROL_PLANE
from hack.cluster.waiting import wait_until

from hack import cluster

pytestmark = pytest.mark.control_plane


def test_it_serves_the_pinned_version_and_runs_the_built_in_controllers(control_plane):
    control_plane.kubectl("create", "namespace", "hello")
    assert '"gitVersion": "v1.34' in control_plane.kubectl("get", "--raw", "/version")
    # The controller manager makes the default service account of every namespace.
    wait_until(
        lambda: "default" in control_plane.kubectl("-n", "hello", "get", "sa", "-o", "name"),
        what="the default service account",
        deadline_s=60,
    )


def test_a_refused_request_is_an_error_that_carries_the_servers_words(control_plane):
    with pytest.raises(ClusterError, match=r"get pod nothing.*NotFound"):
        control_plane.kubectl("get", "pod", "nothing")


def test_the_api_server_restarts_on_the_same_data(control_plane):
    control_plane.kubectl("create", "namespace", "kept")
    before = control_plane.processes.pid("kube-apiserver")
    control_plane.restart_api_server()
    assert control_plane.processes.pid("kube-apiserver") != before
    assert "kept" in control_plane.kubectl("get", "namespace", "-o", "name")


def test_bringing_up_a_running_one_changes_no_process(control_plane):
    before = [control_plane.processes.pid(name) for name in CONTROL_PLANE]
    again = controlplane.bring_up(control_plane.instance.name)
    assert [again.processes.pid(name) for name in CONTROL_PLANE] == before


def test_two_that_start_at_once_get_different_ports_and_leave_nothing(control_plane):
    def run(_: int) -> tuple[int, Path, list[int | None]]:
        with cluster.control_plane() as plane:
            plane.kubectl("create", "namespace", "mine")
            return (
                plane.instance.port("api"),
                plane.instance.state,
                [plane.processes.pid(name) for name in CONTROL_PLANE],
            )

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(2)))

    ports = {port for port, _, _ in results}
    assert len(ports | {control_plane.instance.port("api")}) == 3
    for _, state, pids in results:
        assert not state.exists()
        assert all(pid is not None and not Path(f"/proc/{pid}").exists() for pid in pids)
        assert str(state) not in Path("/proc/mounts").read_text()


def test_one_whose_owner_was_killed_is_swept_away_by_the_next_start(control_plane: ControlPlane):
    program = textwrap.dedent(
        """
        import os, signal
        from hack.cluster import control_plane
        with control_plane() as plane:
            print(plane.instance.name, *(plane.processes.pid(n) for n in plane.processes.names()))
            os.sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    killed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    name, *pids = killed.stdout.split()
    cache = control_plane.binaries.cache
    assert instances.find(cache, name) is not None, killed.stderr

    controlplane.sweep(cache)

    assert instances.find(cache, name) is None
    assert not any(_runs(int(pid)) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
