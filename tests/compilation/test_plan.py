"""The stitching plan: plain data, readable source, one straight line of calls."""

from __future__ import annotations

import ast
import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compilation import models, stateful
from tests.compilation.graphs import stitch_eagerly, trace_and_split
from tests.compilation.helpers import run

from kerf_runtime.compilation.decorator import IntermediateTensors
from kerf_runtime.compilation.fingerprint import fingerprint_piece
from kerf_runtime.compilation.plan import StitchPlan, stitch, stitched_source
from kerf_runtime.compilation.planner import build_plan
from kerf_runtime.compilation.split import split_graph
from kerf_runtime.compilation.trace import trace_forward
from kerf_runtime.errors import CompileError


@pytest.fixture(scope="module")
def planned():
    """Model, split graph and plan of a small Llama with three layers."""
    loaded = models.llama(3)
    traced, split = trace_and_split(loaded.model)
    prints = {piece.name: fingerprint_piece(piece.module) for piece in split.compilable}
    return loaded.model, split, build_plan(traced, split, prints, ("input_ids", "positions"))


@pytest.fixture(scope="module")
def plan(planned):
    return planned[2]


def state_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_the_plan_has_every_piece_in_order_and_each_program_once(plan):
    assert [step.kind for step in plan.steps] == ["piece", "op"] * 3 + ["piece"]
    assert plan.capturable == 4
    assert len(plan.piece_fingerprints) == 3
    targets = [step.target for step in plan.steps if step.kind == "piece"]
    assert targets == [plan.piece_fingerprints[i] for i in (0, 1, 1, 2)]
    assert {s.target for s in plan.steps if s.kind == "op"} == {"kerf::attention.default"}


def test_layer_names_are_constants_of_the_plan_not_of_the_pieces(plan):
    names = [s.inputs[-1] for s in plan.steps if s.kind == "op"]
    assert names == [("constant", f"layers.{i}.attention") for i in range(3)]


def test_a_plan_survives_being_written_as_json_and_read(plan):
    assert StitchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_that_was_read_runs_like_the_one_that_was_written(planned):
    model, split, plan = planned
    again = StitchPlan.from_json(json.loads(json.dumps(plan.to_json())))
    forward = stitch_eagerly(again, split, state_of(model))
    assert torch.equal(run(forward, 9), run(model, 9))


def test_the_stitched_source_is_a_straight_line_behind_the_check_of_the_arguments(plan):
    source = stitched_source(plan)
    (function,) = ast.parse(source).body
    assert [a.arg for a in function.args.args] == ["input_ids", "positions"]
    check, *line = function.body
    assert ast.unparse(check.test) == "input_ids is None or positions is None"
    kinds = {type(node) for statement in line for node in ast.walk(statement)}
    assert kinds.isdisjoint({ast.If, ast.For, ast.While, ast.Try, ast.Lambda, ast.IfExp})
    assert source.count("# op kerf::attention.default") == 3
    assert "'layers.1.attention'" in source
    assert max(map(len, source.splitlines())) < 200


def test_the_stitched_forward_drops_values_as_soon_as_they_are_dead(plan):
    source = stitched_source(plan)
    made = {name for step in plan.steps for name in step.outputs}
    dropped = [
        target.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Delete)
        for target in node.targets
    ]
    assert sorted(dropped) == sorted(made - {plan.result})


def test_a_model_without_a_parameter_of_the_plan_is_an_error_that_names_it(planned):
    model, _, plan = planned
    state = state_of(model)
    del state["layers.1.mlp.down_proj.weight"]
    with pytest.raises(CompileError, match=r"'layers\.1\.mlp\.down_proj\.weight'"):
        stitch(plan, dict.fromkeys(range(7), print), state)


def test_an_operator_that_is_not_registered_is_an_error_that_names_it(planned):
    model, _, plan = planned
    text = json.dumps(plan.to_json()).replace("kerf::attention", "kerf::unknown")
    other = StitchPlan.from_json(json.loads(text))
    with pytest.raises(CompileError, match=r"kerf::unknown\.default, which is not registered"):
        stitch(other, dict.fromkeys(range(7), print), state_of(model))


def test_a_forward_that_returns_an_argument_or_a_parameter_is_stitched():
    ref = {"kind": "argument", "name": "x", "dim": 0}
    data = {"arguments": ["x"], "inputs": [["i0", ref]], "steps": [], "result": "i0"}
    data |= {"absent": [], "state_writes": []}
    x = torch.ones(1)
    assert stitch(StitchPlan.from_json(data), {}, {})(x) is x
    data["inputs"] = [["i0", {"kind": "state", "name": "w", "dim": 0}]]
    assert stitch(StitchPlan.from_json(data), {}, {"w": x})(torch.zeros(1)) is x


