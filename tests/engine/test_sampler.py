"""Sampling: what each parameter does, and that a row never depends on its neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kerf_runtime.engine.messages import SamplingParams
from kerf_runtime.engine.sampler import SampleRow, sample, uniform


def row(seed: int = 0, step: int = 0, **params: float) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=1, **params), seed, step)  # type: ignore[arg-type]


def draw(logits: list[float], count: int = 4000, **params: float) -> list[float]:
    """Observed frequencies of every token over many steps."""
    rows = [row(seed=5, step=step, **params) for step in range(count)]
    tokens = sample(torch.tensor(logits).expand(count, -1), rows)
    return [tokens.count(token) / count for token in range(len(logits))]


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert sample(torch.tensor([[0.1, 3.0, 2.9], [5.0, 1.0, 1.0]]), [row(), row()]) == [1, 0]


def test_frequencies_follow_the_distribution() -> None:
    expected = torch.softmax(torch.tensor([1.0, 2.0, 0.0, -1.0]), 0).tolist()
    assert draw([1.0, 2.0, 0.0, -1.0], temperature=1.0) == pytest.approx(expected, abs=0.03)


def test_temperature_flattens_the_distribution() -> None:
    expected = torch.softmax(torch.tensor([1.0, 2.0, 0.0]) / 2.0, 0).tolist()
    assert draw([1.0, 2.0, 0.0], temperature=2.0) == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_the_k_most_likely() -> None:
    found = draw([1.0, 2.0, 0.5, 1.5], temperature=1.0, top_k=2)
    assert [share > 0 for share in found] == [False, True, False, True]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
    assert draw(logits, temperature=1.0, top_p=0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)


def test_a_tiny_top_p_still_keeps_the_most_likely() -> None:
    assert draw([1.0, 2.0], temperature=1.0, top_p=1e-9) == [0.0, 1.0]


def test_top_k_above_the_vocabulary_keeps_everything() -> None:
    assert all(share > 0 for share in draw([1.0, 1.0, 1.0], temperature=1.0, top_k=50))


@pytest.mark.parametrize("temperature", [1e-4, 1e-3])
def test_a_tiny_temperature_does_not_overflow(temperature: float) -> None:
    logits = torch.tensor([[1e4, 2e4, -1e4]])
    assert sample(logits, [row(temperature=temperature)]) == [1]


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"temperature": 0.0}])
def test_logits_that_are_not_numbers_still_give_a_token(params: dict[str, float]) -> None:
    logits = torch.full((1, 5), float("nan"))
    assert 0 <= sample(logits, [row(**{"temperature": 1.0, **params})])[0] < 5


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others() -> None:
    logits = torch.zeros(30, 1000)

    def run(seed: int) -> list[int]:
        return sample(logits, [row(seed=seed, step=step, temperature=1.0) for step in range(30)])

    assert run(1) == run(1)
    assert run(1) != run(2)


_PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, 400]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_PARAMS, min_size=1, max_size=6), st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_neighbours(rows: list[dict[str, float]], seed: int) -> None:
    logits: Tensor = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(seed))
    members = [row(seed=seed + i, step=i, **params) for i, params in enumerate(rows)]
    together = sample(logits, members)
    alone = [sample(logits[i : i + 1], [members[i]])[0] for i in range(len(rows))]
    assert together == alone


def test_uniform_numbers_are_in_range_and_evenly_spread() -> None:
    numbers = [uniform(seed, step) for seed in range(100) for step in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    counts = torch.histc(torch.tensor(numbers), bins=20, min=0, max=1)
    chi_squared = float(((counts - 500) ** 2 / 500).sum())
    assert chi_squared < 43.8  # 99.9 % quantile with 19 degrees of freedom


def test_neighbouring_seeds_and_steps_are_unrelated() -> None:
    numbers = torch.tensor([[uniform(seed, step) for step in range(200)] for seed in range(200)])
    for rows in (numbers, numbers.T):
        pairs = torch.stack([rows[:-1].flatten(), rows[1:].flatten()])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02


@given(st.integers(-(2**63), 2**64), st.integers(0, 2**20))
def test_any_seed_gives_a_number(seed: int, step: int) -> None:
    assert 0 <= uniform(seed, step) < 1
