"""The forward pass of Llama and its variants: short, direct, traceable into one graph.

Shapes: T tokens, E hidden size, F intermediate size, H query heads, K key/value heads, D head size,
Z of it that are rotated (all, but in variants).  Every layer has the same structure, so that cutting the graph at the attention calls gives a first
piece, identical middle pieces, and a last piece.  Attention goes through ``kerf::attention``, which
writes the KV cache and fills a preallocated output.  Everything else is built from ``kerf_runtime.layers``:
ATen for Inductor to fuse, or custom operators, as the policy says.  The residual is carried beside the
layer's output, so that every addition is part of the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

import kerf_runtime.ops.attention  # noqa: F401  registers torch.ops.kerf.attention
from kerf_runtime.compilation.decorator import support_torch_compile
from kerf_runtime.layers.activation import SiluAndMul
from kerf_runtime.layers.embedding import Embedding
from kerf_runtime.layers.linear import Linear
from kerf_runtime.layers.norm import RMSNorm
from kerf_runtime.layers.rotary import Rotate
from kerf_runtime.models.llama.config import LlamaModelConfig
from kerf_runtime.models.projection import projection

__all__ = ["Llama", "attention_layer_names", "build", "inverse_frequencies"]


def build(config: LlamaModelConfig) -> Llama:
    """The module without weights; make it under ``torch.device("meta")``."""
    return Llama(config)


def attention_layer_names(config: LlamaModelConfig) -> tuple[str, ...]:
    """Names of the attention layers, the keys of ``ForwardContext.kv_caches``."""
    return tuple(f"layers.{index}.attention" for index in range(config.num_layers))


def inverse_frequencies(config: LlamaModelConfig, factors: Tensor | None = None) -> Tensor:
    """Rotary frequencies per pair of dimensions, float32 [Z/2] (Su et al., 2021).

    Args:
        config: base and scaling.
        factors: float32 [Z/2], divisors from the checkpoint; for scaling kind ``factors`` only.
    """
    size = config.rotary_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        assert factors is not None  # plan() lists the tensor for this kind
        return frequencies / factors
    # llama3: keep wavelengths below original/high, divide those above original/low, blend between.
    wavelength = 2 * torch.pi / frequencies
    turns = scaling.original_max_position / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines, [max_position_embeddings, Z/2], computed in float32.

    Sized by the checkpoint, never by the deployment's maxModelLen, so that compiled code fits any.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaModelConfig) -> None:
        super().__init__()
        shape = (config.max_position_embeddings, config.rotary_dim // 2)
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("sin", torch.empty(shape), persistent=False)

    def fill(self, frequencies: Tensor, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Compute the tables from ``inverse_frequencies``."""
        positions = torch.arange(self.cos.shape[0], dtype=torch.float32)
        angles = torch.outer(positions, frequencies.float())
        self.cos = angles.cos().to(dtype=dtype, device=device)
        self.sin = angles.sin().to(dtype=dtype, device=device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> cosines and sines, each [T, 1, Z/2]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


class Attention(nn.Module):
    """Grouped-query attention with one fused projection for queries, keys and values."""

    def __init__(self, config: LlamaModelConfig, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim
        self.sizes = (config.q_size, config.kv_size, config.kv_size)
        bias = config.attention_bias
        self.qkv_proj = projection(config, config.hidden_size, sum(self.sizes), bias=bias)
        norm = partial(RMSNorm, config.head_dim, config.rms_norm_eps)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None
        self.rotate = Rotate()
        bias = config.attention_output_bias
        self.o_proj = projection(config, config.q_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        q = q.view(-1, self.num_heads, self.head_dim)
        k = k.view(-1, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotated(q, cos, sin), self._rotated(k, cos, sin)
        v = v.view(-1, self.num_kv_heads, self.head_dim)
        output = torch.empty_like(q)
        torch.ops.kerf.attention(q, k, v, output, self.layer_name)
        projected: Tensor = self.o_proj(output.view(-1, self.sizes[0]))
        return projected

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first dimensions of every head rotated: [T, H, D] -> contiguous [T, H, D]."""
        if self.rotary_dim == self.head_dim:
            whole: Tensor = self.rotate(x, cos, sin)
            return whole
        first, rest = x.split((self.rotary_dim, self.head_dim - self.rotary_dim), dim=-1)
        return torch.cat((self.rotate(first.contiguous(), cos, sin), rest), dim=-1)


class MLP(nn.Module):
    """SwiGLU with one fused projection for gate and up (Shazeer, 2020)."""

    def __init__(self, config: LlamaModelConfig) -> None:
        super().__init__()
        width, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = projection(config, config.hidden_size, 2 * width, bias=bias)
        self.activation = SiluAndMul()
        self.down_proj = projection(config, width, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        projected: Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return projected


class Layer(nn.Module):
    """One transformer layer: pre-norm attention and MLP; the next norm adds the MLP's output."""

    def __init__(self, config: LlamaModelConfig, layer_name: str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer_name)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output and residual of the layer before (the first has none) -> those of this one, [T, E]."""
        if residual is None:
            residual, x = x, self.attention_norm(x)
        else:
            x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attention(x, cos, sin), residual)
        return self.mlp(x), residual


@support_torch_compile
class Llama(nn.Module):
    """The whole model; ``forward`` is what is compiled, ``compute_logits`` stays outside."""

    def __init__(self, config: LlamaModelConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(self.make_layers(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def make_layers(self, config: LlamaModelConfig) -> Iterable[nn.Module]:
        """The layers in order, each called as ``Layer`` is."""
        return (Layer(config, name) for name in attention_layer_names(config))

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states after the last norm.

        Args:
            input_ids: int64 [T].
            positions: int64 [T], place of each token in its sequence.

        Returns:
            [T, E] in the model's data type.
        """
        x: Tensor = self.embedding(input_ids)
        residual: Tensor | None = None
        cos, sin = self.rotary(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        x, _ = self.norm(x, residual)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> [R, vocab] in the model's data type."""
        logits: Tensor = self.lm_head(hidden)
        return logits
