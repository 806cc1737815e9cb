"""``kerf cache``: look at the keys of a compile cache."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from kerf_runtime.cli.options import cache_dir_option, default_cache_dir, json_option
from kerf_runtime.cli.output import echo_json, echo_table, human_bytes
from kerf_runtime.errors import CacheError

__all__ = ["cache"]


@click.group()
def cache() -> None:
    """Look at the keys of a compile cache."""


@cache.command("ls")
@cache_dir_option
@json_option
def list_keys(cache_dir: Path | None, as_json: bool) -> None:
    """List the keys with size, age and what they were compiled for.

    Sizes are compared with the manifest; checksums are not (see verify).
    """
    root = cache_dir or default_cache_dir()
    rows = [_describe(root, key, checksums=False) for key in _keys(root)]
    if as_json:
        echo_json({"root": str(root), "keys": rows})
        return
    if not rows:
        click.echo(f"no keys in {root}")
        return
    echo_table(
        ("KEY", "SIZE", "AGE", "VERDICT", "MODEL", "DTYPE", "LEVEL"),
        [
            (
                row["key"],
                human_bytes(row["sizeBytes"]),
                _age(row["created"]),
                row["verdict"],
                row["model"],
                row["dtype"],
                str(row["level"]),
            )
            for row in rows
        ],
        right=(1,),
    )


@cache.command("verify")
@click.argument("keys", nargs=-1)
@cache_dir_option
@json_option
def verify(keys: tuple[str, ...], cache_dir: Path | None, as_json: bool) -> None:
    """Compare every file of the given keys (default: all) with its checksum.

    Exit code 5 if a key is damaged or missing.
    """
    root = cache_dir or default_cache_dir()
    rows = [_describe(root, key, checksums=True) for key in keys or _keys(root)]
    if as_json:
        echo_json({"root": str(root), "keys": rows})
    else:
        for row in rows:
            click.echo(f"{row['key']}: {row['verdict']}: {row['message']}")
        if not rows:
            click.echo(f"no keys in {root}")
    bad = [row["key"] for row in rows if not row["ok"]]
    if bad:
        raise CacheError(
            f"{len(bad)} of {len(rows)} keys cannot be used: {', '.join(bad)}",
            where=str(root),
            hint="Remove their folders; they are compiled again when they are needed",
        )


def _keys(root: Path) -> list[str]:
    from kerf_runtime.cache import CacheStore

    if not root.is_dir():
        raise CacheError(
            "there is no such folder", where=str(root), hint="Pass --cache-dir, or compile first"
        )
    return CacheStore(root).keys()


def _describe(root: Path, key: str, *, checksums: bool) -> dict[str, Any]:
    from kerf_runtime.cache import CacheStore, Problem

    found = CacheStore(root).read(key, checksums=checksums)
    row: dict[str, Any] = {
        "key": key,
        "ok": not isinstance(found, Problem),
        "sizeBytes": 0,
        "created": None,
        "model": "",
        "dtype": "",
        "level": "",
    }
    if isinstance(found, Problem):
        return row | {"verdict": str(found.reason), "message": found.message}
    declared = found.declared
    return row | {
        "verdict": "Verified" if checksums else "Complete",
        "message": f"{len(found.files)} files",
        "sizeBytes": found.total_bytes,
        "created": found.created,
        "model": _model_name(declared.get("model") or {}),
        "dtype": str(declared.get("dtype", "")),
        "level": declared.get("level", ""),
    }


def _model_name(identity: dict[str, Any]) -> str:
    """One short text for what the key's model is identified by."""
    if "configSha256" in identity:
        return f"config {identity['configSha256'][:12]}"
    source: dict[str, Any] = next(iter(identity.values()), {})
    return "/".join(str(part) for part in source.values())


def _age(created: str | None) -> str:
    if created is None:
        return "?"
    seconds = (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
