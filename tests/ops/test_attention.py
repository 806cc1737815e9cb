"""The attention operator against a naive float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kerf_runtime.ops.attention  # noqa: F401  registers the operator
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext, set_forward_context

LAYER = "layers.0.attention"


@dataclass
class Case:
    """Sequences with some tokens cached and some new, on shuffled blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    metadata: AttentionMetadata
    kv_caches: dict[str, tuple[Tensor, Tensor]]
    expected: Tensor

    def run(self) -> Tensor:
        output = torch.full_like(self.q, float("nan"))
        context = ForwardContext(attention=self.metadata, kv_caches=self.kv_caches)
        with set_forward_context(context):
            torch.ops.kerf.attention(self.q, self.k, self.v, output, LAYER)
        return output


def make_case(
    sequences: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    block_size: int = 4,
    padding_tokens: int = 0,
    padding_sequences: int = 0,
    seed: int = 0,
) -> Case:
    """A batch of (cached tokens, new tokens) per sequence, with what attention should give."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    needed = [math.ceil((cached + new) / block_size) for cached, new in sequences]
    order = torch.randperm(sum(needed) + 3, generator=random).tolist()
    shape = (len(order), block_size, kv_heads, size)
    key_cache, value_cache = normal(*shape), normal(*shape)
    rows = len(sequences) + padding_sequences
    table = torch.zeros(rows, max(needed, default=1) + 1, dtype=torch.int32)
    query_start, seq_lens, slots, qs, ks, vs, expected = [0], [], [], [], [], [], []
    for row, (cached, new) in enumerate(sequences):
        blocks, order = order[: needed[row]], order[needed[row] :]
        table[row, : len(blocks)] = torch.tensor(blocks)
        total = cached + new
        place = [blocks[p // block_size] * block_size + p % block_size for p in range(total)]
        q, k, v = (
            normal(new, heads, size),
            normal(total, kv_heads, size),
            normal(total, kv_heads, size),
        )
        key_cache.view(-1, kv_heads, size)[place[:cached]] = k[:cached]
        value_cache.view(-1, kv_heads, size)[place[:cached]] = v[:cached]
        expected.append(reference(q, k, v))
        qs.append(q), ks.append(k[cached:]), vs.append(v[cached:])
        slots += place[cached:]
        query_start.append(query_start[-1] + new)
        seq_lens.append(total)
    qs.append(normal(padding_tokens, heads, size))
    ks.append(normal(padding_tokens, kv_heads, size))
    vs.append(normal(padding_tokens, kv_heads, size))
    expected.append(torch.zeros(padding_tokens, heads, size))
    uniform = all(new == 1 for _, new in sequences)
    tail = range(query_start[-1] + 1, query_start[-1] + 1 + padding_sequences)
    query_start += list(tail) if uniform else [query_start[-1]] * padding_sequences
    metadata = AttentionMetadata(
        query_start=torch.tensor(query_start, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens + [0] * padding_sequences, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots + [-1] * padding_tokens, dtype=torch.int64),
        uniform_decode=uniform,
    )
    caches = {LAYER: (key_cache, value_cache)}
    return Case(torch.cat(qs), torch.cat(ks), torch.cat(vs), metadata, caches, torch.cat(expected))


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last tokens of one sequence, written out in float64."""
    group = q.shape[1] // k.shape[1]
    wide = [t.double() for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    scores = torch.einsum("qhd,khd->hqk", wide[0], wide[1]) / math.sqrt(q.shape[-1])
    positions = torch.arange(len(k) - len(q), len(k))[:, None]
    scores = scores.masked_fill(torch.arange(len(k))[None, :] > positions, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide[2]).float()


@pytest.mark.parametrize(
    "sequences",
    [
        pytest.param([(0, 1)], id="first token"),
        pytest.param([(0, 9)], id="prompt"),
        pytest.param([(7, 6)], id="chunk after a cached prefix"),
        pytest.param([(5, 1), (17, 1), (1, 1)], id="decode of different lengths"),
        pytest.param([(3, 1), (0, 8), (12, 1), (4, 4)], id="mixed"),
        pytest.param([(3, 1), (15, 1)], id="exactly full blocks"),
    ],
)
def test_matches_the_reference(sequences: list[tuple[int, int]]) -> None:
    case = make_case(sequences)
    torch.testing.assert_close(case.run(), case.expected, atol=2e-6, rtol=2e-5)


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 3, 16]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 999),
)
def test_matches_the_reference_for_any_batch(
    sequences: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    block_size: int,
    padding: int,
    seed: int,
) -> None:
    case = make_case(
        sequences,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        block_size=block_size,
        padding_tokens=padding,
        padding_sequences=padding,
        seed=seed,
    )
    torch.testing.assert_close(case.run(), case.expected, atol=4e-6, rtol=4e-5)


def test_new_keys_and_values_are_in_the_cache_afterwards() -> None:
    case = make_case([(3, 5)])
    case.run()
    for cache, new in zip(case.kv_caches[LAYER], (case.k, case.v), strict=True):
        stored = cache.view(-1, *cache.shape[2:])[case.metadata.slot_mapping]
        assert torch.equal(stored, new)


def test_padding_writes_nothing_to_the_cache_and_gives_zeros() -> None:
    case = make_case([(3, 1), (2, 1)], padding_tokens=2, padding_sequences=2)
    before = case.kv_caches[LAYER][0].clone()
    output = case.run()
    assert torch.count_nonzero(output[2:]) == 0
    changed = (case.kv_caches[LAYER][0] != before).any(-1).any(-1).view(-1).nonzero().flatten()
    assert set(changed.tolist()) == set(case.metadata.slot_mapping[:2].tolist())


def test_a_batch_of_padding_alone_gives_zeros() -> None:
    case = make_case([], padding_tokens=4, padding_sequences=4)
    assert torch.count_nonzero(case.run()) == 0


def test_values_projected_as_views_of_a_fused_tensor_are_read_correctly() -> None:
    case = make_case([(0, 6)])
    fused = torch.cat([case.k.flatten(1), case.v.flatten(1)], dim=1)
    case.k, case.v = (part.view(case.k.shape) for part in fused.chunk(2, dim=1))
    assert not case.v.is_contiguous()
    torch.testing.assert_close(case.run(), case.expected, atol=2e-6, rtol=2e-5)


def test_without_metadata_the_output_is_zeros() -> None:
    q = torch.randn(3, 4, 8)
    output = torch.full_like(q, float("nan"))
    with set_forward_context(ForwardContext()):
        torch.ops.kerf.attention(q, q, q, output, LAYER)
    assert torch.count_nonzero(output) == 0


def test_outside_a_forward_it_says_what_is_missing() -> None:
    q = torch.randn(1, 4, 8)
    with pytest.raises(RuntimeError, match="no forward context is set"):
        torch.ops.kerf.attention(q, q, q, torch.empty_like(q), LAYER)


def test_the_operator_is_registered_correctly() -> None:
    q = torch.randn(3, 4, 8)
    with set_forward_context(ForwardContext()):
        torch.library.opcheck(
            torch.ops.kerf.attention.default, (q, q, q, torch.empty_like(q), LAYER)
        )
