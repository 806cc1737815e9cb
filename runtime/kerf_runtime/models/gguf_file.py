"""Reads the header of a GGUF file: metadata and where each tensor's data lies.  No torch.

The reader of the ``gguf`` package builds one numpy view per vocabulary entry, which takes 3.3 s for
the 49,152 tokens of SmolLM2, in two processes; this one walks the same bytes with ``struct``.  The
package still supplies the table of tensor types and the dequantisation.  Every offset is checked
against the size of the file before anything is read, so a truncated download is named as such.

Layout (GGUF 2 and 3, little endian): magic, version, counts, key/value pairs, tensor descriptions,
padding to ``general.alignment``, tensor data.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from kerf_runtime.errors import ModelError

__all__ = ["MERGE_SHARDS", "GgufFile", "GgufTensor", "is_shard", "read_gguf"]

MERGE_SHARDS = "A model in several GGUF files is not supported: merge them into one"
"""What to do about shards."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_DIMS = 8
_SHARD_NAME = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        shape: row-major shape (GGUF stores the reverse).
        type_id: ``gguf.GGMLQuantizationType`` as an integer.
        type_name: its name, such as ``Q4_1``.
        offset: first byte in the file.
        nbytes: size in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed header."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_shard(name: str) -> bool:
    """Whether a file with this name is one of several that make a model: ``NAME-00001-of-00003.gguf``."""
    return _SHARD_NAME.search(name) is not None


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file, with the promise that all tensor data is inside the file.

    Raises:
        ModelError: unreadable, not GGUF, a version or tensor type we cannot read, a shard, or truncated.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read the file: {error.strerror}", where=str(path)) from None
    return _read_cached(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _read_cached(path: Path, size: int, _mtime: int) -> GgufFile:
    if size < 24:
        raise _truncated(path, size, "its header")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data, size)
    except OSError as error:
        raise ModelError(f"cannot read the file: {error.strerror}", where=str(path)) from None


def _truncated(path: Path, size: int, part: str) -> ModelError:
    return ModelError(
        f"the GGUF file is truncated: it ends after {size} bytes, inside {part}",
        where=str(path),
        hint="Copy or download it again and compare its size with the original",
    )


class _Cursor:
    """A position in the mapped file; every read is checked against the end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0
        self.part = "its header"

    def take(self, count: int) -> int:
        """Advance by ``count`` bytes; returns where they start."""
        start = self.at
        if count > self.size - start:
            raise _truncated(self.path, self.size, self.part)
        self.at = start + count
        return start

    def scalar(self, kind: struct.Struct) -> Any:
        return kind.unpack_from(self.data, self.take(kind.size))[0]

    def string(self) -> str:
        length = self.scalar(_U64)
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise ModelError(f"unknown metadata type {kind} in {self.part}", where=str(self.path))
        return self.scalar(scalar)

    def array(self) -> list[Any]:
        kind, length = self.scalar(_U32), self.scalar(_U64)
        if kind in _SCALARS:
            scalar = _SCALARS[kind]
            start = self.take(length * scalar.size)
            layout = f"<{length}{scalar.format[-1]}"
            return list(struct.unpack_from(layout, self.data, start))
        return [self.value(kind) for _ in range(length)]


def _parse(path: Path, data: mmap.mmap, size: int) -> GgufFile:
    cursor = _Cursor(path, data, size)
    if data[: len(_MAGIC)] != _MAGIC:
        raise ModelError(
            f"not a GGUF file: it starts with {bytes(data[:4])!r}",
            where=str(path),
            hint="A download that saved an error page or a Git LFS pointer looks like this",
        )
    cursor.take(len(_MAGIC))
    version = cursor.scalar(_U32)
    if version not in _VERSIONS:
        raise ModelError(
            f"GGUF version {version} is not supported",
            where=str(path),
            hint=f"Supported versions: {', '.join(map(str, _VERSIONS))}, little endian",
        )
    tensor_count, pair_count = cursor.scalar(_U64), cursor.scalar(_U64)

    cursor.part = "the metadata"
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        cursor.part = f"the metadata (key {key})"
        metadata[key] = cursor.value(cursor.scalar(_U32))

    shards = metadata.get("split.count", 1)
    if shards not in (0, 1):
        raise ModelError(
            f"the file is one of {shards} shards of a model", where=str(path), hint=MERGE_SHARDS
        )

    cursor.part = "the list of tensors"
    described = []
    for _ in range(tensor_count):
        name = cursor.string()
        dims = cursor.scalar(_U32)
        if dims > _MAX_DIMS:
            raise ModelError(f"tensor {name} claims {dims} dimensions", where=str(path))
        shape = tuple(cursor.scalar(_U64) for _ in range(dims))[::-1]
        described.append((name, shape, cursor.scalar(_U32), cursor.scalar(_U64)))

    alignment = int(metadata.get("general.alignment", 32)) or 32
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: _tensor(path, size, name, shape, type_id, start + offset)
        for name, shape, type_id, offset in described
    }
    return GgufFile(path, metadata, tensors)


def _tensor(
    path: Path, size: int, name: str, shape: tuple[int, ...], type_id: int, offset: int
) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.3 s, only when needed

    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise ModelError(
            f"tensor {name} has the unknown type {type_id}",
            where=str(path),
            hint="The file may have been made by a newer program; convert it to Q8_0 or F16",
        ) from None
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    nbytes = prod(shape) // per_block * block_bytes
    if offset + nbytes > size:
        raise _truncated(path, size, f"the data of tensor {name}, which ends at {offset + nbytes}")
    return GgufTensor(name, shape, type_id, kind.name, offset, nbytes)
