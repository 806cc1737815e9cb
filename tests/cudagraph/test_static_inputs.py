"""Copied inputs: the same addresses whatever the caller passes."""

from __future__ import annotations

import pytest
import torch

from kerf_runtime.cudagraph.static_inputs import StaticInputs
from kerf_runtime.errors import CaptureError


def test_every_call_sees_the_values_at_the_same_addresses():
    seen = []

    def runnable(x, y):
        seen.append((x.data_ptr(), y.data_ptr()))
        return x + y

    call = StaticInputs(runnable, max_tokens=8)
    for tokens in (3, 8, 1):
        x, y = torch.randn(tokens, 2), torch.randn(tokens, 2)
        assert torch.equal(call(x, y), x + y)
    assert len(set(seen)) == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.zeros(9, 2),), "input 0 has 9 tokens, and there is room for 8"),
        ((torch.zeros(1, 3),), r"input 0 is torch.float32 \[1, 3\], the first call had"),
        ((torch.zeros(1, 2, dtype=torch.int64),), "input 0 is torch.int64"),
        ((torch.zeros(1, 2), torch.zeros(1)), "2 inputs instead of the 1 of the first call"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_size(inputs, message):
    call = StaticInputs(lambda x: x, max_tokens=8)
    call(torch.zeros(2, 2))
    with pytest.raises(CaptureError, match=message):
        call(*inputs)
