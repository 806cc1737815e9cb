"""What is asked for against what is in force: single fields; every combination is in test_resolution_table."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from tests.config.builders import platform, spec

from kerf_operator.api.status import GraphReason
from kerf_runtime.config import (
    AttentionGraphSupport,
    CompilationLevel,
    CompilerBackendName,
    CUDAGraphMode,
    DType,
    PlatformFacts,
    Quantization,
    resolve,
)
from kerf_runtime.config.resolve import with_graphs
from kerf_runtime.errors import ConfigError
from kerf_runtime.reasons import ConfigReason, ReasonedChange

MODES = tuple(mode.value for mode in CUDAGraphMode)
ALWAYS, UNIFORM, SINGLE, NEVER = (
    AttentionGraphSupport.ALWAYS,
    AttentionGraphSupport.UNIFORM_BATCH,
    AttentionGraphSupport.SINGLE_TOKEN_DECODE,
    AttentionGraphSupport.NEVER,
)


def resolved(
    mode="FULL_AND_PIECEWISE",
    *,
    level=3,
    splitting=None,
    eager=False,
    support=ALWAYS,
    strict=False,
    **compilation,
):
    compilation |= {"cudagraphMode": mode, "level": level, "strict": strict}
    if splitting is not None:
        compilation["splittingOps"] = splitting
    wanted = spec(engine={"enforceEager": eager}, compilation=compilation)
    return resolve(
        wanted, platform=platform(support), model_max_len=512, model_dtype=DType.BFLOAT16
    )


def reasons(effective):
    return [change.reason.value for change in effective.changes]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("support", list(AttentionGraphSupport))
@pytest.mark.parametrize("splitting", [None, []])
def test_enforce_eager_turns_level_and_graphs_off_whatever_else_is_asked(mode, support, splitting):
    effective = resolved(mode, eager=True, support=support, splitting=splitting)
    assert effective.level is CompilationLevel.NO_COMPILATION
    assert effective.mode is CUDAGraphMode.NONE
    assert effective.capture_sizes == ()
    assert reasons(effective) == ["EnforceEager"] * (1 if mode == "NONE" else 2)
    assert effective.requested_level is CompilationLevel.PIECEWISE


def test_enforce_eager_changes_nothing_that_is_off_already():
    assert resolved("NONE", level=0, eager=True).changes == ()


def test_the_reason_of_an_attention_limit_names_the_backend_and_what_it_supports():
    (change,) = resolved("FULL", support=UNIFORM).changes
    assert "some-attention" in change.message
    assert "UNIFORM_BATCH" in change.message


def test_the_default_asks_for_full_decode_and_piecewise_mixed_graphs_at_level_3():
    effective = resolve(spec(), platform=platform(), model_max_len=512, model_dtype=DType.BFLOAT16)
    assert effective.level is CompilationLevel.PIECEWISE
    assert effective.mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert effective.splitting_ops == ("kerf::attention",)
    assert effective.capture_sizes == (1, 2, 4, 8, 16)
    assert effective.changes == ()


def test_attention_inside_a_piece_is_recorded_only_as_far_as_its_implementation_allows():
    inside = {"splitting": ["aten::mm"], "support": UNIFORM}
    effective = resolved("PIECEWISE", **inside)
    assert effective.mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert reasons(effective) == ["AttentionBackendLimit"]
    assert resolved("PIECEWISE", splitting=["kerf::attention"], support=NEVER).changes == ()


def test_a_platform_without_graphs_records_none_and_is_named():
    facts = PlatformFacts("tpu", "none", "some-attention", ALWAYS, DType.AUTO)
    effective = resolve(spec(), platform=facts, model_max_len=8, model_dtype=DType.FLOAT32)
    (change,) = effective.changes
    assert (effective.mode, effective.capture_sizes) == (CUDAGraphMode.NONE, ())
    assert change.reason == "PlatformUnsupported"
    assert "tpu" in change.message


def test_what_needs_no_resolution_is_carried_over():
    effective = resolve(
        spec(
            engine={"quantization": "fp8"},
            compilation={"backend": "eager", "cudagraphCopyInputs": True},
        ),
        platform=platform(),
        model_max_len=8,
        model_dtype=DType.FLOAT32,
    )
    assert effective.quantization is Quantization.FP8
    assert effective.backend is CompilerBackendName.EAGER
    assert effective.cudagraph_copy_inputs is True
    assert resolved().quantization is None
    assert resolved().cudagraph_copy_inputs is False


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_defaults_are_had_as_requested_at_every_level(level, backend):
    assert resolved("NONE", level=level, backend=backend, strict=True).changes == ()


def test_a_fusion_without_noop_elimination_is_kept_with_a_warning_that_strict_does_not_refuse():
    passes = {"noopElimination": False, "normQuantFusion": True, "activationQuantFusion": True}
    effective = resolved(passes=passes, strict=True)
    assert effective.changes == ()
    assert effective.passes.norm_quant_fusion
    assert [(w.field, w.reason.value) for w in effective.warnings] == [
        ("passes.normQuantFusion", "MissingDependency"),
        ("passes.activationQuantFusion", "MissingDependency"),
    ]
    assert all("noopElimination" in warning.message for warning in effective.warnings)


def test_a_fusion_that_is_off_anyway_is_not_warned_about():
    passes = {"noopElimination": False, "normQuantFusion": True}
    assert resolved(level=2, mode="NONE", passes=passes).warnings == ()


def test_attention_fusion_says_that_the_splitting_ops_are_in_its_way():
    (change,) = resolved(passes={"attentionQuantFusion": True}).changes
    assert (change.field, change.requested, change.effective) == (
        "passes.attentionQuantFusion",
        "true",
        "false",
    )
    assert change.reason == "SplittingOpsLimit"
    assert "splitting ops" in change.message


def test_static_sizes_that_nothing_compiles_are_reported_as_they_were_written():
    sizes = [8, "cudagraph_capture_sizes"]
    (change,) = resolved("NONE", level=1, compileSizes=sizes).changes
    assert (change.field, change.requested, change.effective) == (
        "compileSizes",
        "8, cudagraph_capture_sizes",
        "none",
    )


def test_splitting_ops_are_taken_as_given():
    assert resolved(splitting=["aten::mm", "my::op"]).splitting_ops == ("aten::mm", "my::op")


@pytest.mark.parametrize(
    ("wanted", "default", "model", "effective"),
    [
        ("auto", DType.FLOAT32, DType.BFLOAT16, DType.FLOAT32),
        ("auto", DType.AUTO, DType.BFLOAT16, DType.BFLOAT16),
        ("float16", DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16),
    ],
)
def test_dtype_auto_is_the_platforms_choice_then_the_checkpoints(wanted, default, model, effective):
    found = resolve(
        spec(engine={"dtype": wanted}),
        platform=platform(default_dtype=default),
        model_max_len=8,
        model_dtype=model,
    )
    assert found.dtype is effective


def test_max_model_len_defaults_to_the_models_own_limit():
    assert resolved().max_model_len == 512


def test_a_max_model_len_above_the_models_limit_names_both_numbers_and_the_field():
    with pytest.raises(ConfigError, match=r"engine\.maxModelLen: maxModelLen 513 .* 512 tokens"):
        resolve(
            spec(engine={"maxModelLen": 513}),
            platform=platform(),
            model_max_len=512,
            model_dtype=DType.FLOAT32,
        )


def test_the_json_form_has_numbers_and_names_only():
    import json

    data = resolved("FULL", support=UNIFORM, passes={"noopElimination": False}).to_json()
    lists = {name: list(value) for name, value in data.items() if isinstance(value, tuple)}
    assert json.loads(json.dumps(data)) == {**data, **lists}
    assert (data["requested_level"], data["level"]) == (3, 3)
    assert (data["requested_mode"], data["mode"]) == ("FULL", "FULL_AND_PIECEWISE")
    assert data["changes"][0]["reason"] == "AttentionBackendLimit"
    assert data["passes"]["noopElimination"] is False


def left_by_the_capture(strict, changes):
    effective = resolve(spec(), platform=platform(), model_max_len=64, model_dtype=DType.FLOAT32)
    return with_graphs(
        effective,
        mode=CUDAGraphMode.FULL,
        capture_sizes=(1, 2),
        capture_mode=effective.capture_mode,
        changes=changes,
        strict=strict,
    )


OVER_BUDGET = ReasonedChange(
    "captureSizes", "1, 2, 4", "1, 2", ConfigReason.MEMORY_BUDGET, "1 of 3 graphs do not fit"
)


def test_graphs_that_do_not_fit_their_memory_are_a_change_like_any_other():
    effective = left_by_the_capture(False, [OVER_BUDGET])
    assert effective.mode is CUDAGraphMode.FULL
    assert effective.capture_sizes == (1, 2)
    assert effective.changes[-1] == OVER_BUDGET
    assert effective.requested_mode is CUDAGraphMode.FULL_AND_PIECEWISE


def test_strict_refuses_graphs_that_do_not_fit_their_memory():
    assert left_by_the_capture(True, []).capture_sizes == (1, 2)
    with pytest.raises(ConfigError, match=r"strict is set .*MemoryBudget: 1 of 3 graphs") as raised:
        left_by_the_capture(True, [OVER_BUDGET])
    assert raised.value.where == "compilation.strict"


def test_strict_does_not_mind_when_graphs_are_captured():
    later = ReasonedChange(
        "captureMode", "progressive", "eager", ConfigReason.CAPTURE_DELAY_LIMIT, "too slow"
    )
    assert left_by_the_capture(True, [later]).changes[-1] == later


def test_the_memory_of_graphs_is_in_force_in_bytes():
    wanted = spec(compilation={"graphMemoryBudget": "1Mi"})
    effective = resolve(wanted, platform=platform(), model_max_len=64, model_dtype=DType.FLOAT32)
    assert effective.graph_memory_budget == 2**20
    assert effective.to_json()["graph_memory_budget"] == 2**20


def test_the_longest_list_of_static_sizes_that_are_off_fits_the_status_of_a_model_deployment():
    sizes = list(range(65536 - 63, 65537))
    wanted = spec(
        engine={"maxNumBatchedTokens": 65536},
        compilation={"level": 0, "cudagraphMode": "NONE", "compileSizes": sizes},
    )
    effective = resolve(wanted, platform=platform(), model_max_len=64, model_dtype=DType.FLOAT32)
    [change] = effective.changes
    assert change.requested.startswith("65473, 65474, ")
    assert change.requested.endswith(", ...")
    GraphReason.model_validate(asdict(change))
