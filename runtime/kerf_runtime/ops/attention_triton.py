"""Paged attention on a GPU: which kernel, with which grid and tiles.  The kernels are beside it.

Nothing here waits for the device or reads from it: every choice is made from shapes and from the plain
numbers in the metadata, and grids depend on the padded batch alone, so the launches can be recorded.
Each model needs three compiled kernels (decode, long prompts, other batches) and the store, and the three
again for layers with a sliding window.  The first call compiles and loads them, so that no step after start-up does.  Later calls hand addresses
to the compiled kernels: binding fifty arguments anew each time is most of what a launch costs.
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
MIN_KEYS = 64
"""A part of a sequence has at least this many keys: below, combining costs more than it brings."""
_LONG_QUERIES = 1024
"""Batches in which a sequence has more new tokens than this use larger tiles."""
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


def mixed_tiles(group: int, head_size: int, itemsize: int, *, long: bool) -> Tiles:
    """Tiles of the mixed kernel; a tile of rows holds ``rows // group`` tokens.

    Large tiles read keys less often; small ones give short batches enough programs to fill the device.
    """
    if itemsize == 4:
        return Tiles(32, 32, 1, 4)
    if head_size > 128:
        return Tiles(64, 32, 2, 4)
    return Tiles(256, 64, 5, 8) if long else Tiles(64, 64, 3, 4)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    output_scale: Tensor | None = None,
    window: int = 0,
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
        window: tokens, itself included, that a token attends to; 0 for all before it.
    """
    arguments = (q, k, v, output, key_cache, value_cache, metadata, output_scale)
    kernels = _kernels_for(*arguments, window)
    if metadata.uniform_decode:
        _decode(kernels, *arguments)
    else:
        _mixed(kernels, *arguments)