BAD = [
    lambda d: d.pop("steps"),
    lambda d: d.update(result="v999"),
    lambda d: d.update(arguments=["input ids"]),
    lambda d: d.update(arguments=["lambda", "positions"]),
    lambda d: d["inputs"][0].__setitem__(0, "i0; import os"),
    lambda d: d["inputs"][0][1].update(kind="file"),
    lambda d: d["inputs"][0][1].update(kind="argument", name="nobody"),
    lambda d: d["inputs"][0][1].update(dim="0"),
    lambda d: d["steps"][0].update(kind="shell"),
    lambda d: d["steps"][0].update(target="a\nimport os"),
    lambda d: d["steps"][0].update(outputs=["x"]),
    lambda d: d["steps"].reverse(),
    lambda d: d["steps"][1]["inputs"].append(["value", "v999"]),
]


@pytest.mark.parametrize("change", BAD)
def test_a_damaged_plan_is_refused_before_any_of_it_runs(plan, change):
    data = json.loads(json.dumps(plan.to_json()))
    change(data)
    with pytest.raises((ValueError, KeyError, TypeError)):
        StitchPlan.from_json(data)


def _paths(value, path=()):
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from _paths(item, (*path, key))


@given(st.data())
def test_a_plan_with_anything_in_place_of_any_value_is_read_and_stitched_or_refused(plan, data):
    changed = copy.deepcopy(json.loads(json.dumps(plan.to_json())))
    path = data.draw(st.sampled_from([p for p in _paths(changed) if p]))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = data.draw(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just([]) | st.just({})
    )
    try:
        found = StitchPlan.from_json(changed)
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    compile(stitched_source(found), "<test>", "exec")


def stitched_once(model, arguments):
    """The stitched forward of a model without splitting ops, from a plan that was stored and read."""
    traced = trace_forward(model, arguments)
    split = split_graph(traced.module, frozenset())
    prints = {piece.name: piece.name for piece in split.compilable}
    plan = build_plan(traced, split, prints, tuple(arguments))
    stored = StitchPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert stored == plan
    return stitch_eagerly(stored, split, state_of(model))


def ids(tokens):
    return torch.arange(tokens)


def test_an_argument_that_was_none_must_stay_none_and_need_not_be_given_at_the_end():
    model = stateful.Optionals()
    forward = stitched_once(model, {"input_ids": ids(8), "extra": ids(8), "bias": None})
    for tokens in (8, 1, 3):
        assert torch.equal(forward(ids(tokens), ids(tokens)), model(ids(tokens), ids(tokens)))
    assert torch.equal(forward(ids(3), ids(3), None), model(ids(3), ids(3)))
    with pytest.raises(CompileError, match="'bias' was None when the model was traced") as raised:
        forward(ids(8), ids(8), ids(8))
    assert "must stay None for the life of the model" in raised.value.hint


def test_an_argument_that_was_a_tensor_must_stay_one():
    model = stateful.Optionals()
    forward = stitched_once(model, {"input_ids": ids(8), "extra": None, "bias": ids(8)})
    assert torch.equal(forward(ids(2), None, ids(2)), model(ids(2), None, ids(2)))
    with pytest.raises(CompileError, match="'bias' was a tensor when the model was traced"):
        forward(ids(8), None, None)
    with pytest.raises(CompileError, match="'extra' was None when the model was traced"):
        forward(ids(8), ids(8), ids(8))


def test_intermediate_tensors_are_taken_apart_by_the_stitched_forward():
    model = stateful.TakesIntermediates()

    def previous(tokens):
        pair = {"hidden": torch.randn(tokens, 4), "residual": torch.randn(tokens, 4)}
        return IntermediateTensors(pair)

    forward = stitched_once(model, {"previous": previous(8)})
    for tokens in (8, 1, 3):
        given = previous(tokens)
        assert torch.equal(forward(given), model(given))


def test_two_dynamic_dimensions_of_one_argument_are_both_sizes():
    model = stateful.TwoDynamicDims()
    forward = stitched_once(model, {"table": torch.randn(6, 10)})
    for shape in ((4, 9), (1, 3), (7, 2)):
        table = torch.randn(shape)
        assert torch.equal(forward(table), model(table))


@pytest.mark.parametrize(
    "change",
    [{"absent": ["nothing"]}, {"inputs": [["i0", {"kind": "state", "name": "x", "key": 1}]]}],
)
def test_a_stored_plan_with_absent_arguments_or_keys_that_are_none_is_refused(plan, change):
    data = {**json.loads(json.dumps(plan.to_json())), **change}
    with pytest.raises(ValueError, match=r"absent arguments|has no key"):
        StitchPlan.from_json(data)
