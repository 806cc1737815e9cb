"""The forward pass of Bamba: that of a Llama, with a state-space mixer where a layer has no attention.

Shapes: T tokens, E hidden size, and the letters of ``ops.mamba_native``.  The mixer proper goes through
``kerf::mamba_mixer``, which keeps the states and fills a preallocated output; the projections, the gate and
the norm around it are ATen, in the pieces that are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kerf_runtime.ops.mamba  # noqa: F401  registers torch.ops.kerf.mamba_mixer
from kerf_runtime.layers.norm import RMSNorm
from kerf_runtime.models.bamba.config import BambaModelConfig
from kerf_runtime.models.llama.config import LlamaModelConfig
from kerf_runtime.models.llama.model import MLP, Layer, Llama
from kerf_runtime.models.projection import projection

__all__ = ["Bamba", "attention_layer_names", "build", "mixer_layer_names"]


def build(config: BambaModelConfig) -> Bamba:
    """The module without weights; make it under ``torch.device("meta")``."""
    return Bamba(config)


def attention_layer_names(config: BambaModelConfig) -> tuple[str, ...]:
    """Names of the attention layers, the keys of ``ForwardContext.kv_caches``."""
    return tuple(f"layers.{index}.attention" for index in config.attention_layers)


def mixer_layer_names(config: BambaModelConfig) -> tuple[str, ...]:
    """Names of the state-space layers, the keys of ``ForwardContext.states``."""
    others = (i for i in range(config.num_layers) if i not in config.attention_layers)
    return tuple(f"layers.{index}.mixer" for index in others)


class GatedNorm(nn.Module):
    """The norm behind a mixer: of what the gate lets through, for each group of heads on its own.

    Computed in float32 and rounded before the weight, as everywhere.
    """

    def __init__(self, config: BambaModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.mixer_size))
        self.groups, self.eps = config.mixer_groups, config.rms_norm_eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Two of [T, H * P] -> [T, H * P]."""
        open_ = x.float() * F.silu(gate.float())
        grouped = open_.unflatten(-1, (self.groups, -1))
        normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.flatten(-2).to(x.dtype) * self.weight


class Mixer(nn.Module):
    """A Mamba-2 mixer with one fused projection for gate, inputs and step sizes."""

    def __init__(self, config: BambaModelConfig, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.size, self.groups = config.mixer_size, config.mixer_groups
        channels, heads, bias = config.conv_channels, config.mixer_heads, config.mixer_bias
        width = self.size + channels + heads
        self.in_proj = projection(config, config.hidden_size, width, bias=bias)
        self.conv_weight = nn.Parameter(torch.empty(channels, 1, config.conv_width))
        self.conv_bias = nn.Parameter(torch.empty(channels)) if config.conv_bias else None
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.a_log = nn.Parameter(torch.empty(heads))
        self.d = nn.Parameter(torch.empty(heads))
        self.norm = GatedNorm(config)
        self.out_proj = projection(config, self.size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        projected = self.in_proj(x)
        output = projected.new_empty(projected.shape[0], self.size)
        torch.ops.kerf.mamba_mixer(
            projected,
            self.conv_weight,
            self.conv_bias,
            self.dt_bias,
            self.a_log,
            self.d,
            output,
            self.layer_name,
            self.groups,
        )
        mixed: Tensor = self.out_proj(self.norm(output, projected[:, : self.size]))
        return mixed


class MixerLayer(nn.Module):
    """One layer with a mixer; the residual is carried as in ``llama.model.Layer``."""

    def __init__(self, config: BambaModelConfig, layer_name: str) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = Mixer(config, layer_name)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output and residual of the layer before (the first has none) -> those of this one, [T, E].

        ``cos`` and ``sin`` are for layers with attention: the order of tokens is in the recurrence.
        """
        if residual is None:
            residual, x = x, self.mixer_norm(x)
        else:
            x, residual = self.mixer_norm(x, residual)
        x, residual = self.mlp_norm(self.mixer(x), residual)
        return self.mlp(x), residual


class Bamba(Llama):
    """The whole model; what is compiled is the forward of a Llama over layers of two kinds."""

    def make_layers(self, config: LlamaModelConfig) -> Iterator[nn.Module]:
        """A layer with attention where the configuration says so, else one with a mixer."""
        assert isinstance(config, BambaModelConfig)
        for index in range(config.num_layers):
            if index in config.attention_layers:
                yield Layer(config, f"layers.{index}.attention")
            else:
                yield MixerLayer(config, f"layers.{index}.mixer")
