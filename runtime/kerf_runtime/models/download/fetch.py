"""One file: resumed where the last try ended, verified, then renamed to its name.  No torch.

<name>.part    the bytes so far, which the next try goes on with
<name>         complete and verified
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from kerf_runtime.errors import DownloadError
from kerf_runtime.models.download.remote import (
    Digest,
    Hasher,
    Interrupted,
    Remote,
    RemoteFile,
)

__all__ = ["PATIENT", "Retry", "Stopped", "fetch", "persist"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Retry:
    """How often and how patiently to try again.

    Attributes:
        attempts: tries in a row that bring nothing before it is given up.
        seconds: wait after the first failure; doubles with each, up to ``longest``.
        longest: longest wait, in seconds, also of what a server asks for.
    """

    attempts: int = 6
    seconds: float = 1.0
    longest: float = 30.0

    def delay(self, failures: int, asked: float | None) -> float:
        """Seconds to wait after ``failures`` failures in a row."""
        own = self.seconds * 2.0 ** (failures - 1)
        return min(max(own, asked or 0.0), self.longest)


PATIENT = Retry()


class Stopped(Exception):  # noqa: N818 - the reason is in the transfer that failed
    """Another file failed: this one was left as it is."""


def persist(
    action: Callable[[], T], *, where: str, retry: Retry, stop: threading.Event, hint: str
) -> T:
    """``action()``, tried again while it is interrupted.

    Raises:
        DownloadError: it was interrupted too often.
        Stopped: ``stop`` was set while waiting.
    """
    failures = 0
    while True:
        try:
            return action()
        except Interrupted as problem:
            failures += 1
            _wait(problem, failures, where=where, retry=retry, stop=stop, hint=hint)


def fetch(
    remote: Remote,
    file: RemoteFile,
    target: Path,
    *,
    retry: Retry,
    stop: threading.Event,
    count: Callable[[int], None],
    hint: str,
) -> None:
    """Download ``file`` to ``target``.

    Args:
        remote: where it comes from.
        file: what to download.
        target: its name here; the folder exists.
        retry: how often a broken transfer is taken up again.
        stop: set by another thread to end this one.
        count: told the bytes that came or, below 0, were thrown away.
        hint: what to do about a network that fails.

    Raises:
        SourceError: refused.
        DownloadError: interrupted too often, or damaged twice.
        OSError: of the disk.
        Stopped: ``stop`` was set.
    """
    where = f"{remote.where}: {file.name}"
    digest = persist(lambda: remote.digest(file), where=where, retry=retry, stop=stop, hint=hint)
    part = target.with_name(f"{target.name}.part")
    failures, damaged = 0, ""
    known = part.stat().st_size if part.exists() else 0
    while True:
        before = known
        try:
            with part.open("r+b" if part.exists() else "w+b") as output:
                transfer = _Transfer(remote, file, output, digest, count, stop)
                try:
                    value = transfer.run()
                finally:
                    known = transfer.size
        except Interrupted as problem:
            failures = failures + 1 if known <= before else 1
            _wait(problem, failures, where=where, retry=retry, stop=stop, hint=hint)
            continue
        if value is None or digest is None or value == digest.value:
            break
        if damaged == value and not digest.certain:
            log.warning("%s: its ETag is no digest; two downloads were equal", where)
            break
        if damaged:
            raise DownloadError(
                f"the file was damaged twice on its way: {digest.algorithm} is {value}, not {digest.value}",
                where=where,
                hint="A proxy or a failing disk can do this; check them and try again",
            )
        log.warning("%s: damaged on its way, downloading it again", where)
        damaged = value
        part.unlink()
        count(-known)
        known = 0
    part.replace(target)


def _wait(
    problem: Interrupted,
    failures: int,
    *,
    where: str,
    retry: Retry,
    stop: threading.Event,
    hint: str,
) -> None:
    if failures >= retry.attempts:
        raise DownloadError(
            f"{problem.reason} (tried {failures} times)", where=where, hint=hint
        ) from problem
    log.debug("%s: %s; trying again", where, problem.reason)
    if stop.wait(retry.delay(failures, problem.retry_after)):
        raise Stopped


class _Transfer:
    """One try: what is in ``output`` already, then the rest from the remote."""

    def __init__(
        self,
        remote: Remote,
        file: RemoteFile,
        output: BinaryIO,
        digest: Digest | None,
        count: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self._remote, self._file, self._output = remote, file, output
        self._digest, self._count, self._stop = digest, count, stop
        self._hasher = None if digest is None else Hasher(digest, file.size)
        self.size = os.fstat(output.fileno()).st_size

    def run(self) -> str | None:
        """Complete the file; returns what it hashes to, or None if nothing is to be compared.

        Raises:
            Interrupted: the file has ``size`` bytes; another try goes on there.
        """
        if self.size > self._file.size:
            self._start_over()
        self._read_known()
        verify = True
        if self.size < self._file.size:
            with self._remote.open(self._file, self.size) as stream:
                verify = stream.has_digest
                if stream.offset != self.size:
                    self._start_over()
                for chunk in stream.chunks:
                    self._write(chunk)
        self._output.flush()
        if self.size != self._file.size:
            raise Interrupted(f"the file ended after {self.size} of {self._file.size} bytes")
        os.fsync(self._output.fileno())
        return self._hasher.value() if verify and self._hasher is not None else None

    def _start_over(self) -> None:
        self._output.truncate(0)
        self._output.seek(0)
        self._count(-self.size)
        self.size = 0
        self._hasher = None if self._digest is None else Hasher(self._digest, self._file.size)

    def _read_known(self) -> None:
        """Hash what an earlier try left."""
        if self._hasher is None:
            self._output.seek(self.size)
            return
        while data := self._output.read(_CHUNK_BYTES):
            self._check_stop()
            self._hasher.update(data)

    def _write(self, chunk: bytes) -> None:
        self._check_stop()
        if self.size + len(chunk) > self._file.size:
            self._start_over()
            raise Interrupted(f"more came than the {self._file.size} bytes of the file")
        self._output.write(chunk)
        if self._hasher is not None:
            self._hasher.update(chunk)
        self.size += len(chunk)
        self._count(len(chunk))

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped
