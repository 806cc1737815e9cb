"""Compiled pieces run beside what they were compiled from, on the inputs that they have in the eager model."""

from __future__ import annotations

import pytest
import torch
from tests.compilation.graphs import ATTENTION
from tests.models.checkpoints import make_llama, write_safetensors
from torch import fx, nn

from kerf_runtime.compilation.artifact import load_artifact, write_artifact
from kerf_runtime.compilation.compiler import CompileOptions, compile_model
from kerf_runtime.compilation.probe import PieceError, PieceProbe, difference
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.models import load_model

IDS = torch.arange(7)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A model, its artifact, and what was compiled; by the back end that only rounds as the model does."""
    folder = write_safetensors(tmp_path_factory.mktemp("model"), make_llama())
    model = load_model(folder, dtype=torch.bfloat16, device="cpu").model
    made = compile_model(
        model,
        CompileOptions(ATTENTION, backend="eager"),
        device=torch.device("cpu"),
        progress=lambda *_: None,
    )
    place = tmp_path_factory.mktemp("compiled") / "artifact"
    write_artifact(place, made.plan, made.pieces, made.graph_source)
    return model, place, made.programs


def run(forward):
    with torch.inference_mode(), set_forward_context(ForwardContext()):
        return forward(IDS, IDS)


def probe_of(artifact, programs, *, limit=0.01, roundings=0.0):
    return PieceProbe(artifact, programs, limit=limit, roundings=roundings)


def test_beside_right_pieces_the_eager_model_runs(compiled):
    model, place, programs = compiled
    probe = probe_of(load_artifact(place, model), programs)
    assert torch.equal(run(probe.compared), run(model))
    assert probe.worst.error == 0


def test_a_wrong_piece_is_named_and_what_follows_is_not_blamed(compiled, monkeypatch):
    model, place, programs = compiled
    artifact = load_artifact(place, model)
    index, right = list(artifact._calls.items())[1]

    def wrong(*inputs):
        first, *rest = right(*inputs)
        first = first.clone()
        first[3] *= 1.5
        return [first, *rest]

    artifact._calls[index] = wrong
    probe = probe_of(artifact, programs)
    assert torch.equal(run(probe.compared), run(model))
    assert probe.worst.piece == artifact.plan.steps[index].target
    assert probe.worst.error == pytest.approx(0.5, abs=0.01)
    assert probe.worst.share == pytest.approx(50, abs=1)


def test_the_artifact_keeps_its_own_forward(compiled):
    model, place, programs = compiled
    artifact = load_artifact(place, model)
    before = artifact.forward
    run(probe_of(artifact, programs).rounded)
    assert artifact.forward is before
    assert torch.equal(run(artifact.forward), run(model))


def test_rounding_moves_results_a_little_and_the_same_way_each_time(compiled):
    model, place, programs = compiled
    exact = run(model)
    rounded = [run(probe_of(load_artifact(place, model), programs).rounded) for _ in range(2)]
    assert torch.equal(*rounded)
    assert 0 < difference(exact, rounded[0])[1] < 0.1


class OnePiece:
    """An artifact whose forward is one piece."""

    def __init__(self, piece):
        self._piece = piece

    def forward_through(self, wrap):
        return wrap("only", self._piece)


class AddsOneInPlace(nn.Module):
    def forward(self, x):
        x.add_(1)
        return (x * 2, torch.empty_like(x))


@pytest.mark.parametrize(("amount", "error"), [(1.0, 0.0), (2.0, 0.5)])
def test_what_a_piece_writes_to_its_inputs_is_compared_and_left_as_the_program_leaves_it(
    amount, error
):
    def piece(x):
        x.add_(amount)
        return (torch.full((2, 3), 4.0), torch.full((2, 3), 1e9))

    x = torch.ones(2, 3)
    probe = probe_of(OnePiece(piece), {"only": fx.symbolic_trace(AddsOneInPlace())})
    result, _ = probe.compared(x)  # what nobody has written yet is not compared
    assert torch.equal(x, torch.full((2, 3), 2.0))
    assert torch.equal(result, torch.full((2, 3), 4.0))
    assert probe.worst == PieceError("only" if error else "none", error, 0.01)


class Cancels(nn.Module):
    def forward(self, x, y):
        return x - y


def test_where_large_values_cancel_a_result_may_differ_as_much_as_rounding_makes_it():
    x = torch.full((2, 64), 1000.0, dtype=torch.bfloat16)
    y = torch.full((2, 64), 996.0, dtype=torch.bfloat16)
    programs = {"only": fx.symbolic_trace(Cancels())}
    for amount, accepted in ((8, True), (100, False)):
        piece = OnePiece(lambda x, y, amount=amount: (x - y + amount,))
        strict = probe_of(piece, programs)
        strict.compared(x, y)
        assert strict.worst.share > 1
        lenient = probe_of(piece, programs, roundings=3)
        lenient.compared(x, y)
        assert (lenient.worst.share <= 1) == accepted
        assert lenient.worst.limit > 0.01


@pytest.mark.parametrize(
    ("expected", "actual", "apart"),
    [
        (torch.tensor([1.0, 4.0]), torch.tensor([2.0, 4.0]), (1.0, 0.25)),
        (torch.tensor(2.0), torch.tensor(3.0), (1.0, 0.5)),
        (torch.tensor([5, 10]), torch.tensor([5, 9]), (1.0, 0.1)),
        (torch.empty(0, 4), torch.empty(0, 4), (0.0, 0.0)),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), (0.0, 0.0)),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), (float("inf"), float("inf"))),
    ],
)
def test_a_difference_is_absolute_and_relative_to_the_largest_of_the_row(expected, actual, apart):
    assert difference(expected, actual) == pytest.approx(apart)


@pytest.mark.parametrize("limit", [1, 7, 24, 1000])
def test_large_results_are_compared_in_parts_with_the_same_outcome(monkeypatch, limit):
    expected = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))
    actual = expected.clone()
    actual[5, 1, 2] += 0.5
    actual[2, 0, 1] += 0.25
    whole = difference(expected, actual)
    monkeypatch.setattr("kerf_runtime.compilation.probe._MOST_ELEMENTS", limit)
    assert difference(expected, actual) == whole