def choose_splits(sequences: int, kv_heads: int, multiprocessors: int) -> int:
    """Parts per sequence so that the programs fill the device about twice, from the batch size alone."""
    wanted = -(-2 * multiprocessors // (sequences * kv_heads))
    return max(1, min(MAX_SPLITS, _power_of_two(wanted)))


@dataclass(frozen=True)
class _Kernel:
    """One kernel with everything that is the same in all launches of a model.

    Attributes:
        function: the kernel as it is written.
        strides: numbers that follow the pointers.
        constants: arguments known when it was compiled, in the kernel's order.
        warps: per program.
        compiled: what to launch; None under Triton's interpreter.
    """

    function: Any
    strides: tuple[int, ...]
    constants: dict[str, Any]
    warps: int
    compiled: Any = None

    def ready(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> _Kernel:
        """The kernel compiled for such arguments, and loaded."""
        if isinstance(self.function, InterpretedFunction):
            return self
        compiled = self.function.warmup(
            *tensors, *self.strides, *numbers, **self.constants, grid=(1,), num_warps=self.warps
        )
        compiled._init_handles()
        return _Kernel(self.function, self.strides, self.constants, self.warps, compiled)

    def launch(
        self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], *numbers: float
    ) -> None:
        """Launch on the current stream."""
        compiled = self.compiled
        if compiled is None:
            self.function[grid](*tensors, *self.strides, *numbers, **self.constants)
            return
        stream = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
        compiled.run(
            *grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            *(None, None, None),  # what profilers of Triton would hook in
            *(tensor.data_ptr() for tensor in tensors),
            *self.strides,
            *numbers,
            *self.constants.values(),
        )


@dataclass(frozen=True)
class _Workspace:
    """Where parts of sequences meet, at addresses that recorded graphs may keep.

    Launches follow one another on one stream, so one workspace serves them all.  It is bounded, because
    sequences are split only while there are fewer of them than programs that the device can run.

    Attributes:
        parts: that it holds, of all sequences and key heads together.
        partial: float32, weighted values.
        statistics: float32, maxima and sums.
        arrivals: int32, zero between launches.
    """

    parts: int
    partial: Tensor
    statistics: Tensor
    arrivals: Tensor

    @classmethod
    def allocate(cls, device: torch.device, rows: int, padded_size: int) -> _Workspace:
        """For parts of ``rows`` query rows and ``padded_size`` numbers per row.

        Raises:
            CaptureError: a graph is being captured; memory cannot be cleared now.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "attention runs for the first time during a capture",
                hint="Run the batch once without a graph before capturing it",
            )
        parts = 8 * _multiprocessors(device)
        # Outside any inference mode, so that later launches may write to it in every mode.
        with torch.inference_mode(False):
            return cls(
                parts,
                torch.empty(parts * rows * padded_size, dtype=torch.float32, device=device),
                torch.empty(parts * rows * 2, dtype=torch.float32, device=device),
                torch.zeros(parts, dtype=torch.int32, device=device),
            )


@dataclass(frozen=True)
class _Kernels:
    """All kernels of a model's attention, and the numbers that launching them takes."""

    decode: _Kernel
    store: _Kernel
    long: _Kernel
    other: _Kernel
    workspace: _Workspace


_ready: dict[tuple[Any, ...], _Kernels] = {}


def _kernels_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    output_scale: Tensor | None,
    window: int,
) -> _Kernels:
    """The kernels for such arguments: compiled at the first call, found at every later one.

    Raises:
        ValueError: the numbers of a head do not lie side by side.
    """
    scale = output if output_scale is None else output_scale
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | output.data_ptr() | scale.data_ptr()
    addresses |= metadata.block_table.data_ptr() | metadata.slot_mapping.data_ptr()
    addresses |= metadata.seq_lens.data_ptr() | metadata.query_start.data_ptr()
    layout = (q.stride(), k.stride(), v.stride(), output.stride())
    key = (
        *(q.device, q.dtype, output.dtype, output_scale is None, addresses % 16 == 0),
        *(q.shape[1:], key_cache.shape[1:3], layout, window),
    )
    if key in _ready:
        return _ready[key]
    if any(strides[2] != 1 for strides in layout):
        raise ValueError(f"attention needs heads of adjacent numbers, not strides {layout}")
    strides = tuple(stride for each in layout for stride in each[:2])
    heads, size = q.shape[1:]
    block_size, kv_heads = key_cache.shape[1:3]
    group = heads // kv_heads
    shared = {"G": group, "KV_HEADS": kv_heads, "D": size, "D_PAD": _power_of_two(size)}

    def constants(tiles: Tiles, **own: int) -> dict[str, Any]:
        return {
            **shared,
            "S": block_size,
            **own,
            "ROWS": tiles.rows,
            "TILE": tiles.keys,
            "STAGES": tiles.stages,
            # float32 products stay float32; the other types have one precision anyway.
            "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
            "SCALED": output_scale is not None,
            "FP8_MAX": FP8_MAX,
            "WINDOW": window,
        }

    tiles = decode_tiles(group, size, q.element_size())
    caches = (key_cache, value_cache)
    workspace = _Workspace.allocate(q.device, tiles.rows, shared["D_PAD"])
    decode = _Kernel(
        decode_kernel,
        strides,
        constants(
            tiles,
            MIN_TILES=max(1, MIN_KEYS // tiles.keys),
            G_PAD=_power_of_two(group),
            UNROLL=8,
        ),
        tiles.warps,
    ).ready(
        (
            *(q, k, v, output, scale, *caches, metadata.block_table, metadata.seq_lens),
            *(metadata.slot_mapping, workspace.partial, workspace.statistics, workspace.arrivals),
        ),
        (metadata.block_table.stride(0), 1, 1.0),
    )
    store = _Kernel(
        store_kernel,
        strides[2:],
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "D": size,
            "STORE": _power_of_two(kv_heads * size),
            "ZERO": _power_of_two(heads * size),
        },
        4,
    ).ready((k, v, output, *caches, metadata.slot_mapping), ())
    mixed = []
    for long in (True, False):
        tiles_of = mixed_tiles(group, size, q.element_size(), long=long)
        kernel = _Kernel(
            mixed_kernel,
            strides[:2] + strides[-2:],
            constants(tiles_of, QUERIES=tiles_of.rows // group),
            tiles_of.warps,
        )
        tensors = (q, output, scale, *caches, metadata.block_table, metadata.query_start)
        mixed.append(
            kernel.ready((*tensors, metadata.seq_lens), (metadata.block_table.stride(0), 1, 1.0))
        )
    _ready[key] = _Kernels(decode, store, mixed[0], mixed[1], workspace)
    return _ready[key]


def _decode(
    kernels: _Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    output_scale: Tensor | None,
) -> None:
    sequences, _, size = q.shape
    kv_heads = key_cache.shape[2]
    workspace = kernels.workspace
    splits = choose_splits(sequences, kv_heads, _multiprocessors(q.device))
    splits = min(splits, max(1, workspace.parts // (sequences * kv_heads)))
    kernels.decode.launch(
        (kv_heads, splits, sequences),
        (
            q,
            k,
            v,
            output,
            output if output_scale is None else output_scale,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.slot_mapping,
            workspace.partial,
            workspace.statistics,
            workspace.arrivals,
        ),
        metadata.block_table.stride(0),
        splits,
        _LOG2_E / math.sqrt(size),
    )


def _mixed(
    kernels: _Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    output_scale: Tensor | None,
) -> None:
    tokens, _, size = q.shape
    sequences = metadata.seq_lens.shape[0]
    caches = (key_cache, value_cache)
    kernels.store.launch((tokens, 1, 1), (k, v, output, *caches, metadata.slot_mapping))
    other = 0 < metadata.max_query_len <= _LONG_QUERIES
    kernel = kernels.other if other else kernels.long
    kernel.launch(
        (key_cache.shape[2], tokens // kernel.constants["QUERIES"] + sequences, 1),
        (
            q,
            output,
            output if output_scale is None else output_scale,
            *caches,
            metadata.block_table,
            metadata.query_start,
            metadata.seq_lens,
        ),
        metadata.block_table.stride(0),
        sequences,
        _LOG2_E / math.sqrt(size),
    )


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


_cores: dict[torch.device, int] = {}


def _multiprocessors(device: torch.device) -> int:
    """Of the device; a CPU (Triton's interpreter) counts as four."""
    if device not in _cores:
        properties: Any = (
            torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        )
        _cores[device] = properties.multi_processor_count if properties else 4
    return _cores[device]
