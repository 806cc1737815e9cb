"""Checkpoints of a known shape with random weights: ``python -m benchmarks.checkpoint MODEL FOLDER``.

A start-up that reads no weights says nothing of the time that they take.  Weights are made where they are made
fastest and go to disk one tensor per thread at a time, so that host memory never holds the model; a process of
its own gives the GPU back before a server starts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import string
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import tokenizers
import torch
from benchmarks.shapes import CONFIGS
from torch import Tensor

from kerf_runtime.config.deployment import LoadFormat
from kerf_runtime.config.engine import DType
from kerf_runtime.models.dummy import NoTensors
from kerf_runtime.models.loader import load_model, torch_dtype
from kerf_runtime.models.registry import family_of

__all__ = ["shard_plan", "stored_tensors", "write_checkpoint", "write_shard", "write_tokenizer"]

SHARDS = 4
_BUFFER_BYTES = 2**24
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_checkpoint(model: str, folder: Path, *, device: torch.device) -> int:
    """``config.json``, ``tokenizer.json``, and the weights in shards with an index; returns their bytes.

    Each file is read once afterwards, so that it is in the page cache whatever the file system does with writes.
    """
    config = CONFIGS[model]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "tokenizer.json", config["vocab_size"])
    tensors = stored_tensors(folder, device=device, dtype=torch_dtype(DType(config["dtype"])))
    shards = shard_plan({name: tensor.nbytes for name, tensor in tensors.items()}, SHARDS)
    files = [
        folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {
            name: file.name for file, names in zip(files, shards, strict=True) for name in names
        },
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with ThreadPoolExecutor(len(shards)) as pool:
        parts = [{name: tensors[name] for name in names} for names in shards]
        list(pool.map(write_shard, files, parts))
        list(pool.map(_read, files))
    return sum(file.stat().st_size for file in files)


def stored_tensors(folder: Path, *, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights by the names that a checkpoint of ``folder``'s configuration has for them."""
    loaded = load_model(folder, dtype=dtype, device=device, load_format=LoadFormat.DUMMY)
    family = importlib.import_module(family_of(loaded.config).weights)
    parameters = dict(loaded.model.named_parameters(remove_duplicate=False))
    tensors = {}
    for rule in family.plan(loaded.config, NoTensors(str(folder))).rules:
        parts = parameters[rule.parameter].detach().split(rule.rows)
        for name, part in zip(rule.sources, parts, strict=True):
            tensors[name] = part.t() if rule.transposed else part
    return tensors


def shard_plan(sizes: Mapping[str, int], shards: int) -> list[list[str]]:
    """The names in order, in at most ``shards`` parts of about the same number of bytes, none empty."""
    total = sum(sizes.values())
    parts: dict[int, list[str]] = {}
    before = 0
    for name, size in sizes.items():
        # A tensor belongs where its middle lies.
        parts.setdefault((2 * before + size) * shards // (2 * total), []).append(name)
        before += size
    return [parts[number] for number in sorted(parts)]


def write_shard(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file: the length of the header, the header, the tensors one after another."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            stream.write(tensor.contiguous().cpu().view(torch.uint8).numpy().data)


def write_tokenizer(file: Path, vocab_size: int) -> None:
    """Every token id has a text of its own, in ASCII: no piece of an answer is empty or waits for another."""
    letters = [*string.digits, *string.ascii_letters, *string.punctuation, "Ġ"]
    words = ("Ġ" + "".join(word) for word in _words())
    names = [*letters, *(next(words) for _ in range(vocab_size - len(letters)))]
    vocab = {name: number for number, name in enumerate(names[:vocab_size])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(file))


def _words() -> Iterator[Sequence[str]]:
    """As many as are wanted, four letters each."""
    return product(string.ascii_lowercase, repeat=4)


def _read(file: Path) -> None:
    buffer = bytearray(_BUFFER_BYTES)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def main() -> None:
    """Make one and print what it is as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    size = write_checkpoint(options.model, options.folder, device=device)
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if gpu else "no GPU",
        "bytes": size,
        "seconds": time.monotonic() - started,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
