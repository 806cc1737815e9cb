"""Layers with a state-space mixer, their texts, the definition of what they compute, and one step of a batch."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

import kerf_runtime.ops.mamba  # noqa: F401  registers the operator
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext, set_forward_context

HEADS, SIZE, GROUPS, COLUMNS, WIDTH = 6, 4, 2, 5, 4
INNER = HEADS * SIZE
CHANNELS = INNER + 2 * GROUPS * COLUMNS
SLOTS = 6


@dataclass(frozen=True)
class Layer:
    """Random parameters, and the states of ``SLOTS`` slots, filled with numbers that nobody may use."""

    conv: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    a_log: Tensor
    d: Tensor
    conv_states: Tensor
    ssm_states: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        return self.conv, self.conv_bias, self.dt_bias, self.a_log, self.d

    def to(self, device: str) -> Layer:
        """The same on a device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Layer(**{n: None if v is None else v.to(device) for n, v in values.items()})

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        return self.conv_states, self.ssm_states


def make_layer(*, bias: bool = True) -> Layer:
    torch.manual_seed(0)
    return Layer(
        conv=torch.randn(CHANNELS, 1, WIDTH),
        conv_bias=torch.randn(CHANNELS) if bias else None,
        dt_bias=torch.randn(HEADS),
        a_log=torch.randn(HEADS),
        d=torch.randn(HEADS),
        conv_states=torch.full((SLOTS, WIDTH - 1, CHANNELS), torch.nan),
        ssm_states=torch.full((SLOTS, HEADS, SIZE, COLUMNS), torch.nan),
    )


def make_text(tokens: int, seed: int = 1) -> Tensor:
    """What a layer projects of a text: gate, inputs, raw step sizes."""
    return torch.randn(tokens, INNER + CHANNELS + HEADS, generator=torch.manual_seed(seed))


def expected_output(layer: Layer, text: Tensor) -> Tensor:
    """The definition, one token after the other: a filter per channel, then a state per head."""
    conv, dt_bias, a_log, d = (
        t.double() for t in (layer.conv, layer.dt_bias, layer.a_log, layer.d)
    )
    bias = 0.0 if layer.conv_bias is None else layer.conv_bias.double()
    text = text.double()
    state = torch.zeros(HEADS, SIZE, COLUMNS, dtype=torch.float64)
    rows = []
    for t in range(len(text)):
        seen = torch.zeros(WIDTH, CHANNELS, dtype=torch.float64)
        for back in range(min(WIDTH, t + 1)):
            seen[WIDTH - 1 - back] = text[t - back, INNER : INNER + CHANNELS]
        mixed = torch.stack([conv[channel, 0] @ seen[:, channel] for channel in range(CHANNELS)])
        mixed = F.silu(mixed + bias)
        b = mixed[INNER : INNER + GROUPS * COLUMNS].view(GROUPS, COLUMNS)
        c = mixed[INNER + GROUPS * COLUMNS :].view(GROUPS, COLUMNS)
        step = F.softplus(text[t, INNER + CHANNELS :] + dt_bias)
        y = torch.empty(HEADS, SIZE, dtype=torch.float64)
        for head in range(HEADS):
            group, x = head // (HEADS // GROUPS), mixed[head * SIZE : (head + 1) * SIZE]
            kept = torch.exp(-step[head] * torch.exp(a_log[head]))
            state[head] = kept * state[head] + step[head] * torch.outer(x, b[group])
            y[head] = state[head] @ c[group] + d[head] * x
        rows.append(y.flatten())
    return torch.stack(rows)


def make_metadata(
    parts: list[tuple[Tensor, int, int]], *, padding: int = 0, uniform: bool = False
) -> AttentionMetadata:
    """A batch, on the device of the texts.

    Args:
        parts: of each sequence: its text, and the tokens (from, to) of this step; its slot is its place from 1 on.
        padding: rows behind the last sequence.
        uniform: every row is a sequence, those of padding too.
    """
    counts = [last - first for _, first, last in parts]
    lengths = [last for _, _, last in parts]
    empty = padding if uniform else 1
    with parts[0][0].device:
        return AttentionMetadata(
            query_start=torch.tensor([0, *counts, *[int(uniform)] * empty]).cumsum(0).int(),
            seq_lens=torch.tensor([*lengths, *[0] * empty], dtype=torch.int32),
            block_table=torch.empty(0),
            slot_mapping=torch.empty(0),
            uniform_decode=uniform,
            query_lens=tuple(counts),
            state_slots=torch.tensor([*range(1, len(parts) + 1), *[0] * empty]),
        )


def mixed(layer: Layer, projected: Tensor, metadata: AttentionMetadata | None) -> Tensor:
    """What the operator makes of a batch; the layer's states are updated."""
    output = projected.new_full((len(projected), INNER), torch.nan)
    with set_forward_context(ForwardContext(attention=metadata, states={"a": layer.states})):
        torch.ops.kerf.mamba_mixer(projected, *layer.weights, output, "a", GROUPS)
    return output


def run(
    layer: Layer,
    parts: list[tuple[Tensor, int, int]],
    *,
    padding: int = 0,
    uniform: bool = False,
) -> list[Tensor]:
    """One step of ``make_metadata``'s batch: the output of each sequence, then that of padding."""
    chunks = [text[first:last] for text, first, last in parts]
    projected = torch.cat([*chunks, make_text(padding, seed=99).to(chunks[0].device)])
    output = mixed(layer, projected, make_metadata(parts, padding=padding, uniform=uniform))
    return list(output.split([*map(len, chunks), padding]))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)
