"""Every combination of level, mode, splitting ops, back end, enforceEager and platform, against tables.

The tables are in ``resolution_table``; the page ``docs/configuration.md`` shows the same, generated from
the code.
"""

from __future__ import annotations

import itertools

import pytest
from tests.config.builders import spec
from tests.config.resolution_table import (
    CODES,
    MODES,
    PLATFORMS,
    SPLITTING,
    WORK,
    expected_mode,
    where_attention_is,
)

from kerf_runtime.config import (
    CUSTOM_OP_NAMES,
    AttentionGraphSupport,
    CompilationLevel,
    CompilerBackendName,
    CUDAGraphMode,
    DType,
    resolve,
)
from kerf_runtime.errors import ConfigError
from kerf_runtime.reasons import ConfigReason

LEVELS = tuple(int(level) for level in CompilationLevel)
REQUESTS = tuple(mode.value for mode in CUDAGraphMode)
BACKENDS = tuple(backend.value for backend in CompilerBackendName)
FUSIONS = ("normQuantFusion", "activationQuantFusion", "attentionQuantFusion")


def wanted(level, mode, splitting, backend, *, eager, strict=False):
    """Everything switched on, so that everything that cannot be had shows."""
    compilation = {
        "level": level,
        "cudagraphMode": mode,
        "backend": backend,
        "strict": strict,
        "compileSizes": [8, 1, 8],
        "passes": dict.fromkeys(FUSIONS, True),
    }
    if SPLITTING[splitting] is not None:
        compilation["splittingOps"] = SPLITTING[splitting]
    return spec(engine={"enforceEager": eager}, compilation=compilation)


def on(document, platform):
    return resolve(
        document, platform=PLATFORMS[platform], model_max_len=512, model_dtype=DType.BFLOAT16
    )


def changes_of(effective, *fields):
    return [
        (change.field, change.reason.value)
        for change in effective.changes
        if change.field in fields
    ]


def test_the_tables_have_a_row_for_every_combination():
    grades = [grade.name for grade in AttentionGraphSupport]
    places = {where_attention_is(*key) for key in itertools.product(LEVELS, SPLITTING)}
    assert set(MODES) == set(itertools.product(places, grades, REQUESTS))
    assert set(WORK) == set(itertools.product(LEVELS, BACKENDS, (False, True)))
    assert {"cpu", "without graphs", *(f"cuda {grade}" for grade in grades)} == set(PLATFORMS)


def test_every_reason_of_a_change_occurs_in_the_tables():
    # A missing dependency, and tuning for static sizes only, are warnings; what memory and time allow, and what
    # goes wrong in tuning or in a capture, is known after it only; what state-space layers change is in
    # ``test_hybrid``.
    elsewhere = {
        ConfigReason.MIXER_LIMIT,
        ConfigReason.STATE_SPACE_LAYERS,
        ConfigReason.MISSING_DEPENDENCY,
        ConfigReason.STATIC_SIZES_ONLY,
        ConfigReason.TUNING_FAILED,
        ConfigReason.MEMORY_BUDGET,
        ConfigReason.CAPTURE_DELAY_LIMIT,
        ConfigReason.CAPTURE_FAILED,
        ConfigReason.CAPTURE_OUT_OF_MEMORY,
    }
    assert set(CODES.values()) == set(ConfigReason) - elsewhere


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("splitting", SPLITTING)
@pytest.mark.parametrize("level", LEVELS)
def test_every_combination_gives_what_the_tables_say(level, splitting, platform):
    for mode, backend, eager in itertools.product(REQUESTS, BACKENDS, (False, True)):
        case = f"level {level}, {mode}, {splitting}, {backend}, eager {eager}, {platform}"
        effective = on(wanted(level, mode, splitting, backend, eager=eager), platform)
        becomes, ops, noop, rest = WORK[level, backend, eager]

        assert (effective.requested_level, effective.level) == (level, becomes), case
        lowered = [("level", CODES["forced"])] if becomes != level else []
        assert changes_of(effective, "level") == lowered, case

        in_force, reasons = expected_mode(level, mode, splitting, eager=eager, platform=platform)
        assert (effective.requested_mode, effective.mode) == (mode, in_force), case
        assert [reason for _, reason in changes_of(effective, "cudagraphMode")] == reasons, case

        assert effective.custom_ops == (CUSTOM_OP_NAMES if ops == "all" else ()), case
        assert effective.passes.noop_elimination is noop, case
        state, _, word = rest.partition(":")
        off = dict.fromkeys(
            (*(f"passes.{name}" for name in FUSIONS), "compileSizes"), CODES.get(word)
        )
        if state == "on":
            attention = where_attention_is(level, splitting) == "between"
            off = {"passes.attentionQuantFusion": CODES["splitting"]} if attention else {}
        assert (
            dict(changes_of(effective, *(f"passes.{n}" for n in FUSIONS), "compileSizes")) == off
        ), case
        passes = effective.passes.to_document()
        assert {name for name in FUSIONS if passes[name]} == {
            name for name in FUSIONS if f"passes.{name}" not in off
        }, case
        assert effective.compile_sizes == (() if "compileSizes" in off else (1, 8)), case
        assert effective.backend == backend, case
        assert effective.warnings == (), case


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("splitting", SPLITTING)
@pytest.mark.parametrize("level", LEVELS)
def test_strict_refuses_exactly_what_would_be_changed_and_names_every_change(
    level, splitting, platform
):
    for mode, backend, eager in itertools.product(REQUESTS, BACKENDS, (False, True)):
        effective = on(wanted(level, mode, splitting, backend, eager=eager), platform)
        strict = wanted(level, mode, splitting, backend, eager=eager, strict=True)
        if not effective.changes:
            assert on(strict, platform) == effective
            continue
        with pytest.raises(ConfigError) as raised:
            on(strict, platform)
        assert raised.value.where == "compilation.strict"
        for change in effective.changes:
            text = f"{change.field} {change.requested} -> {change.effective} ({change.reason}: "
            assert text in raised.value.what


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("splitting", SPLITTING)
@pytest.mark.parametrize("level", LEVELS)
def test_changes_of_the_mode_form_a_chain_to_one_that_the_machine_can_run(
    level, splitting, platform
):
    facts = PLATFORMS[platform]
    for mode in REQUESTS:
        effective = on(wanted(level, mode, splitting, "inductor", eager=False), platform)
        at = mode
        for change in effective.changes:
            assert change.requested != change.effective
            assert change.message
            if change.field == "cudagraphMode":
                assert change.requested == at
                at = change.effective
        assert at == effective.mode.value
        decode, mixed = effective.mode.decode_mode(), effective.mode.mixed_mode()
        if CUDAGraphMode.PIECEWISE in (decode, mixed):
            assert effective.level is CompilationLevel.PIECEWISE
            assert effective.splitting_ops
        recorded = {CUDAGraphMode.FULL}
        if where_attention_is(level, splitting) == "inside":
            recorded.add(CUDAGraphMode.PIECEWISE)
        if mixed in recorded:
            assert facts.attention_graph_support is AttentionGraphSupport.ALWAYS
        if decode in recorded:
            assert facts.attention_graph_support is not AttentionGraphSupport.NEVER
        if effective.mode is not CUDAGraphMode.NONE:
            assert facts.graph_backend != "none"
        assert bool(effective.capture_sizes) == (effective.mode is not CUDAGraphMode.NONE)
