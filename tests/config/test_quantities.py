"""Quantities of bytes, written as Kubernetes writes them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import WithJsonSchema
from tests.config.builders import spec

from kerf_runtime.config import parse_quantity
from kerf_runtime.config.base import Quantity

UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


@given(st.integers(0, 10**18), st.sampled_from(sorted(UNITS)))
def test_a_whole_number_with_a_unit_is_exact(number, unit):
    assert parse_quantity(f"{number}{unit}") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "expected"), [("1.5Gi", 3 * 2**29), ("0.5k", 500), (" 2Gi ", 2**31), ("0", 0)]
)
def test_fractions_and_spaces_around_are_understood(text, expected):
    assert parse_quantity(text) == expected


@pytest.mark.parametrize("text", ["", "Gi", "-1Gi", "1 Gi", "1gb", "1Pi", "1e3", "٣Gi", "1.Gi"])
def test_anything_else_is_an_error_that_shows_the_text_and_an_example(text):
    with pytest.raises(ValueError, match=re.escape(repr(text)) + ".*512Mi"):
        parse_quantity(text)


@given(st.text(max_size=12))
def test_the_schema_accepts_no_text_that_the_parser_refuses(text):
    [schema] = [m.json_schema for m in Quantity.__metadata__ if isinstance(m, WithJsonSchema)]
    pattern = schema["pattern"]
    if re.search(pattern, text, re.ASCII):
        parse_quantity(text)


@pytest.mark.parametrize("value", [0, 100, 1.5])
def test_a_number_is_refused_with_what_to_write_instead(value):
    with pytest.raises(ValueError, match=rf'a quantity is text: write "{value}", or for example'):
        spec(compilation={"graphMemoryBudget": value})


def test_a_memory_that_is_no_quantity_may_be_auto_and_the_message_says_so():
    assert spec(engine={"kvCacheMemory": "auto"}).engine.kv_cache_bytes is None
    with pytest.raises(ValueError, match=r"'AUTO' is not a quantity .*, or auto"):
        spec(engine={"kvCacheMemory": "AUTO"})


def test_the_document_keeps_a_quantity_as_it_was_written():
    engine = spec(engine={"kvCacheMemory": "1.5Gi"}).engine
    assert engine.to_document()["kvCacheMemory"] == "1.5Gi"
    assert engine.kv_cache_bytes == 3 * 2**29


def test_the_memory_of_graphs_is_a_quantity_or_unlimited():
    assert spec().compilation.graph_memory_bytes is None
    compilation = spec(compilation={"graphMemoryBudget": "0.5Gi"}).compilation
    assert compilation.graph_memory_bytes == 2**29
    with pytest.raises(ValueError, match=r"graphMemoryBudget\n.*'2 GB' is not a quantity"):
        spec(compilation={"graphMemoryBudget": "2 GB"})
