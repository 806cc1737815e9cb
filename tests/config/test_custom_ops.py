"""Which layers run as custom operators: a base, names on top, and errors that name the offender."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.config.builders import MODEL, document

from kerf_runtime.config import CUSTOM_OP_NAMES, parse_document, resolve_custom_ops
from kerf_runtime.config.custom_ops import canonical_choices
from kerf_runtime.errors import ConfigError

EVERY = frozenset(CUSTOM_OP_NAMES)


@pytest.mark.parametrize("inductor", [True, False])
@pytest.mark.parametrize(
    ("requested", "with_inductor", "without"),
    [
        (None, set(), EVERY),
        ([], set(), EVERY),
        (["all"], EVERY, EVERY),
        (["none"], set(), set()),
        (["+rms_norm"], {"rms_norm"}, EVERY),
        (["-rms_norm"], set(), EVERY - {"rms_norm"}),
        (["none", "+quant_fp8", "+rms_norm"], {"quant_fp8", "rms_norm"}, {"quant_fp8", "rms_norm"}),
        (["-silu_and_mul", "all"], EVERY - {"silu_and_mul"}, EVERY - {"silu_and_mul"}),
        (["all", "+rms_norm", "+rms_norm"], EVERY, EVERY),
    ],
)
def test_the_base_is_none_with_inductor_and_all_without_and_names_change_it(
    requested, with_inductor, without, inductor
):
    assert resolve_custom_ops(requested, inductor=inductor) == (
        with_inductor if inductor else without
    )


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        (["all", "none"], ["all and none contradict"]),
        (["+rms_norm", "all", "-rms_norm"], ["+rms_norm and -rms_norm contradict"]),
        (["+rms_nrom"], ["'+rms_nrom'", "Did you mean +rms_norm"]),
        (["rotary_embedding"], ["'rotary_embedding'", "Did you mean +rotary_embedding or -"]),
        (["ALL"], ["'ALL'"]),
        (["zzz"], ["'zzz'", *CUSTOM_OP_NAMES]),
        ([""], ["''"]),
    ],
)
def test_unknown_and_contradicting_entries_are_errors_that_name_them(requested, words):
    with pytest.raises(ConfigError) as raised:
        resolve_custom_ops(requested, inductor=True)
    assert raised.value.where == "compilation.customOps"
    data = document({"model": MODEL, "compilation": {"customOps": requested}})
    with pytest.raises(ConfigError) as refused:
        parse_document(data, where="file")
    for word in words:
        assert word in str(raised.value)
        assert word in str(refused.value)
    assert "customOps" in str(refused.value)


@given(st.frozensets(st.sampled_from(CUSTOM_OP_NAMES)), st.booleans())
def test_the_canonical_form_means_the_same_whatever_compiles(enabled, inductor):
    assert resolve_custom_ops(canonical_choices(enabled), inductor=inductor) == enabled


def test_the_names_are_sorted():
    assert sorted(CUSTOM_OP_NAMES) == list(CUSTOM_OP_NAMES)
