"""Paged attention on a GPU: which kernel, with which grid and tiles.  The kernels are beside it.

Nothing here waits for the device or reads from it: every choice is made from shapes and from the plain
numbers in the metadata, and grids depend on the padded batch alone, so the launches can be recorded.
Each model needs at most three compiled kernels (decode, long queries, short queries) beside the store;
the first call compiles them all, so that no step after start-up ever does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import AttentionMetadata
from kerf_runtime.ops.triton.attention import decode_kernel, mixed_kernel, store_kernel

__all__ = ["Tiles", "decode_tiles", "mixed_tiles", "paged_attention"]

FP8_MAX = 448.0
"""Largest float8_e4m3fn."""
MAX_SPLITS = 32
MIN_KEYS = 128
"""A part of a sequence has at least this many keys: below, combining costs more than it brings."""
_SHORT_QUERIES = 16
"""Batches whose sequences have at most this many new tokens use smaller tiles."""
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tiles:
    """How one kernel is cut: query rows and keys per tile, pipeline depth, warps per program."""

    rows: int
    keys: int
    stages: int
    warps: int


def decode_tiles(group: int, head_size: int, itemsize: int) -> Tiles:
    """Tiles of the decode kernel; matrix instructions want at least 16 rows."""
    rows = max(16, _power_of_two(group))
    if itemsize == 4:
        return Tiles(rows, 32, 1, 4)
    if head_size > 128:
        return Tiles(rows, 32, 3, 4)
    return Tiles(rows, 64, 3, 4)


def mixed_tiles(group: int, head_size: int, itemsize: int, *, short: bool) -> Tiles:
    """Tiles of the mixed kernel; a tile of rows holds ``rows // group`` tokens."""
    if itemsize == 4:
        return Tiles(16 if short else 32, 32, 1, 4)
    if short:
        return Tiles(max(16, _power_of_two(group)), 64, 2, 4)
    if head_size > 128:
        return Tiles(64, 32, 2, 4)
    return Tiles(128, 64, 3, 8)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    output_scale: Tensor | None = None,
) -> None:
    """Store ``k`` and ``v`` in the cache, then attend causally over each sequence's cached tokens.

    Args:
        q: [T, H, D], any strides but the last, which must be 1.
        k: [T, K, D], this step's keys.
        v: [T, K, D], this step's values.
        output: [T, H, D], overwritten; rows of padding become zeros.  float8_e4m3fn with a scale.
        key_cache: [N, S, K, D], contiguous.
        value_cache: [N, S, K, D], contiguous.
        metadata: of the batch.
        output_scale: float32 [1]; the result is divided by it and clamped.
    """
    inputs = _Inputs(q, k, v, output, key_cache, value_cache, metadata, output_scale)
    if inputs.kind not in _compiled and not isinstance(decode_kernel, InterpretedFunction):
        _compile_all(inputs)
    if metadata.uniform_decode:
        _decode(inputs).run()
        return
    _store(inputs).run()
    _mixed(inputs, short=0 < metadata.max_query_len <= _SHORT_QUERIES).run()


