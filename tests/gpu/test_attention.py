"""The attention kernels on a real GPU against a float64 reference, over the whole grid they promise."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.attention_cases import LAYER, Case, make_case, relative_error

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64)
HEADS = {1: (4, 4), 2: (4, 2), 3: (6, 2), 4: (32, 8), 7: (14, 2), 8: (8, 1), 16: (16, 1)}
BATCHES = {
    "decode": [(5, 1), (700, 1), (0, 1), (2999, 1), (127, 1), (128, 1)],
    "mixed": [(3, 1), (0, 300), (650, 1), (333, 200), (0, 3), (1000, 64)],
    "short": [(40, 1), (0, 9), (517, 16)],
}


def check(case: Case, dtype: torch.dtype) -> None:
    output = case.run()
    error = relative_error(output, case.expected)
    assert error <= LIMITS[dtype]
    assert torch.isfinite(output.float()).all()


def cuda_case(batch: list[tuple[int, int]], dtype: torch.dtype, **options: object) -> Case:
    return make_case(batch, dtype=dtype, device="cuda", unused=float("nan"), **options)  # type: ignore[arg-type]


def grid() -> Iterator[tuple[int, int, int, torch.dtype]]:
    """Head size, group, block size, type: every pair of values, or with KERF_WHOLE_GRID=1 everything.

    A compilation takes seconds, and the whole grid has hundreds.
    """
    whole = os.environ.get("KERF_WHOLE_GRID") == "1"
    for (i, size), (j, group) in itertools.product(enumerate(SIZES), enumerate(HEADS)):
        for (m, block_size), (n, dtype) in itertools.product(
            enumerate(BLOCK_SIZES), enumerate((torch.bfloat16, torch.float16))
        ):
            if whole or ((i + j) % 3 == m and (i + j // 2) % 2 == n):
                yield size, group, block_size, dtype


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("size", "group", "block_size", "dtype"), list(grid()))
def test_matches_the_reference(
    name: str, size: int, group: int, block_size: int, dtype: torch.dtype
) -> None:
    heads, kv_heads = HEADS[group]
    case = cuda_case(
        BATCHES[name],
        dtype,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        block_size=block_size,
        padding_tokens=3,
        padding_sequences=3,
    )
    check(case, dtype)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("size", [64, 128])
def test_float32_is_exact_to_float32(name: str, size: int) -> None:
    case = cuda_case(BATCHES[name], torch.float32, heads=8, kv_heads=2, size=size, block_size=16)
    check(case, torch.float32)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [1, 16, 100, 640, 5000])
def test_a_sliding_window_hides_all_but_the_last_tokens(name: str, window: int) -> None:
    shape = {"heads": 8, "kv_heads": 2, "size": 128, "block_size": 16}
    for dtype in (torch.bfloat16, torch.float32):
        check(cuda_case(BATCHES[name], dtype, **shape, window=window), dtype)


def test_thirty_two_thousand_tokens() -> None:
    for batch in ([(32767, 1), (31, 1), (20000, 1)], [(32000, 700), (3, 1)]):
        case = cuda_case(batch, torch.bfloat16, heads=8, kv_heads=2, size=128, block_size=16)
        check(case, torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 150)), min_size=1, max_size=6),
    decode=st.booleans(),
    shape=st.sampled_from([(5, 1, 64, 1), (13, 1, 80, 3), (4, 4, 128, 16), (18, 3, 96, 64)]),
    padding=st.integers(0, 5),
    seed=st.integers(0, 999),
)
def test_any_batch(
    sequences: list[tuple[int, int]],
    decode: bool,
    shape: tuple[int, int, int, int],
    padding: int,
    seed: int,
) -> None:
    if decode:
        sequences = [(cached, 1) for cached, _ in sequences]
    heads, kv_heads, size, block_size = shape
    case = cuda_case(
        sequences,
        torch.float16,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        block_size=block_size,
        padding_tokens=padding,
        padding_sequences=padding,
        seed=seed,
    )
    check(case, torch.float16)


def test_many_launches_in_a_row_give_the_same_bits() -> None:
    """The counters that parts of a sequence arrive at are back at zero after every launch."""
    case = cuda_case(
        [(9000, 1), (100, 1), (4000, 1)], torch.bfloat16, heads=32, kv_heads=8, size=128
    )
    first = case.run()
    for _ in range(200):
        assert torch.equal(case.run(), first)


def test_new_keys_and_values_are_in_the_cache_and_padding_writes_nothing() -> None:
    for name, batch in BATCHES.items():
        case = cuda_case(batch, torch.bfloat16, size=64, padding_tokens=2, padding_sequences=2)
        before = [cache.clone() for cache in case.kv_caches[LAYER]]
        output = case.run()
        assert torch.count_nonzero(output[-2:]) == 0, name
        slots = case.metadata.slot_mapping[:-2]
        for cache, old, new in zip(case.kv_caches[LAYER], before, (case.k, case.v), strict=True):
            old.view(-1, 2, 64)[slots] = new[:-2]
            assert torch.equal(cache.view(torch.int16), old.view(torch.int16)), name


def test_views_of_a_fused_projection_are_read_and_written_correctly() -> None:
    for batch in BATCHES.values():
        case = cuda_case(batch, torch.bfloat16, size=64)
        fused = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], dim=1)
        q, k, v = fused.split([256, 128, 128], dim=1)
        case.q, case.k, case.v = q.view(-1, 4, 64), k.view(-1, 2, 64), v.view(-1, 2, 64)
        check(case, torch.bfloat16)


def test_a_float8_output_is_the_result_divided_by_the_scale_and_clamped() -> None:
    for batch in BATCHES.values():
        case = cuda_case(batch, torch.bfloat16, size=64, heads=8, kv_heads=2)
        scale = torch.tensor([0.003], device="cuda")
        output = case.run(output_dtype=torch.float8_e4m3fn, output_scale=scale).float()
        wanted = (case.expected / scale).clamp(-448, 448)
        assert output.abs().max() == 448
        assert relative_error(output, wanted) < 0.04


def test_a_recorded_launch_serves_any_lengths_of_its_batch_size() -> None:
    """One graph, captured with one batch, replayed with others of the same padded size."""
    for uniform in (True, False):
        batches = (
            [[(900, 1), (3, 1), (77, 1)], [(1, 1), (1100, 1), (500, 1)], [(0, 1), (0, 1), (2, 1)]]
            if uniform
            else [[(9, 100), (3, 1), (77, 99)], [(1, 1), (500, 198), (5, 1)], [(0, 100), (3, 60)]]
        )
        cases = []
        for batch in batches:
            tokens = 3 if uniform else 200
            case = cuda_case(
                batch,
                torch.bfloat16,
                size=64,
                block_size=16,
                padding_tokens=tokens - sum(new for _, new in batch),
                padding_sequences=3 - len(batch),
            )
            cases.append(
                dataclasses.replace(
                    case, metadata=dataclasses.replace(case.metadata, uniform_decode=uniform)
                )
            )
        blocks = max(case.kv_caches[LAYER][0].shape[0] for case in cases)
        columns = max(case.metadata.block_table.shape[1] for case in cases)
        for case in cases:
            widen(case, blocks, columns)
        fixed = clone(cases[0])
        output = torch.empty_like(fixed.q)

        def step(fixed: Case = fixed, output: torch.Tensor = output) -> None:
            output.copy_(fixed.run())

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for case in reversed(cases):
            copy_into(fixed, case)
            output.fill_(float("nan"))
            graph.replay()
            assert relative_error(output, case.expected) <= LIMITS[torch.bfloat16]


def widen(case: Case, blocks: int, columns: int) -> None:
    """Give the cache and the block table the shape that all cases share."""
    caches = []
    for cache in case.kv_caches[LAYER]:
        wide = torch.zeros(blocks, *cache.shape[1:], dtype=cache.dtype, device="cuda")
        wide[: len(cache)] = cache
        caches.append(wide)
    case.kv_caches[LAYER] = (caches[0], caches[1])
    table = case.metadata.block_table
    wide = torch.zeros(len(table), columns, dtype=table.dtype, device="cuda")
    wide[:, : table.shape[1]] = table
    case.metadata = dataclasses.replace(case.metadata, block_table=wide)


def clone(case: Case) -> Case:
    """The same case in buffers of its own."""
    names = ("query_start", "seq_lens", "block_table", "slot_mapping")
    copies = {name: getattr(case.metadata, name).clone() for name in names}
    keys, values = case.kv_caches[LAYER]
    return dataclasses.replace(
        case,
        q=case.q.clone(),
        k=case.k.clone(),
        v=case.v.clone(),
        metadata=dataclasses.replace(case.metadata, **copies),
        kv_caches={LAYER: (keys.clone(), values.clone())},
    )


def copy_into(fixed: Case, case: Case) -> None:
    """Write another batch into the buffers that were recorded."""
    pairs = [(fixed.q, case.q), (fixed.k, case.k), (fixed.v, case.v)]
    pairs += zip(fixed.kv_caches[LAYER], case.kv_caches[LAYER], strict=True)
    for name in ("query_start", "seq_lens", "block_table", "slot_mapping"):
        pairs.append((getattr(fixed.metadata, name), getattr(case.metadata, name)))
    for to, source in pairs:
        to.copy_(source)
