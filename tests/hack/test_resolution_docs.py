"""The tables of the configuration page: every combination is in exactly one row, and the row is right."""

from __future__ import annotations

import itertools

import pytest

from hack import resolution_docs
from kerf_runtime.config import CompilationLevel, CompilerBackendName, CUDAGraphMode

LEVELS = [str(int(level)) for level in CompilationLevel]
SPLITTING, PLATFORMS = list(resolution_docs._SPLITTING), list(resolution_docs._PLATFORMS)
BACKENDS = [f"`{name}`" for name in CompilerBackendName]


def expanded(rows, *dimensions):
    """(one value per dimension, cells of its row) for everything that merged rows stand for."""
    for row in rows:
        keys, cells = row[: len(dimensions)], row[len(dimensions) :]
        options = [
            every if part == "any" else part.split("; ")
            for part, every in zip(keys, dimensions, strict=True)
        ]
        for key in itertools.product(*options):
            yield key, cells


def test_every_request_of_a_mode_is_in_one_row_which_shows_what_resolution_says():
    found = list(expanded(resolution_docs._mode_rows(), LEVELS, SPLITTING, PLATFORMS))
    keys = [key for key, _ in found]
    assert sorted(keys) == sorted(itertools.product(LEVELS, SPLITTING, PLATFORMS))
    for (level, splitting, platform), cells in found:
        for mode, cell in zip(CUDAGraphMode, cells, strict=True):
            effective = resolution_docs._resolved(
                int(level), mode, splitting, "inductor", False, platform
            )
            shown = mode if cell == "=" else cell.split("`")[1]
            assert shown == effective.mode
            for change in effective.changes:
                assert change.field != "cudagraphMode" or change.reason in cell


def test_every_combination_of_level_back_end_and_eager_is_in_one_row():
    rows = resolution_docs._work_rows()
    keys = [key for key, _ in expanded(rows, LEVELS, BACKENDS, ["false", "true"], SPLITTING)]
    assert sorted(keys) == sorted(itertools.product(LEVELS, BACKENDS, ["false", "true"], SPLITTING))


def test_a_dimension_that_is_left_out_and_matters_is_an_error():
    with pytest.raises(ValueError, match="the mode depends on a dimension"):
        resolution_docs._one(["FULL", "NONE"], "the mode")
