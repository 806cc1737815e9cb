"""Finds tensors by name in safetensors files or a GGUF file, and reads them onto the CPU one at a time.

What lies in a file as it is needed can be read past this module: ``stored`` says where.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kerf_runtime.errors import ModelError
from kerf_runtime.models.checkpoint import Checkpoint, read_json
from kerf_runtime.models.gguf_file import GgufTensor, read_gguf
from kerf_runtime.models.upload import StoredTensor

__all__ = ["GgufSource", "SafetensorsSource", "WeightSource", "open_source"]

_INDEX = "model.safetensors.index.json"

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""By their names in a safetensors file."""


class WeightSource(Protocol):
    """Named tensors of one checkpoint; a context manager that closes its files."""

    where: str
    is_gguf: bool

    def names(self) -> frozenset[str]:
        """Every tensor in the checkpoint."""

    def file(self, name: str) -> str:
        """Path of the file that holds the tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape, read without the data."""

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU: as stored, or float32 if it was quantised."""

    def stored(self, name: str) -> StoredTensor | None:
        """Where its bytes lie; None if it must be read by ``read``."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def open_source(checkpoint: Checkpoint) -> WeightSource:
    """The tensors of a checkpoint.

    Raises:
        ModelError: no weights, a missing shard, or a damaged file.
    """
    if checkpoint.gguf is not None:
        return GgufSource(checkpoint.gguf)
    return SafetensorsSource(checkpoint.path)


class SafetensorsSource:
    """A folder with ``model.safetensors``, shards with an index, or any ``*.safetensors``."""

    is_gguf = False

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._stored: dict[str, StoredTensor] = {}
        for path in _weight_files(folder):
            try:
                path.open("rb").close()  # says why not, which the library does not
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                self._opened.update(dict.fromkeys(file.keys(), file))
                self._paths.update(dict.fromkeys(file.keys(), path))
                self._stored.update(_stored_tensors(path))
            except OSError as error:
                self._stack.close()
                raise ModelError(
                    f"the safetensors file cannot be read: {error.strerror or error}",
                    where=str(path),
                ) from None
            except SafetensorError as error:
                self._stack.close()
                raise ModelError(
                    f"the safetensors file cannot be read: {error}",
                    where=str(path),
                    hint="It may be truncated: copy or download it again",
                ) from None

    def names(self) -> frozenset[str]:
        """Every tensor in the checkpoint."""
        return frozenset(self._opened)

    def file(self, name: str) -> str:
        """Path of the shard."""
        return str(self._paths[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape, read without the data."""
        return tuple(self._opened[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The tensor as stored."""
        tensor: Tensor = self._opened[name].get_tensor(name)
        return tensor

    def stored(self, name: str) -> StoredTensor | None:
        """Where its bytes lie."""
        return self._stored.get(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def _weight_files(folder: Path) -> list[Path]:
    """The files of a folder that hold weights.

    Raises:
        ModelError: there is none, or one that the index names is missing, elsewhere or no file.
    """
    index = folder / _INDEX
    files = _files_of_index(index) if index.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            "the folder has no *.safetensors file",
            where=str(folder),
            hint="Weights in other formats (pytorch_model.bin) are not read; convert them",
        )
    for path in files:
        if path.exists() and not path.is_file():
            raise ModelError("the weights are not in a regular file", where=str(path))
    return files


def _files_of_index(index: Path) -> list[Path]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelError("the index has no weight_map", where=str(index))
    names = sorted({Path(str(name)) for name in mapping.values()})
    for name in names:
        if name.is_absolute() or ".." in name.parts:
            raise ModelError(f"the index leads out of its folder: {name}", where=str(index))
    files = [index.parent / name for name in names]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(files)} weight files are missing: {', '.join(missing)}",
            where=str(index.parent),
            hint="Copy or download them again",
        )
    return files


def _stored_tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The places in a file that the library has accepted: the length of a JSON header, the header, the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        dtype = _DTYPES.get(entry.get("dtype"))
        if dtype is not None:
            first = 8 + length + entry["data_offsets"][0]
            yield name, StoredTensor(path, first, dtype, tuple(entry["shape"]))


class GgufSource:
    """A GGUF file; quantised tensors are expanded to float32 by the ``gguf`` package."""

    is_gguf = True

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path
        self._header = read_gguf(path)
        self._data = np.memmap(path, mode="r")

    def names(self) -> frozenset[str]:
        """Every tensor in the file."""
        return frozenset(self._header.tensors)

    def file(self, name: str) -> str:
        """The one file."""
        del name
        return self.where

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape, from the header."""
        return self._header.tensors[name].shape

    def read(self, name: str) -> Tensor:
        """The tensor as float32.

        Raises:
            ModelError: the ``gguf`` package cannot expand this quantisation.
        """
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self._header.tensors[name]
        raw = self._data[info.offset : info.offset + info.nbytes]
        kind = GGMLQuantizationType(info.type_id)
        values: np.ndarray
        if kind is GGMLQuantizationType.F32:
            values = raw.view(np.float32).reshape(info.shape)
        elif kind is GGMLQuantizationType.F16:
            values = raw.view(np.float16).reshape(info.shape)
        else:
            try:
                values = dequantize(raw.reshape(_fewer_rows(info), -1), kind).reshape(info.shape)
            except NotImplementedError:
                raise ModelError(
                    f"tensor {name} has the type {info.type_name}, which cannot be expanded",
                    where=self.where,
                    hint="Convert the file to F16, Q8_0, Q4_1 or another common type",
                ) from None
        # np.array copies: a tensor must not alias the read-only map, which may be closed first.
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def stored(self, name: str) -> StoredTensor | None:
        """Where its bytes lie, unless it is quantised."""
        info = self._header.tensors[name]
        dtype = {"F32": torch.float32, "F16": torch.float16}.get(info.type_name)
        return None if dtype is None else StoredTensor(self._path, info.offset, dtype, info.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        del self._data


def _fewer_rows(info: GgufTensor) -> int:
    """A number of rows that divides the tensor into whole blocks, each row at least 64 Ki elements.

    The ``gguf`` package works 16 rows at a time; with the short rows of a small model most of the
    time goes into the calls (2.1 s for SmolLM2 instead of 0.9 s).
    """
    rows, size = prod(info.shape[:-1]), info.shape[-1]
    while rows % 2 == 0 and size < 65536:
        rows, size = rows // 2, size * 2
    return rows
