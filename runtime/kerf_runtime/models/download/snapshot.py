"""A source's folder of downloads: everything is complete and verified, or invisible.  No torch.

    <root>/<source>/<version>/          the files, and a list of them; a version is a digest of that list
    <root>/<source>/current             a link to the version that was wanted last
    <root>/<source>/.partial-<version>/ being downloaded; another try goes on there
    <root>/<source>/.lock               one process downloads, the others wait for it

A version becomes visible by one rename and ``current`` changes by another, so a reader sees the old
files or the new ones.  A file that did not change between two versions is linked, not downloaded again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerf_runtime.config.base import digest
from kerf_runtime.config.source import ModelSource
from kerf_runtime.errors import DownloadError
from kerf_runtime.models.download.fetch import PATIENT, Retry, Stopped, fetch, persist
from kerf_runtime.models.download.hub import HubRemote, hub_is_offline
from kerf_runtime.models.download.meter import Meter, Progress
from kerf_runtime.models.download.remote import Remote, RemoteFile
from kerf_runtime.models.download.s3 import S3Remote
from kerf_runtime.models.download.selection import select

__all__ = ["Downloaded", "download", "open_remote"]

log = logging.getLogger(__name__)

_CURRENT, _LIST, _LOCK = "current", ".kerf-files.json", ".lock"
_PARALLEL_FILES = 8


@dataclass(frozen=True)
class Downloaded:
    """A complete checkpoint here.

    Attributes:
        path: its folder or GGUF file.
        source: where it came from, for people.
        revision: the commit; None for a source that names none.
        size: bytes of all files.
        received: bytes that had to be downloaded now.
        warning: why the source could not be asked and what is here was taken; None if it was.
    """

    path: Path
    source: str
    revision: str | None
    size: int
    received: int
    warning: str | None = None


def open_remote(source: ModelSource, environ: Mapping[str, str]) -> Remote:
    """The place that a source names.

    Raises:
        ConfigError: a variable of the environment is wrong.
        ValueError: the source is a volume, which is mounted and not downloaded.
    """
    if source.hugging_face is not None:
        return HubRemote(source.hugging_face, environ)
    if source.s3 is not None:
        return S3Remote(source.s3, environ)
    raise ValueError("a volume is not downloaded")


def download(
    source: ModelSource,
    root: Path,
    *,
    environ: Mapping[str, str] = os.environ,
    progress: Progress = lambda transfer: None,
    retry: Retry = PATIENT,
) -> Downloaded:
    """Make sure that the checkpoint of ``source`` is below ``root``, complete and verified.

    What is there already is not downloaded again, and a download that ended early is taken up.  If the
    source cannot be reached and an earlier download is complete, that one is used, with a warning.  A
    commit that is complete needs nobody to be asked.

    Args:
        source: huggingFace or s3.
        root: folder of all downloads; made if it is missing.
        environ: credentials and addresses.
        progress: told how far it is.
        retry: how patient to be with the network.

    Raises:
        ConfigError: a variable of the environment is wrong.
        SourceError: the source refuses (401, 403), has no such model (404), or holds no checkpoint.
        DownloadError: no network, a failing server, a full disk, damage; nothing half-written is visible.
    """
    remote = open_remote(source, environ)
    folder = root / source.download_folder
    offline = source.hugging_face is not None and hub_is_offline(environ)
    try:
        with _locked(folder):
            snapshot = _Snapshot(remote, folder, progress, retry)
            if offline:
                return snapshot.without_asking()
            return (snapshot.current() if _is_pinned(source) else None) or snapshot.ensure()
    except OSError as error:
        raise _disk_error(folder, error) from error
    finally:
        remote.close()


def _is_pinned(source: ModelSource) -> bool:
    """Whether the source can never change: a commit of the hub."""
    hub = source.hugging_face
    return hub is not None and re.fullmatch("[0-9a-f]{40}", hub.revision) is not None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: another process that downloads the same is waited for."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: another process is downloading this; waiting for it", folder)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _disk_error(folder: Path, error: OSError) -> DownloadError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"the disk is full: {error.strerror}",
            where=str(folder),
            hint="Free space or use a larger volume; the next try goes on where this one ended",
        )
    return DownloadError(
        f"cannot write: {error.strerror or error}",
        where=error.filename or str(folder),
        hint="Check that the volume is mounted and writable",
    )


class _Snapshot:
    """One look at the source, and what follows from it."""

    def __init__(self, remote: Remote, folder: Path, progress: Progress, retry: Retry) -> None:
        self._remote, self._folder, self._progress, self._retry = remote, folder, progress, retry
        self._stop = threading.Event()
        self._hint = "Check the network, the proxy variables and the address of the source"

    def without_asking(self) -> Downloaded:
        """The current version."""
        current = self.current(warning="HF_HUB_OFFLINE is set")
        if current is None:
            raise DownloadError(
                "the model is not here and HF_HUB_OFFLINE is set",
                where=self._remote.where,
                hint="Set HF_HUB_OFFLINE=0 once to download it",
            )
        return current

    def ensure(self) -> Downloaded:
        """The version that the source has now."""
        try:
            listed = persist(
                self._remote.list,
                where=self._remote.where,
                retry=self._retry,
                stop=self._stop,
                hint=self._hint,
            )
        except DownloadError as error:
            current = self.current(warning=error.what)
            if current is None:
                raise
            return current
        by_name = {file.name: file for file in listed}
        names = select(list(by_name), path=self._remote.path, where=self._remote.where)
        files = [by_name[name] for name in names]
        version = self._folder / digest([[f.name, f.size, f.etag] for f in files])[:16]
        received = 0
        if not _is_complete(version):
            received = self._download(files, version)
        self._make_current(version)
        return self._result(version, received=received)

    def current(self, *, warning: str | None = None) -> Downloaded | None:
        """The version that was wanted last, if it is still complete."""
        current = self._folder / _CURRENT
        if not _is_complete(current):
            return None
        return self._result(current.resolve(), received=0, warning=warning)

    def _result(self, version: Path, *, received: int, warning: str | None = None) -> Downloaded:
        written = _read_list(version)
        return Downloaded(
            path=version / self._remote.path if self._remote.path else version,
            source=self._remote.where,
            revision=written["revision"],
            size=sum(file["size"] for file in written["files"]),
            received=received,
            warning=warning,
        )

    def _make_current(self, version: Path) -> None:
        """Point ``current`` at a version; of the others only the one before is kept."""
        current = self._folder / _CURRENT
        before = current.resolve().name
        if before == version.name:
            return
        new = self._folder / f".{_CURRENT}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(version.name)
        new.replace(current)
        for other in self._folder.iterdir():
            if other.is_dir() and other.name not in (version.name, before, _CURRENT):
                shutil.rmtree(other, ignore_errors=True)

    def _download(self, files: Sequence[RemoteFile], version: Path) -> int:
        """Download what is missing and publish it; returns the bytes that came."""
        partial = self._folder / f".partial-{version.name}"
        if version.exists():  # somebody removed a part of it
            shutil.rmtree(partial, ignore_errors=True)
            version.rename(partial)
        partial.mkdir(exist_ok=True)
        missing = [file for file in files if not self._have(file, partial)]
        here = sum(_size(partial / f"{file.name}.part") for file in missing)
        needed = sum(file.size for file in missing) - here
        _check_space(needed, partial)
        meter = Meter(files, needed, self._progress)
        self._fetch_all(missing, partial, meter)
        meter.report()
        (partial / _LIST).write_text(_list_text(self._remote, files))
        for written in (partial / _LIST, partial):
            _sync(written)
        partial.rename(version)
        _sync(self._folder)
        return meter.received

    def _have(self, file: RemoteFile, partial: Path) -> bool:
        """Whether a file is here, from an earlier try or unchanged in the current version."""
        target, current = partial / file.name, self._folder / _CURRENT
        if target.exists() and _size(target) == file.size:
            return True
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        same = current / file.name
        known = {(f["name"], f["etag"]) for f in _read_list(current)["files"]}
        if (file.name, file.etag) not in known or _size(same) != file.size:
            return False
        try:
            target.hardlink_to(same)
        except OSError:  # a file system without links: download it
            return False
        return True

    def _fetch_all(self, files: Sequence[RemoteFile], partial: Path, meter: Meter) -> None:
        """Several files at a time, the largest first; the first failure ends all."""

        def one(file: RemoteFile) -> None:
            fetch(
                self._remote,
                file,
                partial / file.name,
                retry=self._retry,
                stop=self._stop,
                count=meter.count,
                hint=self._hint,
            )

        largest_first = sorted(files, key=lambda file: file.size, reverse=True)
        with ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="kerf-download") as pool:
            futures = [pool.submit(one, file) for file in largest_first]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # also when a signal ends the wait
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
        failures = [f.exception() for f in futures if not f.cancelled()]
        for failure in failures:
            if failure is not None and not isinstance(failure, Stopped):
                raise failure


def _check_space(needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadError(
            f"the disk is too small: {needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free",
            where=str(folder.parent),
            hint="Free space or use a larger volume; the next try goes on where this one ended",
        )


def _size(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def _list_text(remote: Remote, files: Sequence[RemoteFile]) -> str:
    listed = [{"name": f.name, "size": f.size, "etag": f.etag} for f in files]
    return json.dumps(
        {"source": remote.where, "revision": remote.revision, "files": listed}, indent=1
    )


def _read_list(version: Path) -> dict[str, Any]:
    """What ``_list_text`` wrote; no files if there is nothing readable."""
    try:
        found = json.loads((version / _LIST).read_text())
        return {"revision": found["revision"], "files": list(found["files"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {"revision": None, "files": []}


def _is_complete(version: Path) -> bool:
    """Whether every file of a published version is there with its size."""
    files = _read_list(version)["files"]
    return bool(files) and all(_size(version / file["name"]) == file["size"] for file in files)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
