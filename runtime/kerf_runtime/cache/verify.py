"""Check a key's folder before anything in it is loaded.  Reads only; never raises for a bad folder.

READY holds the sha256 of the manifest and the manifest that of every file, so that one changed byte
anywhere is noticed.  What is missing, files or bytes of one, makes a key incomplete; what is other or more
is a mismatch.  The layout of READY, and the manifest's field ``format``, never change: a later
format is recognised as such.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kerf_runtime.cache.manifest import Manifest, file_sha256
from kerf_runtime.config.key import KEY_FORMAT
from kerf_runtime.reasons import CacheReason

__all__ = ["MANIFEST", "READY", "Problem", "ready_text", "verify_folder"]

MANIFEST = "manifest.json"
READY = "READY"


@dataclass(frozen=True)
class Problem:
    """Why a key cannot be used."""

    reason: CacheReason
    message: str


def ready_text(key: str, manifest: bytes) -> str:
    """Contents of READY: the key and the sha256 of the manifest's bytes."""
    return f"{key} {sha256(manifest).hexdigest()}\n"


def verify_folder(folder: Path, key: str, *, checksums: bool) -> Manifest | Problem:
    """The manifest of ``folder`` if it holds ``key``, complete and unchanged.

    Args:
        folder: the key's folder.
        key: the key it must hold.
        checksums: compare the sha256 of everything (else only the list of files and their sizes).
    """
    try:
        return _verify(folder, key, checksums)
    except FileNotFoundError as error:
        return Problem(CacheReason.INCOMPLETE, f"{error.filename} is missing")
    except OSError as error:
        return Problem(CacheReason.UNREADABLE, f"cannot read {folder}: {error}")


def _verify(folder: Path, key: str, checksums: bool) -> Manifest | Problem:
    if not folder.is_dir():
        return Problem(CacheReason.NO_SUCH_KEY, f"{folder} does not exist")
    present = _files_below(folder)
    for name in (READY, MANIFEST):
        if name not in present:
            return Problem(CacheReason.INCOMPLETE, f"{folder} has no {name}")
        if (folder / name).is_symlink():
            return _changed(folder / name, "is a link")
    raw = (folder / MANIFEST).read_bytes()
    if checksums and (folder / READY).read_bytes() != ready_text(key, raw).encode():
        return _changed(folder / MANIFEST, f"differs from what {READY} says")
    found = _format_of(raw)
    if found is not None and found > KEY_FORMAT:
        return Problem(
            CacheReason.FORMAT_TOO_NEW,
            f"{folder} has format {found}, this version reads up to {KEY_FORMAT}",
        )
    try:
        manifest = Manifest.from_text(raw.decode())
    except ValueError as error:
        return _changed(folder / MANIFEST, f"is damaged: {error}")
    if manifest.key != key:
        return _changed(folder, f"holds key {manifest.key}")
    return _check_files(folder, manifest, present, checksums) or manifest


def _changed(path: Path, how: str) -> Problem:
    return Problem(CacheReason.CHECKSUM_MISMATCH, f"{path} {how}")


def _format_of(raw: bytes) -> int | None:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    found = data.get("format") if isinstance(data, dict) else None
    return found if isinstance(found, int) else None


def _files_below(folder: Path) -> set[str]:
    """Relative paths of everything that is not a folder; links are not followed."""

    def refuse(error: OSError) -> None:
        raise error

    found: set[str] = set()
    for root, folders, files in os.walk(folder, onerror=refuse):
        base = Path(root)
        links = [name for name in folders if (base / name).is_symlink()]
        found.update(str((base / name).relative_to(folder)) for name in [*files, *links])
    return found


def _check_files(
    folder: Path, manifest: Manifest, present: set[str], checksums: bool
) -> Problem | None:
    listed = {entry.path: entry for entry in manifest.files}
    extra = sorted(present - listed.keys() - {MANIFEST, READY})
    if extra:
        return _changed(folder / extra[0], "is not in the manifest")
    for name, entry in listed.items():
        path = folder / name
        if name not in present:
            return Problem(CacheReason.INCOMPLETE, f"{path} is missing")
        if path.is_symlink():
            return _changed(path, "is a link")
        size = path.stat().st_size
        if size < entry.size:  # what a copy that was broken off leaves
            return Problem(CacheReason.INCOMPLETE, f"{path} has {size} of {entry.size} bytes")
        if size > entry.size or (checksums and file_sha256(path) != entry.sha256):
            return _changed(path, "differs from the manifest")
    return None
