"""The ``kerf`` command line.

``root`` holds the group and turns errors into messages and exit codes; every command lives in a module
of its own that imports nothing heavy until it runs, so that ``kerf --help`` and completion are quick.
"""

from kerf_runtime.cli.root import main, run

__all__ = ["main", "run"]
