"""The state-space mixer on the GPU: what the CPU computes, without a wait, and recorded for decode batches."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.ops.mamba_cases import (
    GROUPS,
    INNER,
    close,
    expected_output,
    make_layer,
    make_metadata,
    make_text,
    run,
)

from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import ForwardContext, set_forward_context

pytestmark = pytest.mark.gpu


def test_any_batch_is_mixed_as_on_the_cpu_and_nothing_waits_for_the_device() -> None:
    texts = [make_text(150, seed=seed).cuda() for seed in range(5)]
    layer = make_layer().to("cuda")
    run(layer, [(texts[0], 0, 7), (texts[1], 0, 9), (texts[2], 0, 70)])
    parts = [(0, 7, 8), (1, 9, 10), (2, 70, 150), (3, 0, 1), (4, 0, 40)]
    steps = [(texts[i], first, last) for i, first, last in parts]
    metadata = make_metadata(steps, padding=3)
    projected = torch.cat([*(t[first:last] for t, first, last in steps), texts[0][:3]])
    output = projected.new_empty(len(projected), INNER)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with set_forward_context(ForwardContext(attention=metadata, states={"a": layer.states})):
            torch.ops.kerf.mamba_mixer(projected, *layer.weights, output, "a", GROUPS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lengths = [last - first for _, first, last in parts]
    for (i, first, last), part in zip(parts, output.cpu().split([*lengths, 3])[:-1], strict=True):
        close(part, expected_output(make_layer(), texts[i].cpu()[:last])[first:])


def test_a_recorded_decode_batch_goes_on_from_the_states_of_each_replay() -> None:
    texts = [make_text(12, seed=seed).cuda() for seed in (1, 2, 3)]
    layer = make_layer().to("cuda")
    metadata = make_metadata([(text, 5, 6) for text in texts], padding=1, uniform=True)
    projected = torch.zeros(4, texts[0].shape[1], device="cuda")
    output = projected.new_empty(4, INNER)
    graph = torch.cuda.CUDAGraph()
    with set_forward_context(ForwardContext(attention=metadata, states={"a": layer.states})):
        torch.ops.kerf.mamba_mixer(projected, *layer.weights, output, "a", GROUPS)
        with torch.cuda.graph(graph):
            torch.ops.kerf.mamba_mixer(projected, *layer.weights, output, "a", GROUPS)
    run(layer, [(text, 0, 5) for text in texts])  # what the first call left is forgotten
    for at in range(5, 12):
        projected[:3] = torch.stack([text[at] for text in texts])
        metadata.seq_lens[:3] = at + 1
        graph.replay()
        for text, row in zip(texts, output[:3].cpu(), strict=True):
            close(row, expected_output(make_layer(), text.cpu()[: at + 1])[-1])


def test_a_batch_with_prompts_is_not_recorded() -> None:
    text, layer = make_text(5).cuda(), make_layer().to("cuda")
    metadata = make_metadata([(text, 0, 5)])
    output = text.new_empty(5, INNER)
    graph = torch.cuda.CUDAGraph()
    with (
        set_forward_context(ForwardContext(attention=metadata, states={"a": layer.states})),
        pytest.raises(CaptureError, match="leave the mixer among the splitting ops"),
        torch.cuda.graph(graph),
    ):
        torch.ops.kerf.mamba_mixer(text, *layer.weights, output, "a", GROUPS)
