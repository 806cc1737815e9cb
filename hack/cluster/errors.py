"""Errors of the local cluster: what failed, which log says more, what to do about it."""

from __future__ import annotations

from pathlib import Path

from kerf_runtime.errors import KerfError

__all__ = ["BuildError", "ClusterError", "PrerequisiteError", "tail"]


class ClusterError(KerfError):
    """The local cluster could not do what it was asked."""


class PrerequisiteError(ClusterError):
    """This machine lacks a program or a right; ``hint`` says exactly what to install or run."""


class BuildError(ClusterError):
    """A download or a build of a binary or an image failed; the message carries the log's end."""


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, indented, ready to be put under an error message."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return f"  (no log: {error})"
    kept = text.splitlines()[-lines:]
    return "\n".join(f"  | {line}" for line in kept) if kept else "  (the log is empty)"
