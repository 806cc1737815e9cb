"""Which test modules run in the same process of ``make unit``.

pytest-xdist gives whole modules to the test processes.  What is expensive and made once for a session would
be made once per process; the modules that share it are therefore given away together.  A module that is
forgotten here costs time and nothing else.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling

__all__ = ["SHARED", "ModulesTogether", "scope_of"]

SHARED = {
    "control_plane": (
        "tests/charts/test_chart.py",
        "tests/cluster/test_control_plane.py",
        "tests/operator/test_api_server.py",
        "tests/operator/test_chaos.py",
        "tests/operator/test_failures.py",
        "tests/operator/test_lifecycle.py",
        "tests/operator/test_process.py",
    ),
    "deep_llama": (
        "tests/compilation/test_compiler.py",
        "tests/compilation/test_loader.py",
        "tests/compilation/test_prepare.py",
        "tests/compilation/test_warm_process.py",
        "tests/cudagraph/test_runner.py",
    ),
    "uncompiled_server": ("tests/server/test_*_an_engine.py",),
}
"""What is made once, and the modules that use it."""


def scope_of(module: str) -> str:
    """The name of what ``module`` shares with others, or its own path."""
    path = PurePosixPath(module)
    found = (name for name, modules in SHARED.items() if any(map(path.match, modules)))
    return next(found, module)


class ModulesTogether(LoadFileScheduling):
    """``--dist loadfile`` with the modules of ``SHARED`` as one."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(super()._split_scope(nodeid))
