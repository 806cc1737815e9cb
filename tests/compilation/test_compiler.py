"""Cold compilation: one trace, every distinct piece once, right results."""

from __future__ import annotations

import pytest
import torch
from tests.compilation import models
from tests.compilation.graphs import ATTENTION
from tests.compilation.helpers import QUICK, make_spec, open_cache, prepare, run

from kerf_runtime.compilation.backends import CompileRequest, backend_named, inductor
from kerf_runtime.compilation.backends.inductor import InductorBackend
from kerf_runtime.compilation.backends.options import validate_options
from kerf_runtime.compilation.compiler import CompileOptions, compile_model
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.internals import check_torch_version
from kerf_runtime.errors import CompileError, ConfigError


def compile_it(model, *, ops=ATTENTION, options=None):
    return compile_model(
        model,
        CompileOptions(ops, inductor=QUICK if options is None else options),
        device=torch.device("cpu"),
        progress=lambda *_: None,
    )


@pytest.mark.parametrize("layers", [1, 2, 3, 12])
def test_a_model_of_n_layers_compiles_each_kind_of_piece_once(layers):
    loaded = models.tiny(layers)
    distinct = min(layers + 1, 3)
    with compilation_counter.expect(
        dynamo_traces=1,
        graphs_seen=1,
        pieces_seen=2 * layers + 1,
        capturable_pieces_seen=layers + 1,
        backend_compilations=distinct,
        inductor_compilations=distinct,
        artifacts_saved=distinct,
        artifacts_loaded=distinct,
        guards_evaluated=0,
    ):
        prepared = prepare(loaded, open_cache(None, "tiny"))
    assert prepared.gate["passed"]
    for tokens in (1, 3, 32):
        expected = run(loaded.model, tokens)
        torch.testing.assert_close(run(prepared.forward, tokens), expected)


def test_what_compilers_of_kernels_are_waited_for_is_part_of_the_compilation():
    compiled = compile_it(models.tiny(1).model)
    waited = [piece.general.kernel_seconds for piece in compiled.pieces.values()]
    assert all(seconds > 0 for seconds in waited)
    assert sum(waited) < compiled.timings["inductor"]


def test_the_30_layer_llama_is_one_trace_61_pieces_and_3_compilations(cold):
    assert {
        name: cold.counters[name]
        for name in (
            "dynamo_traces",
            "graphs_seen",
            "pieces_seen",
            "capturable_pieces_seen",
            "backend_compilations",
            "inductor_compilations",
            "artifacts_saved",
            "artifacts_loaded",
            "guards_evaluated",
            "compilations_after_startup",
        )
    } == {
        "dynamo_traces": 1,
        "graphs_seen": 1,
        "pieces_seen": 61,
        "capturable_pieces_seen": 31,
        "backend_compilations": 3,
        "inductor_compilations": 3,
        "artifacts_saved": 3,
        "artifacts_loaded": 3,
        "guards_evaluated": 0,
        "compilations_after_startup": 0,
    }
    report = cold.prepared.report()
    assert (report["pieces"], report["capturable"], report["distinct"]) == (61, 31, 3)


@pytest.mark.parametrize("tokens", [1, 2, 7, 32, 100])
def test_compiled_and_eager_llama_agree_for_any_number_of_tokens(cold, tokens):
    expected = run(cold.loaded.model, tokens)
    torch.testing.assert_close(run(cold.prepared.forward, tokens), expected, rtol=1e-4, atol=1e-4)


def test_calls_evaluate_no_guard_and_trace_nothing(cold):
    with compilation_counter.expect(guards_evaluated=0, dynamo_traces=0, backend_compilations=0):
        for tokens in range(1, 60):
            run(cold.prepared.forward, tokens, seed=tokens)


def test_guards_are_counted_where_there_are_any(cold):
    def double(x):
        return x * 2

    compiled = torch.compile(double, backend="eager")
    compiled(torch.ones(3))
    before = compilation_counter.guards_evaluated
    compiled(torch.ones(3))
    assert compilation_counter.guards_evaluated > before
    torch._dynamo.reset()


def test_compiling_after_startup_is_an_error_and_counted(monkeypatch):
    monkeypatch.setattr(compile_gate, "open", False)
    with (
        compilation_counter.expect(compilations_after_startup=1, dynamo_traces=0),
        pytest.raises(CompileError, match="a trace of Tiny was attempted after start-up"),
    ):
        compile_it(models.tiny(1).model)
    with (
        compilation_counter.expect(compilations_after_startup=1, backend_compilations=0),
        pytest.raises(CompileError, match="the compilation of a piece was attempted"),
    ):
        backend_named("inductor").compile(
            CompileRequest(torch.fx.GraphModule({}, torch.fx.Graph()), [])
        )


