"""Log probabilities: the model's own, as many as asked for, always numbers that JSON can say."""

from __future__ import annotations

import pytest
import torch

from kerf_runtime.engine import logprobs
from kerf_runtime.engine.messages import SamplingParams, TokenLogprobs
from kerf_runtime.engine.sample_row import SampleRow

LOGITS = torch.tensor([[0.0, 1.0, 2.0, -1.0], [3.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 9.0]])


def logprobs_of(
    logits: torch.Tensor, rows: list[SampleRow], tokens: list[int]
) -> dict[int, TokenLogprobs]:
    found = logprobs.logprobs_of(logits, rows, torch.tensor(tokens))
    return {} if found is None else found.read()


def row(count: int | None, **params: float) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=1, logprobs=count, **params), 0, 0)  # type: ignore[arg-type]


def test_each_row_gets_what_it_asked_for() -> None:
    found = logprobs_of(LOGITS, [row(None), row(0), row(2)], [0, 3, 3])
    expected = LOGITS.log_softmax(-1)
    assert found.keys() == {1, 2}
    own, two = found[1], found[2]
    assert own.logprob == pytest.approx(float(expected[1, 3]))
    assert own.top == []
    assert two.top[0][0] == 3
    assert len(two.top) == 2
    assert two.top[0][1] == two.logprob == pytest.approx(float(expected[2, 3]))


def test_they_are_those_of_the_model_whatever_temperature_and_bias_are() -> None:
    bare = logprobs_of(LOGITS[:1], [row(2)], [1])
    asked = row(2, temperature=2.0, top_k=1, logit_bias=((1, 50.0),), presence_penalty=1.0)  # type: ignore[arg-type]
    assert logprobs_of(LOGITS[:1], [asked], [1]) == bare


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_json_cannot_say_is_a_very_low_number(value: float) -> None:
    logits = torch.tensor([[0.0, value]])
    entry = logprobs_of(logits, [row(5)], [1])[0]
    assert entry.logprob == -9999.0
    assert all(-9999.0 <= logprob <= 0.0 for _, logprob in entry.top)


def test_nobody_asking_costs_nothing() -> None:
    assert logprobs.logprobs_of(LOGITS, [row(None)] * 3, torch.tensor([0, 0, 0])) is None
