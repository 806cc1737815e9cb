"""The operator ``kerf::mamba_mixer``: the state-space mixer of a Mamba-2 layer, where the graph is cut.

``mamba_mixer(projected, conv_weight, conv_bias, dt_bias, a_log, d, output!, layer_name, groups)`` runs the
causal convolution and the recurrence of every sequence of the batch, each from where the step before left
it, and fills ``output``.  Like ``kerf::attention`` it has an output argument, finds what it keeps (the states
of all sequences) by ``layer_name`` in the forward context, and gives zeros where the context describes no
batch (tracing, profiling).

A sequence that has no token before this step starts from zeros, so a slot needs no clearing when it changes
hands.  Rows of padding write to a slot that no sequence has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library, register_fake

from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import AttentionMetadata, get_forward_context
from kerf_runtime.ops.mamba_native import MixerWeights, decode, mix

__all__ = ["MAMBA_MIXER_SCHEMA"]

MAMBA_MIXER_SCHEMA = (
    "mamba_mixer(Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor dt_bias, Tensor a_log, "
    "Tensor d, Tensor(a!) output, str layer_name, int groups) -> ()"
)

# A module-level owner: the registration lives as long as the Library object.
_library = Library("kerf", "FRAGMENT")
_library.define(MAMBA_MIXER_SCHEMA)


def _mamba_mixer(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    a_log: Tensor,
    d: Tensor,
    output: Tensor,
    layer_name: str,
    groups: int,
) -> None:
    """Mix ``projected`` [T, H * P + C + H]: a gate that is left alone, the convolution's inputs, raw step sizes.

    Letters as in ``mamba_native``; ``output`` is [T, H * P].
    """
    context = get_forward_context()
    metadata = context.attention
    if metadata is None or metadata.state_slots is None:
        output.zero_()
        return
    channels, heads = conv_weight.shape[0], dt_bias.shape[0]
    _, inputs, dt = projected.split((output.shape[1], channels, heads), dim=-1)
    weights = MixerWeights(conv_weight, conv_bias, dt_bias, a_log, d, groups)
    states = context.states[layer_name]
    fresh = metadata.seq_lens <= metadata.query_start.diff()
    if metadata.uniform_decode:
        decode(inputs, dt, weights, *states, metadata.state_slots, fresh, output)
        return
    counts = _counts(metadata)
    mix(inputs, dt, weights, *states, metadata.state_slots, fresh, counts, output)


def _counts(metadata: AttentionMetadata) -> tuple[int, ...]:
    """Tokens of each sequence.  On a GPU from the host, which a graph would not ask again."""
    if metadata.query_start.device.type == "cpu":
        return tuple(metadata.query_start.diff().tolist())
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "a batch with prompts is recorded with a state-space mixer in it, whose kernels depend on the "
            "lengths of the sequences",
            where="kerf::mamba_mixer",
            hint="Use cudagraphMode FULL_AND_PIECEWISE, and leave the mixer among the splitting ops",
        )
    return metadata.query_lens


_library.impl("mamba_mixer", _mamba_mixer, "CPU")
_library.impl("mamba_mixer", _mamba_mixer, "CUDA")


@register_fake("kerf::mamba_mixer", lib=_library)
def _mamba_mixer_fake(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    a_log: Tensor,
    d: Tensor,
    output: Tensor,
    layer_name: str,
    groups: int,
) -> None:
    """Nothing to compute: the output argument already has its shape."""
