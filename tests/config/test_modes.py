"""A CUDA-graph mode is a pair: what decode batches do, what every other batch does."""

from __future__ import annotations

import pytest

from kerf_runtime.config import CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE

PAIRS = {
    NONE: (NONE, NONE),
    PIECEWISE: (PIECEWISE, PIECEWISE),
    FULL: (FULL, FULL),
    DECODE_ONLY: (FULL, NONE),
    BOTH: (FULL, PIECEWISE),
}


@pytest.mark.parametrize(("mode", "pair"), PAIRS.items())
def test_a_mode_is_a_pair_of_decode_and_mixed_mode(mode, pair):
    assert (mode.decode_mode(), mode.mixed_mode()) == pair


@pytest.mark.parametrize(("mode", "pair"), PAIRS.items())
def test_the_helpers_follow_from_the_pair(mode, pair):
    assert mode.separate_routine() == (pair[0] is not pair[1])
    assert mode.requires_piecewise_compilation() == (PIECEWISE in pair)
    for part in (NONE, PIECEWISE, FULL):
        assert mode.has_mode(part) == (part in pair)


def test_every_mode_is_in_the_table():
    assert set(PAIRS) == set(CUDAGraphMode)
