"""Sampling: what each parameter does, and that a row never depends on its neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kerf_runtime.engine.messages import SamplingParams
from kerf_runtime.engine.sample_row import SampleRow, TokenHistory
from kerf_runtime.engine.sampler import sample as sampled
from kerf_runtime.engine.seeds import uniform


def sample(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    tokens: list[int] = sampled(logits, rows).tolist()
    return tokens


def row(seed: int = 0, step: int = 0, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=1, **params), seed, step)


def draw(logits: list[float], count: int = 4000, **params: float) -> list[float]:
    """Observed frequencies of every token over many steps."""
    rows = [row(seed=5, step=step, **params) for step in range(count)]
    tokens = sample(torch.tensor(logits).expand(count, -1), rows)
    return [tokens.count(token) / count for token in range(len(logits))]


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert sample(torch.tensor([[0.1, 3.0, 2.9], [5.0, 1.0, 1.0]]), [row(), row()]) == [1, 0]


def test_logits_in_half_precision_give_the_tokens_of_the_same_numbers_in_float32() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows = [row(), row(seed=1, temperature=1.0), row(seed=2, temperature=0.7, top_p=0.9)] * 2
    for chosen in (rows, [row()] * 6):
        assert sample(logits, chosen) == sample(logits.float(), chosen)


def test_the_likeliest_tokens_are_taken_where_they_are_known_and_nothing_else_was_asked_for() -> (
    None
):
    logits, known = torch.tensor([[0.0, 1.0, 2.0]] * 2), torch.tensor([0, 1])  # not the argmax
    biased = row(logit_bias=((1, 5.0),))
    drawn = row(temperature=1.0, top_k=1)
    assert sampled(logits, [row(), row()], likeliest=known).tolist() == [0, 1]
    assert sampled(logits, [row(), biased], likeliest=known).tolist() == [2, 1]
    assert sampled(logits, [row(), drawn], likeliest=known).tolist() == [2, 2]


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


def test_min_p_drops_what_is_unlikely_beside_the_likeliest() -> None:
    logits = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
    found = draw(logits, temperature=1.0, min_p=0.5)
    assert found == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)


def test_min_p_of_one_keeps_the_likeliest() -> None:
    assert draw([1.0, 2.0, 0.0], temperature=1.0, min_p=1.0) == [0.0, 1.0, 0.0]


VOCAB = 60
_PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, 400]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        "logit_bias": st.sampled_from([(), ((3, 5.0), (7, -100.0)), ((0, 100.0),)]),
        "min_tokens": st.sampled_from([0, 4]),
    }
)
_TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
_ROWS = st.lists(
    st.tuples(_PARAMS, _TOKENS, _TOKENS, st.frozensets(st.integers(0, 9), max_size=3)),
    min_size=1,
    max_size=6,
)


def drawn(case: tuple, seed: int) -> SampleRow:  # type: ignore[type-arg]
    params, prompt, answer, ends = case
    history = TokenHistory(prompt).follow([*prompt, *answer])
    return SampleRow(
        SamplingParams(max_tokens=99, **params), seed, len(answer), history, stop_ids=ends
    )


def plain_sample(logits: list[float], row: SampleRow, prompt: list[int], answer: list[int]) -> int:
    """One row, one token, in plain Python: what every parameter means."""
    params, values = row.params, list(logits)
    for token in {*prompt, *answer}:
        value, penalty = values[token], params.repetition_penalty
        values[token] = value / penalty if value > 0 else value * penalty
    for token in set(answer):
        count = answer.count(token)
        values[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias:
        values[token] += bias
    if len(answer) < params.min_tokens:
        for token in row.stop_ids:
            values[token] = -math.inf
    best = max(range(len(values)), key=lambda token: (values[token], -token))
    if params.temperature == 0:
        return best
    weights = [math.exp((value - values[best]) / params.temperature) for value in values]
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    order = list(range(len(shares)))
    if params.top_k or params.top_p < 1 or params.min_p:
        order.sort(key=lambda token: -shares[token])
        order = order[: params.top_k or None]
        left, kept, mass = math.fsum(shares[t] for t in order), [], 0.0
        for token in order:
            likely = shares[token] >= params.min_p * shares[best]
            if not kept or (mass < params.top_p and likely):
                kept.append(token)
            mass += shares[token] / left
        order = kept
    point, passed = uniform(row.seed, row.step) * math.fsum(shares[t] for t in order), 0.0
    for token in order:
        passed += shares[token]
        if passed > point:
            return token
    return order[-1]


@settings(max_examples=150, deadline=None)
@given(_ROWS, st.integers(0, 2**40))
def test_a_batch_gives_what_the_plain_reference_gives(rows: list, seed: int) -> None:  # type: ignore[type-arg]
    logits: Tensor = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    logits *= 3
    members = [drawn(case, seed + i) for i, case in enumerate(rows)]
    expected = [
        plain_sample(logits[i].tolist(), members[i], rows[i][1], rows[i][2])
        for i in range(len(rows))
    ]
    assert sample(logits, members) == expected


@settings(max_examples=60, deadline=None)
@given(_ROWS, st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_neighbours(rows: list, seed: int) -> None:  # type: ignore[type-arg]
    logits: Tensor = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    members = [drawn(case, seed + i) for i, case in enumerate(rows)]
    together = sample(logits, members)
    alone = [sample(logits[i : i + 1], [members[i]])[0] for i in range(len(rows))]
    assert together == alone
    assert torch.equal(logits, before)
