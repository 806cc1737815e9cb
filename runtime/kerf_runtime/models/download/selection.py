"""Which files of a repository or bucket make the checkpoint.  Pure.

Repositories hold the same weights in several formats; what the loader does not read is not downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from kerf_runtime.errors import SourceError
from kerf_runtime.models.gguf_file import MERGE_SHARDS, is_shard

__all__ = ["select"]

_READ = (".json", ".jinja", ".safetensors")
_HINT = "Needed are config.json with *.safetensors and tokenizer.json, or one .gguf file"


def select(names: Sequence[str], *, path: str | None, where: str) -> list[str]:
    """The names to download, sorted.

    Args:
        names: the files beside each other in the wanted folder, or the wanted file, as paths below the root.
        path: the wanted folder or GGUF file; None for the root.
        where: the source, for errors.

    Raises:
        SourceError: there is no checkpoint, or more than one.
    """
    if not names:
        raise SourceError(
            f"there is nothing at {path}" if path else "there are no files",
            where=where,
            hint="Correct the path: it is a folder or a .gguf file",
        )
    if path is not None and path in names:
        if is_shard(path):
            raise SourceError(
                f"{path} is one of several shards of a model", where=where, hint=MERGE_SHARDS
            )
        if path.endswith(".gguf"):
            return [path]
        raise SourceError(f"{path} is not a .gguf file", where=where, hint=_HINT)
    wanted = sorted(n for n in names if not PurePosixPath(n).name.startswith("."))
    ggufs = [name for name in wanted if name.endswith(".gguf")]
    weights = _without_copies([name for name in wanted if name.endswith(".safetensors")])
    if weights:
        if not any(PurePosixPath(name).name == "config.json" for name in wanted):
            raise SourceError("there are weights but no config.json", where=where, hint=_HINT)
        others = [n for n in wanted if n.endswith(_READ) and not n.endswith(".safetensors")]
        return sorted(others + weights)
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise SourceError(
            f"there are {len(ggufs)} GGUF files: {_listing(ggufs)}",
            where=where,
            hint=MERGE_SHARDS if all(map(is_shard, ggufs)) else "Set path to one of them",
        )
    raise SourceError(f"there is no checkpoint; found {_listing(wanted)}", where=where, hint=_HINT)


def _without_copies(weights: list[str]) -> list[str]:
    """Without ``consolidated.safetensors``, which repeats the weights beside it in another layout."""
    usual = [n for n in weights if not PurePosixPath(n).name.startswith("consolidated")]
    return usual or weights


def _listing(names: Sequence[str], limit: int = 8) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
