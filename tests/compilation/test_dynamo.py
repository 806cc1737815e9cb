"""The private surface of Dynamo does what the compiler relies on (torch 2.11)."""

from __future__ import annotations

import pytest
import torch
from tests.compilation import models

from kerf_runtime.compilation import dynamo


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self']", ""),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self']._modules['layers']._modules['0']._buffers", "layers.0"),
        ("L['self']._buffers", ""),
        ("L['self'].cache", "cache"),
        ("L['previous'].tensors", "previous.tensors"),
        ("L['selfish'].count", "selfish.count"),
        ("G['CALLS']", "G['CALLS']"),
    ],
)
def test_sources_are_shown_as_paths_from_the_model(source, path):
    assert dynamo._path(source) == path


def test_bytecode_is_collected_inside_the_block_only_with_the_names_of_compiled_functions():
    def double(x):
        return x * 2

    def triple(x):
        return x * 3

    with dynamo.captured_bytecode() as pairs:
        compiled(double)(torch.ones(2))
    compiled(triple)(torch.ones(2))
    ((original, transformed),) = pairs
    assert original is double.__code__
    (name,) = dynamo.compiled_names(transformed)
    assert name in transformed.co_names
    assert dynamo.compiled_names(original) == ()


def test_bytecode_is_made_without_the_profiler_calls_that_cost_time_on_every_call():
    def double(x):
        return x * 2

    with dynamo.captured_bytecode() as pairs:
        compiled(double)(torch.ones(2))
    assert not any("pregraph" in name for name in pairs[0][1].co_names)


def test_the_guard_hook_is_called_once_for_every_call_of_compiled_code():
    calls = []
    function = compiled(lambda x: x + 1)
    function(torch.ones(2))
    dynamo.set_guard_hook(lambda: calls.append(1))
    for _ in range(3):
        function(torch.ones(2))
    torch._C._dynamo.eval_frame.set_guard_complete_hook(None)
    assert len(calls) == 3
    function(torch.ones(2))
    assert len(calls) == 3


def test_side_effects_are_told_with_their_owner_and_whether_a_tensor_is_assigned():
    model, found = models.Awkward(), []

    def forward(x):
        model.number = 3
        model.tensor = x + 1
        return x * 2

    def backend(module, inputs):
        found.extend(dynamo.pending_side_effects())
        return module.forward

    torch._dynamo.reset()
    torch.compile(forward, backend=backend)(torch.ones(2))
    (effect,) = found
    assert effect.owner == "model"
    assert set(effect.names) == {("number", False), ("tensor", True)}
    assert "model.number = 3" in effect.stack
    assert "/torch/" not in effect.stack
