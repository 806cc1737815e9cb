"""Which sizes are compiled with static shapes."""

from __future__ import annotations

import re

import pytest
from tests.config.builders import MODEL, document, platform, spec

from kerf_runtime.config import DType, parse_document, resolve
from kerf_runtime.errors import ConfigError


def sizes(**parts):
    found = resolve(spec(**parts), platform=platform(), model_max_len=8, model_dtype=DType.FLOAT32)
    return found.compile_sizes


@pytest.mark.parametrize(
    ("compilation", "expected"),
    [
        ({}, ()),
        ({"compileSizes": []}, ()),
        ({"compileSizes": [8, 1, 8]}, (1, 8)),
        ({"compileSizes": ["cudagraph_capture_sizes"]}, (1, 2, 4, 8, 16)),
        ({"compileSizes": ["cudagraph_capture_sizes", 3, 8]}, (1, 2, 3, 4, 8, 16)),
        ({"compileSizes": ["cudagraph_capture_sizes"], "captureSizes": [7, 5]}, (5, 7)),
        # Static sizes do not depend on what is recorded: the mode is not in the cache key.
        ({"compileSizes": ["cudagraph_capture_sizes"], "cudagraphMode": "NONE"}, (1, 2, 4, 8, 16)),
        ({"compileSizes": [1], "level": 2, "cudagraphMode": "NONE"}, ()),
        ({"compileSizes": [1], "backend": "eager"}, ()),
    ],
)
def test_sizes_are_sorted_once_each_and_capture_sizes_are_written_out(compilation, expected):
    assert sizes(compilation=compilation) == expected


def test_default_capture_sizes_follow_the_limits_of_the_engine():
    engine = {"maxNumSeqs": 4, "maxNumBatchedTokens": 8}
    assert sizes(engine=engine, compilation={"compileSizes": ["cudagraph_capture_sizes"]}) == (
        1,
        2,
        4,
    )


@pytest.mark.parametrize("bad", [0, -1, 65537, True, 2.5, "8", "capture_sizes", None, [1]])
def test_anything_else_is_an_error_that_names_its_place_and_value(bad):
    data = document({"model": MODEL, "compilation": {"compileSizes": [4, bad]}})
    with pytest.raises(ConfigError) as raised:
        parse_document(data, where="file")
    text = str(raised.value)
    assert re.search(
        r"compilation\.compileSizes\.1: .*1 to 65536, or cudagraph_capture_sizes", text
    )
    assert isinstance(bad, list) or f"got {bad!r}" in text
