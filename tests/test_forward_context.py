"""The context of a forward: set for a block, nested, restored whatever happens."""

from __future__ import annotations

import pytest

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.forward_context import ForwardContext, get_forward_context, set_forward_context


def test_reading_the_context_outside_a_forward_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match="set_forward_context"):
        get_forward_context()


def test_contexts_nest_and_the_outer_one_comes_back():
    outer, inner = ForwardContext(), ForwardContext(mode=CUDAGraphMode.FULL)
    with set_forward_context(outer):
        with set_forward_context(inner):
            assert get_forward_context() is inner
        assert get_forward_context() is outer


def test_the_outer_context_comes_back_after_an_error():
    outer = ForwardContext()
    with set_forward_context(outer):
        with pytest.raises(ZeroDivisionError), set_forward_context(ForwardContext()):
            raise ZeroDivisionError
        assert get_forward_context() is outer
    with pytest.raises(RuntimeError):
        get_forward_context()


def test_a_context_has_no_attention_and_no_graph_unless_given():
    context = ForwardContext()
    assert context.mode is CUDAGraphMode.NONE
    assert context.descriptor is None
    assert context.attention is None
    assert dict(context.kv_caches) == {}
