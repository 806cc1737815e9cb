"""What is asked for against what is in force, with a reason for every difference."""

from __future__ import annotations

import itertools

import pytest
from tests.config.builders import platform, spec

from kerf_runtime.config import (
    AttentionGraphSupport,
    CompilationLevel,
    CUDAGraphMode,
    DType,
    resolve,
)
from kerf_runtime.errors import ConfigError

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


EMPTY, LIMIT, LOW, EAGER = (
    "EmptySplittingOps",
    "AttentionBackendLimit",
    "LevelTooLow",
    "EnforceEager",
)

# (level, splitting ops, attention support) -> requested mode -> (effective mode, reasons).
# A mode that is not listed stays as it was requested, without a reason.
TABLE = {
    (3, "default", ALWAYS): {},
    (3, "default", UNIFORM): {"FULL": ("FULL_AND_PIECEWISE", [LIMIT])},
    (3, "default", SINGLE): {"FULL": ("FULL_AND_PIECEWISE", [LIMIT])},
    (3, "default", NEVER): {
        "FULL": ("PIECEWISE", [LIMIT, LIMIT]),
        "FULL_DECODE_ONLY": ("NONE", [LIMIT]),
        "FULL_AND_PIECEWISE": ("PIECEWISE", [LIMIT]),
    },
    (3, "empty", ALWAYS): {
        "PIECEWISE": ("FULL", [EMPTY]),
        "FULL_AND_PIECEWISE": ("FULL", [EMPTY]),
    },
    (3, "empty", UNIFORM): {
        "PIECEWISE": ("FULL_DECODE_ONLY", [EMPTY, LIMIT]),
        "FULL": ("FULL_DECODE_ONLY", [LIMIT]),
        "FULL_AND_PIECEWISE": ("FULL_DECODE_ONLY", [EMPTY, LIMIT]),
    },
    (3, "empty", SINGLE): {
        "PIECEWISE": ("FULL_DECODE_ONLY", [EMPTY, LIMIT]),
        "FULL": ("FULL_DECODE_ONLY", [LIMIT]),
        "FULL_AND_PIECEWISE": ("FULL_DECODE_ONLY", [EMPTY, LIMIT]),
    },
    (3, "empty", NEVER): {
        "PIECEWISE": ("NONE", [EMPTY, LIMIT, LIMIT]),
        "FULL": ("NONE", [LIMIT, LIMIT]),
        "FULL_DECODE_ONLY": ("NONE", [LIMIT]),
        "FULL_AND_PIECEWISE": ("NONE", [EMPTY, LIMIT, LIMIT]),
    },
}
# At level 0 nothing is split, so the splitting ops do not matter.
for ops in ("default", "empty"):
    TABLE[0, ops, ALWAYS] = {
        "PIECEWISE": ("NONE", [LOW]),
        "FULL_AND_PIECEWISE": ("FULL_DECODE_ONLY", [LOW]),
    }
    TABLE[0, ops, UNIFORM] = TABLE[0, ops, SINGLE] = {
        "PIECEWISE": ("NONE", [LOW]),
        "FULL": ("FULL_DECODE_ONLY", [LIMIT]),
        "FULL_AND_PIECEWISE": ("FULL_DECODE_ONLY", [LOW]),
    }
    TABLE[0, ops, NEVER] = {
        "PIECEWISE": ("NONE", [LOW]),
        "FULL": ("NONE", [LIMIT, LIMIT]),
        "FULL_DECODE_ONLY": ("NONE", [LIMIT]),
        "FULL_AND_PIECEWISE": ("NONE", [LOW, LIMIT]),
    }


def test_the_table_has_every_combination():
    assert set(TABLE) == set(
        itertools.product((0, 3), ("default", "empty"), (ALWAYS, UNIFORM, SINGLE, NEVER))
    )


@pytest.mark.parametrize(
    ("level", "ops", "support", "mode"),
    [(*key, mode) for key in sorted(TABLE) for mode in MODES],
)
def test_every_combination_gives_the_mode_and_the_reasons_of_the_table(level, ops, support, mode):
    expected_mode, expected_reasons = TABLE[level, ops, support].get(mode, (mode, []))
    splitting = [] if ops == "empty" else None
    effective = resolved(mode, level=level, splitting=splitting, support=support)
    assert (effective.mode, reasons(effective)) == (expected_mode, expected_reasons)
    assert effective.requested_mode == mode
    assert effective.level == effective.requested_level == level


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("support", list(AttentionGraphSupport))
@pytest.mark.parametrize("splitting", [None, []])
def test_enforce_eager_turns_level_and_graphs_off_whatever_else_is_asked(mode, support, splitting):
    effective = resolved(mode, eager=True, support=support, splitting=splitting)
    assert effective.level is CompilationLevel.NO_COMPILATION
    assert effective.mode is CUDAGraphMode.NONE
    assert effective.capture_sizes == ()
    assert reasons(effective) == [EAGER] if mode == "NONE" else [EAGER, EAGER]
    assert effective.requested_level is CompilationLevel.PIECEWISE


def test_enforce_eager_changes_nothing_that_is_off_already():
    assert resolved("NONE", level=0, eager=True).changes == ()


@pytest.mark.parametrize(("level", "ops", "support"), sorted(TABLE))
@pytest.mark.parametrize("mode", MODES)
def test_changes_form_a_chain_from_the_requested_to_the_effective_mode(level, ops, support, mode):
    splitting = [] if ops == "empty" else None
    effective = resolved(mode, level=level, splitting=splitting, support=support)
    at = effective.requested_mode.value
    for change in effective.changes:
        assert (change.field, change.requested) == ("cudagraphMode", at)
        assert change.effective != at
        assert change.message
        at = change.effective
    assert at == effective.mode.value


@pytest.mark.parametrize(("level", "ops", "support"), sorted(TABLE))
@pytest.mark.parametrize("mode", MODES)
def test_strict_refuses_exactly_what_would_be_changed(level, ops, support, mode):
    arguments = {
        "level": level,
        "splitting": [] if ops == "empty" else None,
        "support": support,
    }
    effective = resolved(mode, **arguments)
    if not effective.changes:
        assert resolved(mode, strict=True, **arguments) == effective
        return
    with pytest.raises(ConfigError) as raised:
        resolved(mode, strict=True, **arguments)
    assert raised.value.where == "compilation.strict"
    for change in effective.changes:
        assert f"{change.requested} -> {change.effective}" in raised.value.what
        assert change.reason.value in raised.value.what


@pytest.mark.parametrize(("level", "ops", "support"), sorted(TABLE))
@pytest.mark.parametrize("mode", MODES)
def test_the_effective_mode_is_one_the_machine_can_run(level, ops, support, mode):
    effective = resolved(
        mode, level=level, splitting=[] if ops == "empty" else None, support=support
    )
    if effective.mode.requires_piecewise_compilation():
        assert effective.level is CompilationLevel.PIECEWISE
        assert effective.splitting_ops
    if effective.mode.mixed_mode() is CUDAGraphMode.FULL:
        assert support is ALWAYS
    if effective.mode.decode_mode() is CUDAGraphMode.FULL:
        assert support is not NEVER
    assert bool(effective.capture_sizes) == (effective.mode is not CUDAGraphMode.NONE)


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
    assert data["changes"][0]["reason"] == LIMIT
    assert data["passes"]["noopElimination"] is False
