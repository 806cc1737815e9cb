"""Which batch sizes get a graph: the default ladder and what a user may ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.config.builders import document, platform, spec

from kerf_runtime.config import DType, default_capture_sizes, parse_document, resolve
from kerf_runtime.errors import ConfigError


@st.composite
def limits(draw):
    seqs = draw(st.integers(1, 4096))
    return seqs, draw(st.integers(seqs, 65536))


@given(limits())
def test_default_sizes_are_sorted_unique_and_within_the_limits(limits):
    seqs, tokens = limits
    sizes = default_capture_sizes(seqs, tokens)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] <= tokens


@given(limits())
def test_the_largest_default_size_holds_every_decode_batch_and_wastes_less_than_a_step(limits):
    seqs, tokens = limits
    largest = default_capture_sizes(seqs, tokens)[-1]
    assert seqs <= largest < seqs + 8
    # A step can have exactly that many tokens, so the last graph is never out of reach.
    assert largest <= tokens


@given(limits())
def test_default_sizes_are_1_2_4_then_multiples_of_8_but_for_the_last(limits):
    for size in default_capture_sizes(*limits)[:-1]:
        assert size in (1, 2, 4) or size % 8 == 0


@pytest.mark.parametrize(
    ("seqs", "tokens", "sizes"),
    [
        (1, 1, (1,)),
        (2, 512, (1, 2)),
        (3, 512, (1, 2, 3)),
        (4, 512, (1, 2, 4)),
        (5, 5, (1, 2, 4, 5)),
        (5, 512, (1, 2, 4, 8)),
        (16, 512, (1, 2, 4, 8, 16)),
        (20, 22, (1, 2, 4, 8, 16, 22)),
        (20, 512, (1, 2, 4, 8, 16, 24)),
    ],
)
def test_default_sizes_by_example(seqs, tokens, sizes):
    assert default_capture_sizes(seqs, tokens) == sizes


@given(st.lists(st.integers(1, 512), min_size=1, max_size=30))
def test_requested_sizes_are_sorted_and_unique(sizes):
    wanted = spec(compilation={"captureSizes": sizes})
    found = resolve(wanted, platform=platform(), model_max_len=64, model_dtype=DType.FLOAT32)
    assert found.capture_sizes == tuple(sorted(set(sizes)))


@pytest.mark.parametrize("bad", [0, -3, 65537])
def test_a_size_out_of_range_is_an_error_that_names_its_place_and_value(bad):
    data = document()
    data["spec"] = {**data["spec"], "compilation": {"captureSizes": [4, bad]}}
    with pytest.raises(ConfigError, match=rf"compilation\.captureSizes\.1: .*got {bad}\b"):
        parse_document(data, where="file.yaml")


@pytest.mark.parametrize("bad", [True, "8", 4.5])
def test_a_size_that_is_no_whole_number_is_an_error_that_names_its_place_and_value(bad):
    data = document()
    data["spec"] = {**data["spec"], "compilation": {"captureSizes": [4, bad]}}
    words = rf"compilation\.captureSizes\.1: .*valid integer.*got {bad!r}"
    with pytest.raises(ConfigError, match=words):
        parse_document(data, where="file.yaml")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([], "at least 1 item after validation, not 0"),
        (list(range(1, 258)), "at most 256 .* not 257"),
    ],
)
@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_a_list_of_no_or_too_many_sizes_is_an_error_that_names_the_field_and_the_number(
    sizes, words, mode
):
    data = document()
    compilation = {"captureSizes": sizes, "cudagraphMode": mode}
    data["spec"] = {**data["spec"], "compilation": compilation}
    with pytest.raises(ConfigError, match=rf"compilation\.captureSizes: .*{words}"):
        parse_document(data, where="file.yaml")


SIZES = {"captureSizes": [8, 65]}
STATIC = {"compileSizes": ["cudagraph_capture_sizes"]}


@pytest.mark.parametrize(
    ("field", "compilation", "engine"),
    [
        ("captureSizes", SIZES, {}),
        ("captureSizes", {**SIZES, **STATIC, "cudagraphMode": "NONE"}, {}),
        ("captureSizes", {**SIZES, **STATIC}, {"enforceEager": True}),
        ("compileSizes", {"compileSizes": [8, 65, 66, "cudagraph_capture_sizes"]}, {}),
        ("compileSizes", {"compileSizes": [65], "level": 0}, {}),
    ],
)
def test_a_size_above_the_largest_step_is_an_error_that_names_the_field_and_both_numbers(
    field, compilation, engine
):
    words = rf"compilation\.{field} holds 65, above engine\.maxNumBatchedTokens 64: no step is that"
    data = document()
    engine = {"maxNumBatchedTokens": 64, **engine}
    data["spec"] = {**data["spec"], "engine": engine, "compilation": compilation}
    with pytest.raises(ConfigError, match=words):
        parse_document(data, where="file.yaml")


@pytest.mark.parametrize(
    ("compilation", "engine"),
    [
        ({**SIZES, "cudagraphMode": "NONE"}, {}),
        ({**SIZES, "cudagraphMode": "NONE", "compileSizes": [64]}, {}),
        (SIZES, {"enforceEager": True}),
        ({"captureSizes": [64], "compileSizes": [64]}, {}),
    ],
)
def test_sizes_that_nothing_uses_may_be_above_the_largest_step(compilation, engine):
    spec(engine={"maxNumBatchedTokens": 64, **engine}, compilation=compilation)


def test_a_step_too_small_for_a_full_decode_batch_is_an_error_that_names_both_numbers():
    with pytest.raises(ValidationError, match="maxNumBatchedTokens 8 is below maxNumSeqs 16"):
        spec(engine={"maxNumBatchedTokens": 8})
