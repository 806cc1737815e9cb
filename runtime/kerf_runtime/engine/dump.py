"""Writes what was compiled and what is in force into a folder, for people who debug."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerf_runtime.compilation.prepare import PreparedModel
from kerf_runtime.errors import ConfigError

__all__ = ["write_dump"]


def write_dump(folder: Path, prepared: PreparedModel, resolution: Mapping[str, Any]) -> None:
    """Write ``resolution.json``, and for a compiled model its forward and the code of its pieces.

    Args:
        folder: made if it does not exist; files of an earlier dump are overwritten.
        prepared: the model.
        resolution: requested against effective configuration, with the cache verdict.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(resolution, indent=2, default=str)
        (folder / "resolution.json").write_text(text + "\n")
        if prepared.artifact is not None:
            for name, code in prepared.artifact.sources.items():
                (folder / name).write_text(code)
    except OSError as error:
        raise ConfigError(
            f"cannot write the dump: {error.strerror}",
            where=str(folder),
            hint="Give a --debug-dump-path that can be written",
        ) from None
