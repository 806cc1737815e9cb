"""Notices in whatever process a module is imported, by our code or by a library's.

A package of that name, first on ``PYTHONPATH``, leaves a file for every process that imports it.  What a
library would do with the real one it cannot do with this, so a process that trips may fail as well.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["Tripwire"]

_PACKAGE = """import os, pathlib, sys
made = pathlib.Path(__file__).parent.parent / f"imported-by-{os.getpid()}"
made.write_text(" ".join(sys.orig_argv))
"""


class Tripwire:
    """``environment`` is for the processes; ``tripped`` are the command lines of those that imported ``module``."""

    def __init__(self, folder: Path, module: str) -> None:
        package = folder / module
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(_PACKAGE)
        self._folder = folder
        inherited = os.environ.get("PYTHONPATH")
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(folder), *([inherited] if inherited else [])])
        }

    @property
    def tripped(self) -> list[str]:
        return [path.read_text() for path in sorted(self._folder.glob("imported-by-*"))]
