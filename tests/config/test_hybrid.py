"""What resolution says of a model with state-space layers, about which the document knows nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.config.builders import platform, spec

from kerf_runtime.config import (
    ATTENTION_OPS,
    AttentionGraphSupport,
    CUDAGraphMode,
    DType,
    cache_key,
    declared_factors,
    resolve,
)
from kerf_runtime.config.compilation import MIXER_OPS
from kerf_runtime.errors import ConfigError

ALWAYS, DECODE, NEVER = (
    AttentionGraphSupport.ALWAYS,
    AttentionGraphSupport.SINGLE_TOKEN_DECODE,
    AttentionGraphSupport.NEVER,
)
BOTH = (*ATTENTION_OPS, *MIXER_OPS)
OFF = ("prefixCaching", "StateSpaceLayers")


def resolved(mode="FULL_AND_PIECEWISE", *, mixer=DECODE, engine=None, ops=None, **compilation):
    compilation |= {"cudagraphMode": mode}
    if ops is not None:
        compilation["splittingOps"] = ops
    return resolve(
        spec(engine=engine or {}, compilation=compilation),
        platform=replace(platform(ALWAYS), mixer_graph_support=mixer),
        model_max_len=512,
        model_dtype=DType.BFLOAT16,
        mixer_ops=MIXER_OPS,
    )


def changes(effective):
    return [(change.field, change.reason.value) for change in effective.changes]


@pytest.mark.parametrize(
    ("ops", "effective"),
    [
        (None, BOTH),
        (["kerf::attention"], BOTH),
        (["kerf::attention.default"], ("kerf::attention.default", *MIXER_OPS)),
        (["kerf::mamba_mixer", "kerf::attention"], BOTH),
        (
            ["kerf::attention", "kerf::mamba_mixer.default"],
            ("kerf::attention", "kerf::mamba_mixer.default"),
        ),
        (["kerf::mamba_mixer"], MIXER_OPS),
        (["aten::mm"], ("aten::mm",)),
        ([], ()),
    ],
)
def test_the_mixer_is_cut_out_where_attention_is(ops, effective):
    assert resolved(ops=ops).splitting_ops == effective


def test_one_key_stands_for_one_way_to_cut_whatever_the_model_is():
    def key(ops):
        document = spec(compilation={} if ops is None else {"splittingOps": ops})
        return cache_key(declared_factors(document, image="local"))

    assert key(None) == key(["kerf::attention"])
    assert resolved().splitting_ops == resolved(ops=["kerf::attention"]).splitting_ops
    assert len({key(ops) for ops in (None, ["kerf::mamba_mixer"], ["aten::mm"], [])}) == 4


@pytest.mark.parametrize(
    ("mode", "mixer", "ops", "effective", "limits"),
    [
        ("FULL", ALWAYS, None, "FULL", 0),
        ("FULL", DECODE, None, "FULL_AND_PIECEWISE", 1),
        ("FULL", DECODE, [], "FULL_DECODE_ONLY", 1),
        ("FULL", NEVER, None, "PIECEWISE", 2),
        ("FULL_AND_PIECEWISE", DECODE, None, "FULL_AND_PIECEWISE", 0),
        ("FULL_AND_PIECEWISE", DECODE, ["kerf::mamba_mixer"], "FULL_AND_PIECEWISE", 0),
        ("FULL_AND_PIECEWISE", DECODE, ["aten::mm"], "FULL_DECODE_ONLY", 1),
        ("PIECEWISE", NEVER, None, "PIECEWISE", 0),
        ("PIECEWISE", NEVER, ["aten::mm"], "NONE", 2),
    ],
)
def test_the_mixer_is_recorded_only_as_far_as_the_platform_allows(
    mode, mixer, ops, effective, limits
):
    found = resolved(mode, mixer=mixer, ops=ops)
    assert found.mode == CUDAGraphMode(effective)
    assert changes(found) == [("cudagraphMode", "StateSpaceMixerLimit")] * limits + [OFF]


def test_the_reason_of_a_limit_names_the_platform_and_what_it_supports():
    change = resolved("FULL").changes[0]
    assert "the state-space mixer on cpu supports SINGLE_TOKEN_DECODE in a graph" in change.message


def test_prefix_caching_is_switched_off_with_a_reason_unless_it_is_off_already():
    assert resolved().prefix_caching is False
    assert changes(resolved()) == [OFF]
    without = resolved(engine={"prefixCaching": False}, strict=True)
    assert (without.prefix_caching, without.changes) == (False, ())


def test_strict_refuses_to_serve_without_the_prefix_caching_that_was_asked_for():
    with pytest.raises(ConfigError, match="prefixCaching true -> false"):
        resolved(strict=True)


@pytest.mark.parametrize("asked", [True, False])
def test_a_model_without_state_space_layers_has_the_prefix_caching_it_asks_for(asked):
    found = resolve(
        spec(engine={"prefixCaching": asked}),
        platform=platform(ALWAYS),
        model_max_len=512,
        model_dtype=DType.BFLOAT16,
    )
    assert (found.prefix_caching, found.splitting_ops, found.changes) == (asked, ATTENTION_OPS, ())
