"""What tests of every part may use: a real control plane.

``control_plane`` is a real etcd, API server, controller manager and scheduler, shared by the whole
session; a test makes its own namespace.  Where it cannot be had (no binaries, no network and no
Go) the tests that need it are skipped with the reason, or fail when ``KERF_REQUIRE_CLUSTER=1``, as
CI sets it.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hack.cluster import BuildError, ControlPlane, PrerequisiteError
from hack.cluster import control_plane as run_control_plane
from hack.cluster.binaries import Binaries
from hack.cluster.controlplane import CONTROL_PLANE
from hypothesis import HealthCheck, settings

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.threads import prepare_environment

# A shell that starts the tests in the background makes them ignore interrupts, and every process that
# they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any test imports torch: threads that spin while they wait make a busy machine crawl.  Several test
# processes share the CPUs; if each, and every process it starts, had a thread per CPU, each parallel region
# would wait for a thread that another test process keeps from running.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
prepare_environment()

# No test is timed: on a busy machine an example may take any time.
settings.register_profile("kerf", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kerf")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow modules first: the other test process works through the rest meanwhile."""
    items.sort(key=lambda item: "slow" not in item.keywords)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Modules that share something expensive go to the same test process."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.distribution import ModulesTogether

    return ModulesTogether(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Obtain the binaries before the first test: no test's timeout covers a ten-minute build."""
    needing = [item for item in session.items if "control_plane" in _fixtures(item)]
    if not needing or session.config.option.collectonly:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        try:
            Binaries().ensure(*CONTROL_PLANE, "kubectl")
        except (PrerequisiteError, BuildError) as error:
            session.config.stash[_UNAVAILABLE] = str(error)


_UNAVAILABLE = pytest.StashKey[str]()


def _fixtures(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """A running control plane with ``.kubeconfig``, ``.kubectl(...)``, ``.helm(...)``, ``.bin()``."""
    reason = request.config.stash.get(_UNAVAILABLE, None)
    if reason is not None:
        if os.environ.get("KERF_REQUIRE_CLUSTER") == "1":
            pytest.fail(f"KERF_REQUIRE_CLUSTER=1, but there is no control plane: {reason}")
        pytest.skip(f"no control plane: {reason}")
    with run_control_plane() as plane:
        yield plane


@pytest.fixture(scope="module", autouse=True)
def fresh_counters() -> None:
    """Counters are process-wide: one module's refused captures are not the next one's."""
    for field in dataclasses.fields(compilation_counter):
        setattr(compilation_counter, field.name, 0)
