"""Levels 1 and 2: the whole forward through Dynamo, with all its guards or with none."""

from __future__ import annotations

import ast
import sys
from types import SimpleNamespace

import pytest
import torch
from tests.compilation import models, stateful
from tests.compilation.helpers import QUICK, run

from kerf_runtime.compilation import once
from kerf_runtime.compilation.backends.inductor import inductor_session
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.decorator import IntermediateTensors
from kerf_runtime.compilation.once import CompiledForward, check_same_layout, decompiled
from kerf_runtime.config.compilation import CompilationLevel, CompilerBackendName
from kerf_runtime.errors import CompileError, ConfigError, GraphBreakError

AS_IS, ONCE = CompilationLevel.DYNAMO_AS_IS, CompilationLevel.DYNAMO_ONCE


def eager(model, level=ONCE, **options):
    return CompiledForward(model, level=level, backend=CompilerBackendName.EAGER, **options)


def ids(tokens):
    return torch.arange(tokens) % models.VOCAB


@pytest.fixture
def closed_gate():
    compile_gate.open = False
    yield
    compile_gate.open = True


def test_level_2_traces_once_and_evaluates_no_guard_whatever_the_number_of_tokens():
    loaded = models.llama(2)
    forward = eager(loaded.model)
    with compilation_counter.expect(
        dynamo_traces=1,
        graphs_seen=1,
        backend_compilations=1,
        inductor_compilations=0,
        guards_evaluated=0,
    ):
        for tokens in (32, 1, 7, 2, 64):
            assert torch.equal(run(forward, tokens), run(loaded.model, tokens))


def test_the_trace_of_level_2_computes_nothing_and_may_be_made_before_the_first_call():
    model = stateful.Stateful("in place").eval()
    forward = eager(model)
    forward.trace({"input_ids": ids(8), "positions": ids(8)})
    assert model.layers[1].count.sum() == 0
    with compilation_counter.expect(dynamo_traces=0, guards_evaluated=0):
        run(forward, 1)  # the first call may have one token when the trace is done
    assert model.layers[1].count.tolist() == [1, 1, 1, 1]


def test_a_level_2_trace_needs_two_tokens():
    with pytest.raises(CompileError, match="dimension 0 of input_ids has size 1"):
        run(eager(models.WithBuffer()), 1)


def test_weights_that_are_loaded_after_the_trace_are_used():
    loaded = models.tiny(1)
    forward = eager(loaded.model)
    run(forward, 8)
    loaded.model.embedding.data.normal_()
    loaded.model.layers[0].query = torch.nn.Parameter(torch.ones(8, 8))
    assert torch.equal(run(forward, 8), run(loaded.model, 8))


def test_level_1_traces_again_when_dynamo_likes_and_evaluates_guards():
    loaded = models.tiny(1)
    forward = eager(loaded.model, AS_IS)
    before = compilation_counter.snapshot()
    for tokens in (32, 1, 7, 5):
        assert torch.equal(run(forward, tokens), run(loaded.model, tokens))
    after = compilation_counter.snapshot()
    assert after["dynamo_traces"] - before["dynamo_traces"] > 1
    assert after["guards_evaluated"] > before["guards_evaluated"]


def test_level_1_allows_graph_breaks(capsys):
    model = models.BreaksTheGraph()
    with compilation_counter.expect(dynamo_traces=1):
        assert torch.equal(run(eager(model, AS_IS), 8), run(model, 8))
    assert capsys.readouterr().out.count("a graph break") == 2


def test_a_compilation_of_level_1_after_start_up_is_counted_and_one_of_level_2_refused(closed_gate):
    with compilation_counter.expect(compilations_after_startup=1, dynamo_traces=1):
        run(eager(models.WithBuffer(), AS_IS), 8)
    with (
        compilation_counter.expect(compilations_after_startup=1, dynamo_traces=0),
        pytest.raises(CompileError, match="a trace of WithBuffer was attempted after start-up"),
    ):
        run(eager(models.WithBuffer()), 8)


@pytest.mark.parametrize("level", [AS_IS, ONCE])
def test_inductor_compiles_the_whole_forward_with_the_options_given(level):
    loaded = models.tiny(1)
    forward = CompiledForward(loaded.model, level=level, options=QUICK)
    with inductor_session(), compilation_counter.expect(dynamo_traces=1, inductor_compilations=1):
        torch.testing.assert_close(run(forward, 32), run(loaded.model, 32))


@pytest.mark.parametrize("level", [AS_IS, ONCE])
@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"max_autotun": True}, "Inductor has no option 'max_autotun'", "max_autotune"),
        ({"triton.cudagraphs": True}, "'triton.cudagraphs' cannot be used", "Remove it"),
        ({"max_autotune": "yes"}, "takes a value of type bool", "default is False"),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_the_first_call(level, options, message, hint):
    with pytest.raises(ConfigError, match=message) as raised:
        CompiledForward(models.tiny(1).model, level=level, options=options)
    assert hint in raised.value.hint


