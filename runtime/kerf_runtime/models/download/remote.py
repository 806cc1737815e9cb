"""What a place to download from must be able to do, and how its failures are told.  No torch.

Three kinds of failure: ``SourceError`` (the place says no; asking again will not help), ``Interrupted``
(asking again may help; ``fetch`` does) and ``DownloadError`` (asking again did not help).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Digest", "Hasher", "Interrupted", "Remote", "RemoteFile", "Stream"]


class Interrupted(Exception):  # noqa: N818 - not an error yet: the caller tries again
    """A transfer that ended early, or did not begin.

    Args:
        reason: what happened, for people.
        retry_after: seconds that the server asks to wait, if it does.
    """

    def __init__(self, reason: str, *, retry_after: float | None = None) -> None:
        self.reason, self.retry_after = reason, retry_after
        super().__init__(reason)


@dataclass(frozen=True)
class RemoteFile:
    """One file of a source.

    Attributes:
        name: path below the root of the source, with slashes.
        size: bytes.
        etag: changes whenever the content does.
    """

    name: str
    size: int
    etag: str


@dataclass(frozen=True)
class Digest:
    """What the content of a file must hash to.

    Attributes:
        algorithm: ``sha256``, ``git`` (sha1 of a git blob), ``md5``, or ``md5-parts`` (md5 of the md5s of
            the parts of a multipart upload, as S3 makes it).
        value: hex digits; for ``md5-parts`` followed by a dash and the number of parts.
        part_bytes: size of every part but the last, for ``md5-parts``.
        certain: whether another value proves damage.  An ETag of S3 is a digest by custom only.
    """

    algorithm: str
    value: str
    part_bytes: int = 0
    certain: bool = True


class Hasher:
    """Computes the value of a ``Digest`` piece by piece."""

    def __init__(self, digest: Digest, size: int) -> None:
        self._digest = digest
        self._parts: list[bytes] = []
        self._in_part = 0
        if digest.algorithm == "sha256":
            self._hash = hashlib.sha256()
        elif digest.algorithm == "git":
            self._hash = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        else:
            self._hash = hashlib.md5(usedforsecurity=False)

    def update(self, data: bytes) -> None:
        """Add the next bytes."""
        if not self._digest.part_bytes:
            self._hash.update(data)
            return
        view = memoryview(data)
        while view:
            room = self._digest.part_bytes - self._in_part
            self._hash.update(view[:room])
            self._in_part += len(view[:room])
            view = view[room:]
            if self._in_part == self._digest.part_bytes:
                self._end_part()

    def _end_part(self) -> None:
        self._parts.append(self._hash.digest())
        self._hash, self._in_part = hashlib.md5(usedforsecurity=False), 0

    def value(self) -> str:
        """The value of everything that was added, written as in ``Digest.value``."""
        if not self._digest.part_bytes:
            return self._hash.hexdigest()
        if self._in_part:
            self._end_part()
        whole = hashlib.md5(b"".join(self._parts), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(self._parts)}"


@dataclass(frozen=True)
class Stream:
    """The content of a file from some byte on.

    Attributes:
        offset: where it begins; 0 if the server cannot begin elsewhere.
        chunks: the bytes.  Reading raises ``Interrupted`` when the connection breaks.
        has_digest: False if the server says that the announced digest is none.
    """

    offset: int
    chunks: Iterator[bytes]
    has_digest: bool = True


class Remote(Protocol):
    """A place to download from; safe to use from several threads.

    Attributes:
        where: how errors name it, such as ``hub org/model@main``.
        path: folder or GGUF file that is wanted, below the root; None for the root.
        revision: what exactly was listed, such as a commit; None if that has no name.
    """

    where: str
    path: str | None
    revision: str | None

    def list(self) -> Sequence[RemoteFile]:
        """The files beside each other in the wanted folder, or the wanted file.

        Raises:
            SourceError: the place, or what it holds, cannot be read.
            Interrupted: try again.
        """

    def digest(self, file: RemoteFile) -> Digest | None:
        """What the content must hash to, if the place knows; raises as ``list``."""

    def open(self, file: RemoteFile, offset: int) -> AbstractContextManager[Stream]:
        """The content of ``file`` from byte ``offset`` on, below its size; raises as ``list``."""

    def close(self) -> None:
        """Close the connections."""
