"""The state-space mixer of Mamba-2 in plain PyTorch: causal convolution, then the selective recurrence.

Per head, with a state h of P rows and N columns (Dao and Gu, 2024, "Transformers are SSMs"):

    h_t = exp(d_t a) h_{t-1} + d_t x_t B_t^T        y_t = h_t C_t + D x_t        d_t = softplus(raw_t + bias)

Decoding sequences take one step of it together.  A longer part of a sequence is computed in chunks: within a
chunk the recurrence is written out as a product with a lower triangular matrix of decays, and only the state
travels from one chunk to the next.  Everything but the products with weights is float32.

Shapes: L tokens of one sequence, B sequences, W width of the convolution, C its channels, H heads, P head
size, G groups of heads that share B_t and C_t, R heads of a group, N state size; H = G * R, C = H * P + 2 * G * N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MixerWeights", "decode", "mix"]

_CHUNK = 64
"""Tokens that are written out as one product; a longer chunk costs more arithmetic, a shorter one more launches."""


@dataclass(frozen=True)
class MixerWeights:
    """What a layer has learned.

    Attributes:
        conv: [C, 1, W], one filter per channel; the last value belongs to the token itself.
        conv_bias: [C] or None.
        dt_bias: [H].
        a_log: [H], logarithms of -a.
        d: [H].
        groups: G.
    """

    conv: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    a_log: Tensor
    d: Tensor
    groups: int


def mix(
    inputs: Tensor,
    dt: Tensor,
    weights: MixerWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    fresh: Tensor,
    counts: Sequence[int],
    output: Tensor,
) -> None:
    """The mixer for any batch; no value of a tensor is waited for.

    Args:
        inputs: [T, C], what the convolution reads.
        dt: [T, H], raw step sizes.
        weights: of the layer.
        conv_states: [slots, W-1, C], updated: the last inputs of each sequence.
        ssm_states: float32 [slots, H, P, N], updated.
        slots: int64 [B], where the state of each sequence is.
        fresh: bool [B], whether a sequence begins here: it starts from zeros, whatever its slot holds.
        counts: tokens of each sequence, one after the other from the first row on.
        output: [T, H * P], overwritten; zeros in the rows behind the last sequence.
    """
    alone = next((row for row, count in enumerate(counts) if count != 1), len(counts))
    if alone:
        first = slice(alone)
        decode(
            *(inputs[first], dt[first], weights, conv_states, ssm_states),
            *(slots[first], fresh[first], output[first]),
        )
    at = alone
    for row, count in enumerate(counts[alone:], alone):
        if count:
            here, one = slice(at, at + count), slice(row, row + 1)
            _extend(
                *(inputs[here], dt[here], weights, conv_states, ssm_states),
                *(slots[one], fresh[one], output[here]),
            )
            at += count
    output[at:].zero_()


def decode(
    inputs: Tensor,
    dt: Tensor,
    weights: MixerWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    fresh: Tensor,
    output: Tensor,
) -> None:
    """One token of each sequence; the arguments are those of ``mix`` with T = B.

    Every shape follows from B, so this can be recorded.
    """
    before = _load(conv_states, slots, fresh)
    window = torch.cat((before, inputs.unsqueeze(1)), dim=1)  # [B, W, C]
    mixed = (window.float() * weights.conv.squeeze(1).t().float()).sum(1)
    x, b, c = _parts(mixed, weights, ssm_states)
    step, decay = _steps(dt, weights)
    state = _load(ssm_states, slots, fresh) * decay.exp()[..., None, None]
    state = state.unflatten(1, (weights.groups, -1))  # [B, G, R, P, N]
    added = (x * step.unsqueeze(-1)).unflatten(1, (weights.groups, -1))
    state = state + added.unsqueeze(-1) * b[:, :, None, None]
    y = (state * c[:, :, None, None]).sum(-1).flatten(1, 2) + x * weights.d.float().unsqueeze(-1)
    output.copy_(y.flatten(1))
    conv_states.index_copy_(0, slots, window[:, 1:])
    ssm_states.index_copy_(0, slots, state.flatten(1, 2))


def _extend(
    inputs: Tensor,
    dt: Tensor,
    weights: MixerWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    fresh: Tensor,
    output: Tensor,
) -> None:
    """L tokens of one sequence; the arguments are those of ``mix`` with T = L and B = 1."""
    before = _load(conv_states, slots, fresh)[0]
    window = torch.cat((before, inputs))  # [W-1+L, C]
    length, kept = len(inputs), len(before)
    filters = weights.conv.squeeze(1).float()
    mixed = sum(window[k : k + length].float() * filters[:, k] for k in range(kept + 1))
    assert isinstance(mixed, Tensor)
    x, b, c = _parts(mixed, weights, ssm_states)
    step, decay = _steps(dt, weights)
    state = _load(ssm_states, slots, fresh)[0]
    state = state.unflatten(0, (weights.groups, -1))  # [G, R, P, N]
    x = x.unflatten(1, (weights.groups, -1))  # [L, G, R, P]
    added = x * step.unflatten(1, (weights.groups, -1)).unsqueeze(-1)
    decay = decay.unflatten(1, (weights.groups, -1))  # [L, G, R]
    parts = []
    for at in range(0, length, _CHUNK):
        chunk = slice(at, at + _CHUNK)
        y, state = _chunk(added[chunk], decay[chunk], b[chunk], c[chunk], state)
        parts.append(y)
    d = weights.d.float().view(weights.groups, -1, 1)
    output.copy_((torch.cat(parts) + x * d).flatten(1))
    conv_states.index_copy_(0, slots, window[length:].unsqueeze(0))
    ssm_states.index_copy_(0, slots, state.flatten(0, 1).unsqueeze(0))


def _chunk(
    added: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of a chunk without D, and the state behind it.

    Args:
        added: [L, G, R, P], d_t x_t.
        decay: [L, G, R], d_t a, the logarithm of what is left of the state after each token.
        b: [L, G, N].
        c: [L, G, N].
        state: [G, R, P, N] before the chunk.
    """
    total = decay.cumsum(0)
    between = (total.unsqueeze(1) - total.unsqueeze(0)).permute(2, 3, 0, 1)  # [G, R, L, L]
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=decay.device).triu(1)
    weight = between.masked_fill(later, -torch.inf).exp()
    weight = weight * torch.einsum("ign,jgn->gij", c, b).unsqueeze(1)
    y = torch.einsum("grij,jgrp->igrp", weight, added)
    y = y + torch.einsum("ign,grpn->igrp", c, state) * total.exp().unsqueeze(-1)
    left = (total[-1] - total).exp().unsqueeze(-1)
    state = state * total[-1].exp()[..., None, None]
    return y, state + torch.einsum("jgrp,jgn->grpn", added * left, b)


def _load(states: Tensor, slots: Tensor, fresh: Tensor) -> Tensor:
    """The states at ``slots``; zeros where a sequence begins, also if the slot holds no numbers."""
    found = states.index_select(0, slots)
    return found.masked_fill(fresh.view(-1, *(1,) * (found.dim() - 1)), 0)


def _parts(
    mixed: Tensor, weights: MixerWeights, ssm_states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x [*, H, P], B and C [*, G, N] from the sums of the convolution, float32 [*, C]."""
    _, heads, size, columns = ssm_states.shape
    if weights.conv_bias is not None:
        mixed = mixed + weights.conv_bias.float()
    width = weights.groups * columns
    x, b, c = F.silu(mixed).split((heads * size, width, width), dim=-1)
    return (
        x.unflatten(-1, (heads, size)),
        b.unflatten(-1, (weights.groups, columns)),
        c.unflatten(-1, (weights.groups, columns)),
    )


def _steps(dt: Tensor, weights: MixerWeights) -> tuple[Tensor, Tensor]:
    """Step sizes d_t and d_t a, float32 [*, H] each."""
    step = F.softplus(dt.float() + weights.dt_bias.float())
    return step, step * -weights.a_log.float().exp()
