"""Which of its artifacts a piece calls, and that static ones are compared before they are published."""

from __future__ import annotations

import re

import pytest
import torch
from tests.compilation.graphs import ATTENTION
from tests.compilation.helpers import make_spec, open_cache, prepare, run
from tests.compilation.models import VOCAB, tiny

from kerf_runtime.compilation.artifact import load_artifact, write_artifact
from kerf_runtime.compilation.compiler import CompileOptions, compile_model
from kerf_runtime.compilation.gate import check_numerics, tolerance_for
from kerf_runtime.compilation.piecewise import PiecewiseBackend, TokenInput
from kerf_runtime.compilation.probe import PieceProbe
from kerf_runtime.errors import CompileError, NumericalGateError
from kerf_runtime.forward_context import ForwardContext, set_forward_context

X = torch.zeros(64, 2)


def named(name):
    return lambda inputs: [name]


def piece(*sizes):
    static = {size: named(f"for {size}") for size in sizes}
    return PiecewiseBackend(named("general"), "0123", static=static, tokens=TokenInput(0, 0))


def test_the_code_of_a_size_is_called_for_that_size_and_the_general_code_for_the_others():
    backend = piece(8, 16)
    assert backend(X[:8]) == ["general"]  # the first run, whatever its size
    called = [backend(X[:tokens])[0] for tokens in (8, 16, 7, 9, 8, 1)]
    assert called == ["for 8", "for 16", "general", "general", "for 8", "general"]


def test_the_number_of_tokens_may_be_an_input_itself():
    static = {8: named("for 8")}
    backend = PiecewiseBackend(named("general"), "0", static=static, tokens=TokenInput(1, None))
    assert [backend(X, tokens)[0] for tokens in (8, 8, 9)] == ["general", "for 8", "general"]


def test_static_code_without_a_way_to_see_the_number_is_refused():
    with pytest.raises(CompileError, match="no input that shows the number of tokens"):
        PiecewiseBackend(named("general"), "0", static={8: named("for 8")})


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A model, the folder of its artifact with code for 1 token that is wrong, and its programs."""
    model = tiny(1).model
    made = compile_model(
        model,
        CompileOptions(ATTENTION, backend="eager", sizes=(1, 16)),
        device=torch.device("cpu"),
        progress=lambda *_: None,
    )
    folder = tmp_path_factory.mktemp("static") / "artifact"
    write_artifact(folder, made.plan, made.pieces, made.graph_source)
    last = made.plan.piece_fingerprints[-1]
    code = folder / "rank_0/pieces" / last / "size_1/graph.py"
    source, changed = re.subn(r"return (\w+)\n$", r"return 1.5 * \1\n", code.read_text())
    assert changed
    code.write_text(source)
    return model, folder, made.programs


def gate(stored, *, sizes, probed):
    model, folder, programs = stored
    artifact = load_artifact(folder, model)
    tolerance = tolerance_for(torch.float32)
    probe = PieceProbe(artifact, programs, limit=tolerance.max_piece_rel, roundings=0)
    with set_forward_context(ForwardContext()):
        return check_numerics(
            model,
            artifact.forward,
            (lambda hidden: hidden * 0) if probed else model.compute_logits,
            probe=probe if probed else None,
            vocab_size=VOCAB,
            max_positions=128,
            device=torch.device("cpu"),
            tolerance=tolerance,
            static_sizes=sizes,
        )


def test_a_wrong_static_artifact_differs_from_the_general_one_for_its_size_alone(stored):
    model, folder, _ = stored
    forward = load_artifact(folder, model).forward
    right = [bool(torch.equal(run(forward, n), run(model, n))) for n in (1, 1, 16, 9)]
    assert right == [True, False, True, True]


@pytest.mark.parametrize("sizes", [(1,), (1, 16)])
def test_the_gate_refuses_logits_of_a_wrong_static_artifact(stored, sizes):
    with pytest.raises(NumericalGateError, match=r"at batch sizes 1, 2, 7, 32, 61, 1"):
        gate(stored, sizes=sizes, probed=False)


def test_the_probe_names_the_piece_of_a_wrong_static_artifact_and_its_tokens(stored):
    with pytest.raises(NumericalGateError, match=r"compiled piece \w+ .* 1 tokens"):
        gate(stored, sizes=(1, 16), probed=True)


def test_right_static_artifacts_pass_and_are_listed(stored):
    result = gate(stored, sizes=(16,), probed=False).to_json()
    assert result["passed"]
    assert result["staticSizes"] == [16]


@pytest.mark.usefixtures("tiny_is_compiled")
def test_the_gate_is_told_of_the_static_sizes_before_anything_is_published():
    spec = make_spec(compileSizes=[1, 3])
    assert prepare(tiny(1), open_cache(None, "static"), spec=spec).gate["staticSizes"] == [1, 3]
