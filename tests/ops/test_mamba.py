"""``kerf::mamba_mixer`` against its recurrence, token by token, in float64; and what it does to states."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.ops.mamba_cases import (
    GROUPS,
    INNER,
    close,
    expected_output,
    make_layer,
    make_text,
    mixed,
    run,
)
from torch.library import opcheck

from kerf_runtime.forward_context import ForwardContext, set_forward_context


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 63, 64, 65, 150])
def test_a_prompt_is_mixed_as_the_recurrence_says(tokens: int, bias: bool) -> None:
    layer, text = make_layer(bias=bias), make_text(tokens)
    [found, _] = run(layer, [(text, 0, tokens)])
    close(found, expected_output(layer, text))


@pytest.mark.parametrize("borders", [(1, 2, 3), (2, 70, 71), (64, 128), (65, 66)])
def test_a_prompt_in_parts_goes_on_from_where_it_was_left(borders: tuple[int, ...]) -> None:
    layer, text = make_layer(), make_text(140)
    ends = [0, *borders, 140]
    found = [run(layer, [(text, first, last)])[0] for first, last in pairwise(ends)]
    close(torch.cat(found), expected_output(layer, text))


@pytest.mark.parametrize("uniform", [True, False])
def test_decoding_goes_on_from_a_prompt_one_token_at_a_time(uniform: bool) -> None:
    layer, texts = make_layer(), [make_text(12, seed=seed) for seed in (1, 2, 3)]
    found = [[part] for part in run(layer, [(text, 0, 5) for text in texts])[:3]]
    for at in range(5, 12):
        parts = [(text, at, at + 1) for text in texts]
        for row, part in enumerate(run(layer, parts, padding=2, uniform=uniform)[:3]):
            found[row].append(part)
    for text, pieces in zip(texts, found, strict=True):
        close(torch.cat(pieces), expected_output(layer, text))


def test_a_batch_of_decodes_prompts_and_parts_of_prompts_is_mixed_sequence_by_sequence() -> None:
    layer, texts = make_layer(), [make_text(80, seed=seed) for seed in range(5)]
    run(layer, [(texts[0], 0, 7), (texts[1], 0, 9), (texts[2], 0, 70)])
    parts = [(0, 7, 8), (1, 9, 10), (2, 70, 80), (3, 0, 1), (4, 0, 40)]
    found = run(layer, [(texts[i], first, last) for i, first, last in parts], padding=3)
    for (i, first, last), part in zip(parts, found[:-1], strict=True):
        close(part, expected_output(layer, texts[i][:last])[first:])


def test_a_text_of_one_token_starts_from_zeros_whatever_its_slot_holds() -> None:
    layer, text = make_layer(), make_text(1)
    [found, _] = run(layer, [(text, 0, 1)], uniform=True)
    close(found, expected_output(layer, text))


@pytest.mark.parametrize("uniform", [True, False])
def test_padding_changes_no_state_but_that_of_its_own_slot(uniform: bool) -> None:
    texts = [make_text(9, seed=seed) for seed in (1, 2)]
    layers = [make_layer(), make_layer()]
    outputs = []
    for layer, padding in zip(layers, (0, 3), strict=True):
        run(layer, [(text, 0, 8) for text in texts], padding=padding)
        parts = [(text, 8, 9) for text in texts]
        outputs.append(run(layer, parts, padding=padding, uniform=uniform)[:2])
    # Close and not equal: the size of a batch decides how its numbers are vectorised.
    for ours, others in zip(layers[0].states, layers[1].states, strict=True):
        close(others[1:3], ours[1:3].double())
        assert others[3:].isnan().all()
    close(torch.cat(outputs[1]), torch.cat(outputs[0]).double())


def test_rows_behind_the_last_sequence_are_zeros() -> None:
    assert not run(make_layer(), [(make_text(4), 0, 4)], padding=3)[-1].any()


def test_without_a_batch_in_the_context_the_output_is_zeros_and_no_state_changes() -> None:
    layer = make_layer()
    assert not mixed(layer, make_text(3), None).any()
    assert all(state.isnan().all() for state in layer.states)


def test_the_operator_is_registered_as_pytorch_demands() -> None:
    layer, text = make_layer(), make_text(3)
    arguments = (text, *layer.weights, torch.zeros(3, INNER), "a", GROUPS)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    with set_forward_context(ForwardContext()):
        found = opcheck(torch.ops.kerf.mamba_mixer.default, arguments, test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}