@pytest.mark.parametrize(("level", "largest"), [(AS_IS, False), (ONCE, True)])
def test_without_guards_kernels_are_new_and_index_for_the_largest_step(monkeypatch, level, largest):
    from torch._inductor.codegen import simd

    plain, seen = simd.expr_fits_within_32bit, []

    def compile_nothing(module, inputs, options):
        assert options["triton.cudagraphs"] is False
        uncached = options.get("fx_graph_cache") is False
        seen.append((simd.expr_fits_within_32bit is not plain, uncached))
        return module.forward

    monkeypatch.setattr(torch._inductor, "compile", compile_nothing)
    run(CompiledForward(models.tiny(1).model, level=level), 8)
    assert seen == [(largest, largest)]


def test_other_levels_and_undecorated_models_are_refused():
    with pytest.raises(CompileError, match="level 3 does not run a whole forward"):
        eager(models.WithBuffer(), CompilationLevel.PIECEWISE)
    with pytest.raises(CompileError, match="Linear does not say that it can be compiled"):
        eager(torch.nn.Linear(1, 1))
    with pytest.raises(CompileError, match="only level 2 has one trace"):
        eager(models.WithBuffer(), AS_IS).trace({})


@pytest.mark.parametrize(
    ("model", "line"),
    [(models.BreaksTheGraph, 'print("a graph break")'), (models.BranchesOnValues, "x.sum() > 0")],
)
def test_a_graph_break_at_level_2_is_an_error_that_shows_the_users_stack(model, line):
    with pytest.raises(GraphBreakError, match="does not trace into one graph") as raised:
        run(eager(model()), 8)
    assert models.__file__ in raised.value.what
    assert line in raised.value.what


def test_a_second_trace_is_an_error_that_shows_where_the_first_was():
    forward = eager(models.WithBuffer())
    run(forward, 8)
    with pytest.raises(GraphBreakError, match=r"second trace of WithBuffer\.forward") as raised:
        forward.trace({"input_ids": ids(8), "positions": ids(8)})
    assert "_first_call" in raised.value.what


def test_a_forward_without_a_graph_is_an_error():
    with pytest.raises(GraphBreakError, match=r"one graph from ReturnsNothing\.forward, got 0"):
        run(eager(stateful.ReturnsNothing()), 8)


@pytest.mark.parametrize(
    "model", [models.FixesTheNumberOfTokens, models.BranchesOnTheNumberOfTokens]
)
def test_a_guard_that_nobody_would_evaluate_is_an_error(model):
    with pytest.raises(CompileError, match="depends on the number of tokens"):
        run(eager(model()), 32)


def test_an_argument_that_was_none_must_stay_none_and_is_named():
    forward = eager(stateful.Optionals())
    expected = stateful.Optionals()(ids(8), None)
    assert torch.equal(forward(ids(8), None), expected)
    with pytest.raises(CompileError, match="'extra' was None when the model was traced"):
        forward(ids(8), ids(8))
    with pytest.raises(CompileError, match="'bias' was None when the model was traced"):
        forward(ids(8), None, bias=ids(8))
    assert torch.equal(forward(extra=None, input_ids=ids(8)), expected)


def test_an_argument_that_was_a_tensor_must_stay_one_and_is_named():
    forward = eager(stateful.Optionals())
    forward(ids(8), ids(8), ids(8))
    with pytest.raises(CompileError, match="'bias' was a tensor when the model was traced"):
        forward(ids(8), ids(8))
    assert torch.equal(forward(ids(3), ids(3), ids(3)), stateful.Optionals()(*[ids(3)] * 3))


def test_intermediate_tensors_are_dynamic():
    forward, model = eager(stateful.TakesIntermediates()), stateful.TakesIntermediates()
    for tokens in (8, 1, 30):
        pair = {"hidden": torch.randn(tokens, 4), "residual": torch.randn(tokens, 4)}
        previous = IntermediateTensors(pair)
        assert torch.equal(forward(previous), model(previous))


def test_two_dynamic_dimensions_are_served_by_one_trace():
    forward, model = eager(stateful.TwoDynamicDims()), stateful.TwoDynamicDims()
    with compilation_counter.expect(dynamo_traces=1):
        for shape in ((4, 9), (1, 3), (7, 2)):
            table = torch.randn(shape)
            assert torch.equal(forward(table), model(table))


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("in place", "layers.1.count"),
        ("assigned buffer", "layers.1.count"),
        ("attribute", "layers.1.calls"),
    ],
)
def test_writes_to_state_are_errors_with_static_graphs_that_show_the_code(how, name):
    model = stateful.Stateful(how)
    with pytest.raises(CompileError, match=f"forward writes '{name}'") as raised:
        run(eager(model, static_graphs=True), 8)
    assert "The transformed code:" in raised.value.what
    assert "__compiled_fn_" in raised.value.what
    assert (model.layers[1].count.sum(), model.layers[1].calls) == (0, 0)  # nothing has run


