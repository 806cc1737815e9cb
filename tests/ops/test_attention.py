"""The attention operator on the CPU against a float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.attention_cases import LAYER, make_case

from kerf_runtime.forward_context import ForwardContext, set_forward_context


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
    window=st.sampled_from([0, 0, 1, 2, 7, 30]),
    seed=st.integers(0, 999),
)
def test_matches_the_reference_for_any_batch(
    sequences: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    block_size: int,
    padding: int,
    window: int,
    seed: int,
) -> None:
    case = make_case(
        sequences,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        block_size=block_size,
        padding_tokens=padding,
        padding_sequences=padding,
        window=window,
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


def test_a_float8_output_is_the_result_divided_by_the_scale_and_clamped() -> None:
    case = make_case([(3, 1), (0, 8)])
    scale = torch.tensor([0.001])
    output = case.run(output_dtype=torch.float8_e4m3fn, output_scale=scale)
    wanted = (case.expected / scale).clamp(-448, 448)
    assert output.float().abs().max() == 448
    torch.testing.assert_close(output.float(), wanted, rtol=0.07, atol=0.01)


def test_the_operator_is_registered_correctly() -> None:
    q = torch.randn(3, 4, 8)
    with set_forward_context(ForwardContext()):
        torch.library.opcheck(
            torch.ops.kerf.attention.default, (q, q, q, torch.empty_like(q), LAYER)
        )
