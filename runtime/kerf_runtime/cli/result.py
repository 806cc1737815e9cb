"""What a command that runs in a Job or an init container leaves behind: a result file, an orderly end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kerf_runtime.command_line import describe_error
from kerf_runtime.errors import ConfigError
from kerf_runtime.termination import Terminated, terminable

__all__ = ["result_file_option", "written_result"]

_RESULT_LIMIT = 4096
"""Bytes of a termination message that Kubernetes keeps."""

result_file_option = click.option(
    "--result-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the result or the error there as JSON.",
)


@contextmanager
def written_result(path: Path | None) -> Iterator[dict[str, Any]]:
    """Write the dictionary that the caller fills, or the error that ends it, to ``path`` if there is one.

    Raises:
        ConfigError: the file cannot be written; said before any time is spent where that can be seen.
    """
    if path is not None:
        _check_writable(path)
    result: dict[str, Any] = {}
    try:
        with terminable():
            yield result
    except (Exception, Terminated) as error:
        if path is not None:
            _write(path, {"error": describe_error(error)})
        raise
    if path is not None:
        _write(path, result)


def _check_writable(path: Path) -> None:
    """Refuse a result file that could not be written in the end, before any time is spent."""
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        missing = "" if path.parent.is_dir() else f": there is no folder {path.parent}"
        raise ConfigError(
            f"the result could not be written{missing}",
            where=f"--result-file {path}",
            hint="Name a file in a folder that exists and can be written",
        )


def _write(path: Path, result: dict[str, Any]) -> None:
    """The result as JSON; an error's message is shortened until Kubernetes keeps the whole file."""
    text = json.dumps(result)
    excess = len(text.encode()) - _RESULT_LIMIT
    if excess > 0 and "error" in result:
        message = result["error"]["message"]
        shorter = message[: max(len(message) - excess - 3, 0)] + "..."
        text = json.dumps({"error": {**result["error"], "message": shorter}})
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write the result: {error.strerror}", where=f"--result-file {path}"
        ) from None