@pytest.mark.parametrize("how", ["attribute", "dictionary"])
def test_an_assignment_of_something_else_than_a_tensor_is_always_an_error(how):
    model = stateful.Stateful(how)
    with pytest.raises(CompileError, match="assign the value of the trace at every call"):
        run(eager(model), 8)
    assert model.layers[1].calls == 0


@pytest.mark.parametrize("how", ["in place", "assigned buffer", "tensor attribute"])
def test_writes_of_tensors_happen_at_every_call_without_static_graphs(how):
    model, same = stateful.Stateful(how), stateful.Stateful(how)
    forward = eager(model)
    for tokens in (8, 1, 3):
        assert torch.equal(run(forward, tokens), run(same, tokens))
    mine, theirs = model.layers[1], same.layers[1]
    assert torch.equal(mine.count, theirs.count)
    assert torch.equal(mine.last, theirs.last)


def test_a_store_that_only_the_bytecode_shows_is_found_as_well(monkeypatch):
    monkeypatch.setattr(once, "bytecode_stores", lambda code: ("hidden",))
    with pytest.raises(CompileError, match="forward writes 'hidden' of the model itself"):
        run(eager(models.WithBuffer(), static_graphs=True), 8)


def code(source):
    namespace = {}
    exec(source, namespace)
    return namespace["f"].__code__


ORIGINAL = "def f(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f(a):\n    return a", "argument counts"),
        ("def f(a, /, b):\n    return a", "argument counts"),
        ("def f(a, *, b):\n    return a", "argument counts"),
        ("def f(a, b, *c):\n    return a", "kinds of arguments"),
        ("def f(a, b, **c):\n    return a", "kinds of arguments"),
        ("def f(b, a):\n    return a", "arguments"),
        ("def f(a, b):\n    c = 1\n    return lambda: c", "cell variables"),
        ("def g(c):\n    def f(a, b): return c\n    return f\nf = g(1)", "free variables"),
    ],
)
def test_bytecode_with_another_layout_is_an_error_that_names_what_differs(source, what):
    with pytest.raises(CompileError, match=f"has other {what} than forward") as raised:
        check_same_layout(code(ORIGINAL), code(source), where="here")
    assert raised.value.where == "here"
    assert "level 3" in raised.value.hint


def test_bytecode_with_the_same_layout_passes_whatever_it_computes():
    other = "def f(a, b):\n    tmp_0 = a * b\n    return tmp_0 - 1"
    check_same_layout(code(ORIGINAL), code(other), where="here")


def test_the_layout_of_what_dynamo_made_is_checked(monkeypatch):
    monkeypatch.setattr(
        once, "_layout", lambda c, seen=[]: (seen.append(c) or len(seen), 0, 0, 0, 0)
    )
    with pytest.raises(
        CompileError, match="has other argument counts than forward: 2 instead of 1"
    ):
        run(eager(models.WithBuffer()), 8)


def test_the_transformed_code_is_dumped_as_a_python_file(tmp_path):
    forward = eager(models.tiny(1).model, dump_dir=tmp_path / "dump")
    run(forward, 8)
    text = (tmp_path / "dump" / "transformed_code.py").read_text()
    assert "depyf is not installed" in text.splitlines()[0]
    assert "__compiled_fn_" in text
    ast.parse(text)


def test_depyf_shows_python_where_it_is_installed(monkeypatch):
    fake = SimpleNamespace(__spec__=SimpleNamespace(), decompile=lambda c: f"# {c.co_name}")
    monkeypatch.setitem(sys.modules, "depyf", fake)
    assert decompiled(code(ORIGINAL)) == "# f"


def test_a_failure_of_depyf_is_shown_above_the_instructions(monkeypatch):
    def decompile(code):
        raise ValueError("cannot")

    monkeypatch.setitem(
        sys.modules, "depyf", SimpleNamespace(__spec__=SimpleNamespace(), decompile=decompile)
    )
    text = decompiled(code(ORIGINAL))
    assert "depyf cannot decompile it: ValueError: cannot" in text.splitlines()[0]
    assert "RETURN_VALUE" in text


def test_the_modules_whose_code_was_traced_are_known():
    forward = eager(stateful.CallsOtherModules())
    run(forward, 8)
    assert "tests.compilation.inlined" in forward.traced.sources
