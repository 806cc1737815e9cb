"""One trace, one graph, every input named, and nothing that holds for some batches only."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.compilation import models, stateful
from tests.compilation.graphs import example_arguments, trace

from kerf_runtime.compilation import factors
from kerf_runtime.compilation.assumptions import check_assumptions
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.decorator import IntermediateTensors, support_torch_compile
from kerf_runtime.compilation.factors import source_digests
from kerf_runtime.compilation.plan import InputRef
from kerf_runtime.compilation.trace import trace_forward
from kerf_runtime.errors import CompileError, GraphBreakError


def test_a_forward_gives_one_graph_and_one_trace():
    with compilation_counter.expect(dynamo_traces=1, graphs_seen=1, backend_compilations=0):
        traced = trace(models.WithBuffer())
    assert len(traced.inputs) == len(traced.fake_inputs)


def test_every_input_is_an_argument_a_size_a_parameter_or_a_buffer():
    traced = trace(models.WithBuffer())
    assert set(traced.inputs) == {
        InputRef("argument", "input_ids"),
        InputRef("argument", "positions"),
        InputRef("size", "input_ids", 0),
        InputRef("state", "table"),
        InputRef("state", "scale"),
    }


def test_the_number_of_tokens_stays_symbolic():
    traced = trace(models.WithBuffer())
    for ref, fake in zip(traced.inputs, traced.fake_inputs, strict=True):
        if ref.kind == "argument":
            assert not isinstance(fake.shape[0], int), ref


def test_tied_weights_are_one_input():
    traced = trace(models.WithTiedWeights())
    assert [ref.name for ref in traced.inputs if ref.kind == "state"] == ["table"]


def test_the_modules_whose_code_was_traced_are_recorded_by_name():
    assert "tests.compilation.models" in trace(models.WithBuffer()).sources


def test_code_that_was_inlined_from_other_modules_is_recorded_with_that_of_layers():
    sources = trace(stateful.CallsOtherModules()).sources
    assert {"tests.compilation.inlined", "tests.compilation.stateful"} <= set(sources)
    assert "tests.compilation.models" in sources  # the method of a base class
    assert source_digests(sources).keys() >= set(sources)
    assert "missing" not in source_digests(sources).values()


@pytest.mark.parametrize("changed", ["inlined", "stateful", "models"])
def test_the_content_of_every_inlined_module_is_a_factor(monkeypatch, changed, tmp_path):
    sources = trace(stateful.CallsOtherModules()).sources
    before = source_digests(sources)
    shutil.copytree(Path(__file__).parent, tmp_path / "tests" / "compilation")
    with (tmp_path / "tests" / "compilation" / f"{changed}.py").open("a") as file:
        file.write("# another line\n")
    monkeypatch.setattr(
        factors.importlib.util,
        "find_spec",
        lambda name, find=factors.importlib.util.find_spec: (
            SimpleNamespace(submodule_search_locations=[str(tmp_path / "tests")], origin=None)
            if name == "tests"
            else find(name)
        ),
    )
    after = source_digests(sources)
    assert {name for name in sources if after[name] != before[name]} == {
        f"tests.compilation.{changed}"
    }


def test_code_of_the_interpreter_itself_does_not_count_as_a_source():
    assert "tests.compilation.models" in trace(models.CallsStandardLibrary()).sources


def test_code_outside_any_module_is_an_error_that_names_it():
    namespace = {"Awkward": models.Awkward, "support": support_torch_compile}
    source = (
        "@support(dynamic_arg_dims={'input_ids': 0, 'positions': 0})\n"
        "class Typed(Awkward):\n    def forward(self, input_ids, positions):\n"
        "        return self.rows(input_ids)\n"
    )
    exec(compile(source, "<typed at a prompt>", "exec"), namespace)
    with pytest.raises(CompileError, match="<typed at a prompt>, which is no importable module"):
        trace(namespace["Typed"]())


@pytest.mark.parametrize(
    ("model", "line"),
    [(models.BreaksTheGraph, 'print("a graph break")'), (models.BranchesOnValues, "x.sum() > 0")],
)
def test_a_graph_break_is_an_error_that_shows_the_users_line(model, line):
    with (
        compilation_counter.expect(dynamo_traces=0, graphs_seen=0),
        pytest.raises(GraphBreakError, match="does not trace into one graph") as raised,
    ):
        trace(model())
    assert raised.value.where == model.__name__
    assert models.__file__ in raised.value.what
    assert line in raised.value.what


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_an_error_that_names_it():
    with pytest.raises(CompileError, match="'l_self_plain'") as raised:
        trace(models.PlainTensorAttribute())
    assert "Register the tensor as a buffer" in raised.value.hint


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (models.FixesTheNumberOfTokens, "view(32, 4)"),
        (models.BranchesOnTheNumberOfTokens, "shape[0] > 16"),
        (models.HalvesTheNumberOfTokens, "view(-1, 2, 4)"),
    ],
)
def test_a_forward_that_holds_for_some_numbers_of_tokens_only_is_an_error_with_the_line(
    model, line
):
    with pytest.raises(CompileError, match="depends on the number of tokens") as raised:
        trace(model())
    assert line in raised.value.where
    assert f"{model.__name__}.forward" in raised.value.where


@pytest.mark.parametrize("model", [models.ReadsAValue, models.MasksRows])
def test_a_forward_that_waits_for_values_of_the_device_is_an_error(model):
    with pytest.raises(CompileError, match="depends on the values of a tensor") as raised:
        trace(model())
    assert model.__name__ in raised.value.where


def test_a_second_trace_of_a_model_is_an_error_that_shows_where_the_first_was():
    model = models.WithBuffer()
    trace_forward(model, example_arguments())
    with (
        compilation_counter.expect(dynamo_traces=0),
        pytest.raises(GraphBreakError, match=r"a second trace of WithBuffer\.forward") as raised,
    ):
        trace_forward(model, example_arguments())
    assert f'"{__file__}"' in raised.value.what
    assert "trace_forward(model, example_arguments())" in raised.value.what
    assert "load the model again" in raised.value.hint


def test_a_trace_that_failed_does_not_count_as_the_first():
    model = stateful.Optionals()
    ids = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(CompileError, match="'bais'"):
        trace_forward(model, {"input_ids": ids, "extra": None, "bais": None})
    with compilation_counter.expect(dynamo_traces=1):
        trace_forward(model, {"input_ids": ids, "extra": None, "bias": None})


def test_a_model_that_is_not_decorated_is_refused_before_any_work():
    with (
        compilation_counter.expect(dynamo_traces=0),
        pytest.raises(CompileError, match="Linear does not say that it can be compiled"),
    ):
        trace_forward(torch.nn.Linear(4, 4), {"input": torch.zeros(8, 4)})


def test_arguments_that_are_none_are_remembered():
    ids = torch.zeros(8, dtype=torch.int64)
    traced = trace_forward(
        stateful.Optionals(), {"input_ids": ids, "extra": None, "bias": torch.zeros(8)}
    )
    assert traced.absent == ("extra",)
    assert {ref.name for ref in traced.inputs if ref.kind == "argument"} == {"input_ids", "bias"}


def test_the_tensors_of_intermediate_tensors_are_inputs_with_their_keys():
    previous = IntermediateTensors({"hidden": torch.zeros(8, 4), "residual": torch.zeros(8, 4)})
    traced = trace_forward(stateful.TakesIntermediates(), {"previous": previous})
    assert set(traced.inputs) == {
        InputRef("argument", "previous", key="hidden"),
        InputRef("argument", "previous", key="residual"),
        InputRef("size", "previous", 0, key="hidden"),
        InputRef("state", "scale"),
    }


def test_dynamic_dimensions_may_be_given_and_counted_from_the_end():
    traced = trace_forward(stateful.TwoDynamicDims(), {"table": torch.zeros(6, 10)})
    (fake,) = [f for f in traced.fake_inputs if isinstance(f, torch.Tensor)]
    assert not any(isinstance(size, int) for size in fake.shape)


def test_the_trace_leaves_nothing_of_dynamo_behind():
    trace(models.WithBuffer())
    model = models.WithBuffer()
    arguments = example_arguments(7)
    expected = model(**arguments)
    assert torch.equal(model(**arguments), expected)
    with compilation_counter.expect(dynamo_traces=1):
        trace_forward(model, arguments)


def test_a_size_that_was_specialised_after_the_trace_is_refused():
    traced = trace(models.WithBuffer())
    fake = next(f for f in traced.fake_inputs if isinstance(f, torch.Tensor) and f.dim() == 1)
    check_assumptions(fake.fake_mode.shape_env, where="here")
    assert int(fake.shape[0]) == 32  # what a compiler does that needs a constant
    with pytest.raises(CompileError, match="does not hold for 2 tokens") as raised:
        check_assumptions(fake.fake_mode.shape_env, where="here")
    assert raised.value.where.startswith("here")