def test_the_steps_are_reported_in_order_with_fractions(cold):
    phases = [phase for phase, _, _ in cold.progress]
    assert list(dict.fromkeys(phases)) == ["trace", "split", "compile", "parity", "save"]
    fractions = [fraction for phase, _, fraction in cold.progress if phase == "compile"]
    assert fractions == [0, 1 / 3, 2 / 3]
    details = [detail for phase, detail, _ in cold.progress if phase == "compile"]
    assert details == ["piece 1 of 3", "piece 2 of 3", "piece 3 of 3"]
    assert set(cold.prepared.timings) == {"trace", "split", "inductor", "parity", "save"}


def test_an_unknown_inductor_option_is_an_error_before_any_work_and_names_near_matches():
    with (
        compilation_counter.expect(dynamo_traces=0),
        pytest.raises(ConfigError, match="no option 'max_autotun'") as raised,
    ):
        compile_it(models.tiny(1).model, options={"max_autotun": True})
    assert raised.value.where == "compilation.inductorConfig"
    assert "max_autotune" in raised.value.hint


def test_known_inductor_options_are_accepted_and_nonsense_gets_a_hint():
    validate_options({"max_autotune": True, "cpp.simdlen": 8})
    with pytest.raises(ConfigError, match=r"torch\._inductor\.config"):
        validate_options({"qqqqqqqqqq": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_autotune": "yes"}, "'max_autotune' takes a value of type bool, not 'yes'"),
        ({"max_autotune": 1}, "'max_autotune' takes a value of type bool, not 1"),
        ({"cpp.threads": "two"}, "'cpp.threads' takes a value of type int, not 'two'"),
        ({"cpp_wrapper": True}, "'cpp_wrapper' cannot be used: pieces are stored with wrappers"),
    ],
)
def test_an_inductor_option_that_cannot_work_is_refused_with_the_reason(options, message):
    with pytest.raises(ConfigError, match=message) as raised:
        validate_options(options)
    assert raised.value.where == "compilation.inductorConfig"


def test_what_inductor_raises_names_the_options_that_may_be_the_cause(monkeypatch):
    def fail(*_):
        raise TypeError("'<' not supported")

    monkeypatch.setattr(inductor, "_generate", fail)
    options = {"max_autotune": True}
    with pytest.raises(CompileError, match="could not compile a piece: TypeError: '<'") as raised:
        InductorBackend().compile(
            CompileRequest(torch.fx.GraphModule({}, torch.fx.Graph()), [], options=options)
        )
    assert "compilation.inductorConfig sets max_autotune" in str(raised.value)


def test_an_unknown_splitting_op_is_an_error_before_any_work():
    with compilation_counter.expect(dynamo_traces=0), pytest.raises(ConfigError, match="kerf::no"):
        compile_it(models.tiny(1).model, ops=("kerf::no",))


def test_a_splitting_op_that_the_forward_never_calls_is_an_error():
    with (
        compilation_counter.expect(backend_compilations=0),
        pytest.raises(ConfigError, match="forward of Tiny never calls aten::sort") as raised,
    ):
        compile_it(models.tiny(1).model, ops=("aten::sort",))
    assert raised.value.where == "compilation.splittingOps"
    assert "kerf::attention" in str(raised.value)


def test_every_splitting_op_must_be_called():
    with pytest.raises(ConfigError, match="never calls aten::sort\\. "):
        compile_it(models.tiny(1).model, ops=("aten::sort", "kerf::attention"))


@pytest.mark.parametrize("version", ["2.10.0", "2.12.0+cpu", "2.1", "2.110.0", "3.0"])
def test_a_torch_version_that_was_not_tested_is_refused_with_what_to_do(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(
        CompileError, match=f"torch {version.replace('+', '.')} is not supported"
    ) as raised:
        compile_it(models.tiny(1).model)
    assert "Install torch 2.11" in raised.value.hint
    assert "level to 0" in raised.value.hint


@pytest.mark.parametrize("version", ["2.11.0", "2.11.1+cu130", "2.11"])
def test_every_patch_release_of_a_tested_version_is_accepted(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    check_torch_version()


def test_a_whole_forward_with_attention_inside_is_one_piece():
    loaded = models.tiny(2)
    with compilation_counter.expect(
        pieces_seen=1, capturable_pieces_seen=1, inductor_compilations=1
    ):
        prepared = prepare(loaded, open_cache(None, "whole"), spec=make_spec(splittingOps=[]))
    (step,) = prepared.artifact.plan.steps
    assert step.kind == "piece"
    for tokens in (1, 5, 32):
        torch.testing.assert_close(run(prepared.forward, tokens), run(loaded.model, tokens))


def test_in_place_writes_and_views_survive_compilation_as_one_piece():
    model = models.WritesInPlace().eval()
    loaded = models.LoadedModel(model, models.TinyConfig(), ())
    with compilation_counter.expect(pieces_seen=1, inductor_compilations=1):
        prepared = prepare(loaded, open_cache(None, "in-place"), spec=make_spec(splittingOps=[]))
    for tokens in (1, 5, 32):
        expected = run(model, tokens)
        torch.testing.assert_close(run(prepared.forward, tokens), expected)
