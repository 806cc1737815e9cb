"""The artifact store on a volume: staging, atomic publish, verification, listing.  No torch.

    <root>/torch_compile_cache/<key>/manifest.json   what is there, with sizes and sha256
    <root>/torch_compile_cache/<key>/rank_<n>/...    the artifact
    <root>/torch_compile_cache/<key>/READY           sha256 of the manifest, written last
    <root>/torch_compile_cache/.staging-<key>-...    being written; invisible to readers
    <root>/torch_compile_cache/.quarantine-<key>-... found damaged or stale by a writer

A key becomes visible by one rename, after everything in it has been fsynced.  Readers never write.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kerf_runtime.cache.manifest import FileEntry, Manifest, file_sha256
from kerf_runtime.cache.verify import MANIFEST, READY, Problem, ready_text, verify_folder
from kerf_runtime.errors import CacheError

__all__ = ["CacheStore", "Staging", "write_error"]

_FOLDER = "torch_compile_cache"
_STALE_STAGING_SECONDS = 6 * 3600
_DISK_RESERVE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Staging:
    """A folder being written for ``key``; nobody sees it before ``CacheStore.publish``."""

    key: str
    path: Path


class CacheStore:
    """The keys below one root folder.

    Args:
        root: the volume; ``torch_compile_cache`` is created below it by the first writer.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / _FOLDER

    def path(self, key: str) -> Path:
        """Folder of a key, whether it exists or not."""
        return self.folder / key

    def keys(self) -> list[str]:
        """Keys that are published or damaged, sorted; staging and quarantine are not listed."""
        if not self.folder.is_dir():
            return []
        return sorted(
            p.name for p in self.folder.iterdir() if p.is_dir() and not p.name.startswith(".")
        )

    def read(self, key: str, *, checksums: bool = True) -> Manifest | Problem:
        """Verify a key and return its manifest; nothing of the artifact is loaded.

        Args:
            key: the key.
            checksums: compare the sha256 of everything (else only the list of files and their sizes).
        """
        return verify_folder(self.path(key), key, checksums=checksums)

    @contextmanager
    def writer(self, key: str, *, timeout_s: float = 3600.0) -> Iterator[None]:
        """Hold the key's writer lock: one writer per key, the others wait.

        Raises:
            CacheError: the volume cannot be written, or the lock was not free in time.
        """
        self._make_folder()
        path = self.folder / f".lock-{key}"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise write_error(self.folder, error) from error
        try:
            deadline = time.monotonic() + timeout_s
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise CacheError(
                            f"another process has been writing key {key} for {timeout_s:.0f} s",
                            where=str(path),
                            hint="Wait for it, or stop it if it hangs",
                        ) from None
                    time.sleep(0.2)
            yield
        finally:
            os.close(handle)

    def stage(self, key: str) -> Staging:
        """A new staging folder for ``key``; left-over ones that nobody writes any more are removed.

        Raises:
            CacheError: the volume cannot be written or is full.
        """
        self._make_folder()
        for old in self.folder.glob(f".staging-{key}-*"):
            if time.time() - old.stat().st_mtime > _STALE_STAGING_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        free = shutil.disk_usage(self.folder).free
        if free < _DISK_RESERVE_BYTES:
            raise CacheError(
                f"the volume is full: {free >> 20} MiB free, at least {_DISK_RESERVE_BYTES >> 20} MiB needed",
                where=str(self.folder),
                hint="Remove old keys or enlarge the volume",
            )
        path = self.folder / f".staging-{key}-{secrets.token_hex(4)}"
        try:
            path.mkdir()
        except OSError as error:
            raise write_error(self.folder, error) from error
        return Staging(key, path)

    def discard(self, staging: Staging) -> None:
        """Remove a staging folder that will not be published."""
        shutil.rmtree(staging.path, ignore_errors=True)

    def publish(self, staging: Staging, **fields: Any) -> Manifest:
        """Write the manifest, fsync everything and make the key visible by one rename.

        Call while holding ``writer(key)``.  A folder of the same key is moved to quarantine first.

        Args:
            staging: the finished folder.
            fields: further fields of ``Manifest`` (digest, declared, observed, counters, ...).

        Raises:
            CacheError: writing failed, for example because the volume is full; nothing is visible.
        """
        try:
            files = [
                FileEntry(
                    path=str(path.relative_to(staging.path)),
                    size=path.stat().st_size,
                    sha256=file_sha256(path),
                )
                for path in sorted(staging.path.rglob("*"))
                if path.is_file()
            ]
            manifest = Manifest(
                key=staging.key,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                files=files,
                **fields,
            )
            text = manifest.to_text()
            (staging.path / MANIFEST).write_text(text)
            (staging.path / READY).write_text(ready_text(staging.key, text.encode()))
            for path in sorted(staging.path.rglob("*")):
                _make_readable(path)
                _fsync(path)
            _make_readable(staging.path)
            _fsync(staging.path)
            target = self.path(staging.key)
            if target.exists():
                self.quarantine(staging.key)
            staging.path.rename(target)
            try:
                _fsync(self.folder)
            except OSError:
                # Not known to survive a power cut: nobody may rely on it.
                target.rename(staging.path)
                raise
        except OSError as error:
            raise write_error(self.folder, error) from error
        return manifest

    def quarantine(self, key: str) -> Path:
        """Move a damaged or stale key aside, so that it can be looked at but never loaded."""
        target = self.folder / f".quarantine-{key}-{secrets.token_hex(4)}"
        try:
            self.path(key).rename(target)
        except OSError as error:
            raise write_error(self.folder, error) from error
        return target

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.root, error) from error


def write_error(where: Path, error: OSError) -> CacheError:
    """The error for a write below ``where`` that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        existing = next(path for path in (where, *where.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free >> 20
        return CacheError(
            f"the volume is full ({free} MiB free)",
            where=str(where),
            hint="Remove old keys or enlarge the volume; nothing was published",
        )
    return CacheError(
        f"cannot write: {error.strerror}",
        where=str(error.filename or where),
        hint="Mount the volume writable for this user; what only reads it is kerf serve --cache-read-only",
    )


def _make_readable(path: Path) -> None:
    """Other users (the serving pods) must be able to read what the compile Job wrote."""
    path.chmod(0o755 if path.is_dir() else 0o644)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
