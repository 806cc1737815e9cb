"""Penalties, bias and tokens that may not come yet: what each does to the logits."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.engine.adjust import adjusted
from kerf_runtime.engine.messages import SamplingParams
from kerf_runtime.engine.sample_row import SampleRow, TokenHistory


def row(
    prompt: list[int] | None = None, answer: list[int] | None = None, **params: object
) -> SampleRow:
    prompt, answer = prompt or [], answer or []
    ends = params.pop("ends", frozenset())
    return SampleRow(
        SamplingParams(max_tokens=9, **params),  # type: ignore[arg-type]
        seed=0,
        step=len(answer),
        history=TokenHistory(prompt).follow([*prompt, *answer]),
        stop_ids=ends,  # type: ignore[arg-type]
    )


def changed(logits: list[float], member: SampleRow) -> list[float]:
    result: list[float] = adjusted(torch.tensor([logits]), [member])[0].tolist()
    return result


def test_without_wishes_the_logits_are_passed_through() -> None:
    logits = torch.zeros(2, 5)
    assert adjusted(logits, [row([1], [2]), row()]) is logits


def test_presence_is_subtracted_once_and_only_for_the_answer() -> None:
    member = row([0], [1, 1, 2], presence_penalty=0.5)
    assert changed([1.0, 1.0, 1.0, 1.0], member) == [1.0, 0.5, 0.5, 1.0]


def test_frequency_is_subtracted_once_per_occurrence() -> None:
    member = row([0], [1, 1, 2], frequency_penalty=0.5)
    assert changed([1.0, 1.0, 1.0, 1.0], member) == [1.0, 0.0, 0.5, 1.0]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer() -> None:
    member = row([0, 0, 1], [1, 2], repetition_penalty=2.0)
    assert changed([4.0, -4.0, 2.0, 1.0], member) == [2.0, -8.0, 1.0, 1.0]


def test_a_bias_is_added_after_penalties() -> None:
    member = row([], [1], presence_penalty=1.0, logit_bias=((1, 3.0), (2, -100.0)))
    assert changed([0.0, 0.0, 0.0], member) == [0.0, 2.0, -100.0]


@pytest.mark.parametrize(("answered", "shut"), [(0, True), (1, True), (2, False)])
def test_below_min_tokens_no_token_can_end_the_answer(answered: int, shut: bool) -> None:
    member = row([], [0] * answered, min_tokens=2, ends=frozenset({1, 99}))
    expected = [0.0, -math.inf if shut else 0.0, 0.0]
    assert changed([0.0, 0.0, 0.0], member) == expected


TOKENS = st.lists(st.integers(0, 7), max_size=12)


@given(
    members=st.lists(
        st.tuples(
            TOKENS,
            TOKENS,
            st.integers(0, 7),
            st.booleans(),
            st.sampled_from([0.0, 0.3, -0.7]),
            st.sampled_from([0.0, 0.1, -1.3]),
            st.sampled_from([1.0, 1.1, 0.6]),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 99),
)
def test_a_newest_token_that_only_the_device_knows_counts_like_one_of_the_history(
    members: list[tuple[list[int], list[int], int, bool, float, float, float]], seed: int
) -> None:
    logits = torch.randn(len(members), 8, generator=torch.Generator().manual_seed(seed))
    behind, known = [], []
    for prompt, answer, newest, lags, presence, frequency, repetition in members:
        wishes = {
            "presence_penalty": presence,
            "frequency_penalty": frequency,
            "repetition_penalty": repetition,
            "logit_bias": ((3, 1.0),),
        }
        whole = row(prompt, [*answer, newest], **wishes)
        known.append(whole)
        part = row(prompt, answer, **wishes)
        behind.append(msgspec.structs.replace(part, lags=True) if lags else whole)
    newest_tokens = torch.tensor([newest for _, _, newest, *_ in members])
    assert torch.equal(adjusted(logits, behind, newest_tokens), adjusted(logits, known))


def test_a_history_follows_what_is_appended() -> None:
    tokens = [5, 5, 6]
    history = TokenHistory(tokens)
    for token in (6, 7, 7):
        tokens.append(token)
        history.follow(tokens)
    ids, counts = history.generated()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {6: 1, 7: 2}
    assert history.prompt_only.tolist() == [5]
    assert history.follow(tokens).generated()[1].tolist() == [1, 2]
