"""Finds the files of a checkpoint and reads its JSON files.  No torch, no weights.

A checkpoint is a folder in Hugging Face layout (``config.json`` and ``*.safetensors``), a GGUF file,
or a folder with exactly one GGUF file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerf_runtime.errors import ModelError
from kerf_runtime.models.gguf_file import MERGE_SHARDS, is_shard

__all__ = ["Checkpoint", "find_checkpoint", "read_json"]

_LAYOUT_HINT = (
    "Expected a folder with config.json and *.safetensors, a .gguf file, "
    "or a folder with exactly one .gguf file"
)


@dataclass(frozen=True)
class Checkpoint:
    """Where a checkpoint is: ``gguf`` is the file, or None for a folder in Hugging Face layout."""

    path: Path
    gguf: Path | None


def find_checkpoint(path: Path) -> Checkpoint:
    """Decide what ``path`` holds.

    Raises:
        ModelError: nothing there, not readable, or not a checkpoint; says what was found.
    """
    try:
        if not path.exists():
            parent = next(p for p in path.absolute().parents if p.exists())
            raise ModelError(
                "the model folder or file does not exist",
                where=str(path),
                hint=f"The nearest existing folder is {parent}; it holds {_listing(parent)}",
            )
        if path.is_file():
            if path.suffix == ".gguf":
                return Checkpoint(path, path)
            raise ModelError("the file is not a .gguf file", where=str(path), hint=_LAYOUT_HINT)
        if not path.is_dir():
            raise ModelError("neither a file nor a folder", where=str(path), hint=_LAYOUT_HINT)
        names = sorted(entry.name for entry in path.iterdir())
    except PermissionError as error:
        raise ModelError(
            f"permission denied for {error.filename}",
            where=str(path),
            hint="The process must be able to read the model folder",
        ) from None
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" in names and (not ggufs or any(n.endswith(".safetensors") for n in names)):
        return Checkpoint(path, None)
    if len(ggufs) == 1:
        return Checkpoint(path, path / ggufs[0])
    if ggufs:
        raise ModelError(
            f"the folder holds {len(ggufs)} GGUF files: {', '.join(ggufs)}",
            where=str(path),
            hint=MERGE_SHARDS if all(map(is_shard, ggufs)) else "Give the path of one of them",
        )
    raise ModelError(
        f"no checkpoint in the folder; it holds {_listing(path)}",
        where=str(path),
        hint=_LAYOUT_HINT,
    )


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object from a file; empty if it is missing and not required.

    Raises:
        ModelError: missing, unreadable, not JSON or not an object; names file and position.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError("the file is missing", where=str(path)) from None
    except OSError as error:
        raise ModelError(f"cannot read the file: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise ModelError(f"the file is not UTF-8 text: {error.reason}", where=str(path)) from None
    except json.JSONDecodeError as error:
        raise ModelError(
            f"the file is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            where=str(path),
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a deep nesting
        raise ModelError(f"the file is not valid JSON: {error}", where=str(path)) from None
    if not isinstance(data, dict):
        raise ModelError(
            f"expected a JSON object, found {type(data).__name__}", where=str(path)
        ) from None
    return data


def _listing(folder: Path, limit: int = 8) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return "entries that cannot be listed"
    if not names:
        return "nothing"
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