def choose_splits(sequences: int, kv_heads: int, multiprocessors: int) -> int:
    """Parts per sequence so that the programs fill the device about twice, from the batch size alone."""
    wanted = -(-2 * multiprocessors // (sequences * kv_heads))
    return max(1, min(MAX_SPLITS, _power_of_two(wanted)))


@dataclass(frozen=True)
class _Inputs:
    """The arguments of one call, under names."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    output_scale: Tensor | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What compiled kernels depend on."""
        q, cache = self.q, self.key_cache
        return q.device, q.dtype, self.output.dtype, q.shape[1:], cache.shape[1:3]


@dataclass(frozen=True)
class _Launch:
    """A kernel, its grid and its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants)

    def compile(self) -> None:
        """Have the kernel ready without running it."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants)


_compiled: set[tuple[Any, ...]] = set()


def _compile_all(inputs: _Inputs) -> None:
    """Every kernel that this model may ever launch: later steps find them compiled."""
    for launch in (
        _decode(inputs),
        _store(inputs),
        _mixed(inputs, short=False),
        _mixed(inputs, short=True),
    ):
        launch.compile()
    _compiled.add(inputs.kind)


def _decode(inputs: _Inputs) -> _Launch:
    q, k, v, output, metadata = inputs.q, inputs.k, inputs.v, inputs.output, inputs.metadata
    sequences, heads, size = q.shape
    block_size, kv_heads = inputs.key_cache.shape[1:3]
    group = heads // kv_heads
    tiles = decode_tiles(group, size, q.element_size())
    splits = choose_splits(sequences, kv_heads, _multiprocessors(q.device))
    padded = _power_of_two(size)
    pairs = sequences * kv_heads
    parts = pairs * splits * tiles.rows
    partial = torch.empty(parts * padded, dtype=torch.float32, device=q.device)
    statistics = torch.empty(parts * 2, dtype=torch.float32, device=q.device)
    arguments = (
        q,
        k,
        v,
        output,
        output if inputs.output_scale is None else inputs.output_scale,
        inputs.key_cache,
        inputs.value_cache,
        metadata.block_table,
        metadata.seq_lens,
        metadata.slot_mapping,
        partial,
        statistics,
        _arrivals(q.device, pairs),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *output.stride()[:2],
        metadata.block_table.stride(0),
        splits,
        _LOG2_E / math.sqrt(size),
    )
    constants = {
        "G": group,
        "KV_HEADS": kv_heads,
        "D": size,
        "D_PAD": padded,
        "S": block_size,
        "ROWS": tiles.rows,
        "TILE": tiles.keys,
        "MIN_TILES": max(1, MIN_KEYS // tiles.keys),
        "G_PAD": _power_of_two(group),
        "UNROLL": 8,
        **_common(inputs, tiles),
    }
    return _Launch(decode_kernel, (kv_heads, splits, sequences), arguments, constants)


def _store(inputs: _Inputs) -> _Launch:
    k, v, output = inputs.k, inputs.v, inputs.output
    tokens, heads, size = inputs.q.shape
    kv_heads = inputs.key_cache.shape[2]
    arguments = (
        k,
        v,
        output,
        inputs.key_cache,
        inputs.value_cache,
        inputs.metadata.slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *output.stride()[:2],
    )
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": size,
        "STORE": _power_of_two(kv_heads * size),
        "ZERO": _power_of_two(heads * size),
        "num_warps": 4,
    }
    return _Launch(store_kernel, (tokens,), arguments, constants)


def _mixed(inputs: _Inputs, *, short: bool) -> _Launch:
    q, output, metadata = inputs.q, inputs.output, inputs.metadata
    tokens, heads, size = q.shape
    block_size, kv_heads = inputs.key_cache.shape[1:3]
    group = heads // kv_heads
    tiles = mixed_tiles(group, size, q.element_size(), short=short)
    queries = tiles.rows // group
    sequences = metadata.seq_lens.shape[0]
    arguments = (
        q,
        output,
        output if inputs.output_scale is None else inputs.output_scale,
        inputs.key_cache,
        inputs.value_cache,
        metadata.block_table,
        metadata.query_start,
        metadata.seq_lens,
        *q.stride()[:2],
        *output.stride()[:2],
        metadata.block_table.stride(0),
        sequences,
        _LOG2_E / math.sqrt(size),
    )
    constants = {
        "G": group,
        "KV_HEADS": kv_heads,
        "D": size,
        "D_PAD": _power_of_two(size),
        "S": block_size,
        "QUERIES": queries,
        "ROWS": tiles.rows,
        "TILE": tiles.keys,
        **_common(inputs, tiles),
    }
    return _Launch(mixed_kernel, (kv_heads, tokens // queries + sequences), arguments, constants)


def _common(inputs: _Inputs, tiles: Tiles) -> dict[str, Any]:
    """Constants of both attention kernels."""
    return {
        "STAGES": tiles.stages,
        # float32 products stay float32; the other types have one precision anyway.
        "PRECISION": "ieee" if inputs.q.dtype is torch.float32 else "tf32",
        "SCALED": inputs.output_scale is not None,
        "FP8_MAX": FP8_MAX,
        "num_warps": tiles.warps,
    }


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


_counters: dict[torch.device, list[Tensor]] = {}
_cores: dict[torch.device, int] = {}


def _multiprocessors(device: torch.device) -> int:
    """Of the device; a CPU (Triton's interpreter) counts as four."""
    if device not in _cores:
        properties: Any = (
            torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        )
        _cores[device] = properties.multi_processor_count if properties else 4
    return _cores[device]


def _arrivals(device: torch.device, count: int) -> Tensor:
    """Counters that are zero between launches, at an address that recorded graphs may keep.

    Grown by adding a larger tensor; earlier ones stay alive, because graphs may use them.

    Raises:
        CaptureError: they would have to grow during a capture, which cannot clear memory now.
    """
    tensors = _counters.setdefault(device, [])
    if not tensors or tensors[-1].numel() < count:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"attention's counters for {count} pairs of sequence and head do not exist yet",
                hint="Run the batch once without a graph before capturing it",
            )
        # Outside any inference mode, so that later launches may write to it in every mode.
        with torch.inference_mode(False):
            tensors.append(
                torch.zeros(max(4096, _power_of_two(count)), dtype=torch.int32, device=device)
            )
    return tensors[-1]
