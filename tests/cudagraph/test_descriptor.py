"""Names of graphs, and which of them compute logits."""

from __future__ import annotations

import pytest

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import (
    BatchDescriptor,
    computes_logits,
    graph_name,
    graph_names,
)


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("size", [1, 8, 9])
def test_only_full_graphs_of_decode_batches_up_to_the_rows_compute_logits(mode, uniform, size):
    expected = mode is CUDAGraphMode.FULL and uniform and size <= 8
    assert computes_logits((mode, BatchDescriptor(size, uniform)), 8) is expected


def test_names_say_mode_kind_and_size():
    keys = [
        (CUDAGraphMode.PIECEWISE, BatchDescriptor(2)),
        (CUDAGraphMode.PIECEWISE, BatchDescriptor(1)),
        (CUDAGraphMode.FULL, BatchDescriptor(4, True)),
    ]
    assert graph_name(keys[2]) == "FULL decode 4"
    assert graph_names(keys) == "FULL decode 4, PIECEWISE mixed 1 2"
