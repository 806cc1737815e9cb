"""The Llama forward pass: short, direct, traceable into one graph.

Shapes: T tokens, E hidden size, F intermediate size, H query heads, K key/value heads, D head size.
Every layer has the same structure, so that cutting the graph at the attention calls gives a first
piece, identical middle pieces, and a last piece.  Attention goes through ``kerf::attention``, which
writes the KV cache and fills a preallocated output; everything else is ATen, for Inductor to fuse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kerf_runtime.ops.attention  # noqa: F401  registers torch.ops.kerf.attention
from kerf_runtime.compilation.decorator import support_torch_compile
from kerf_runtime.models.config import ModelConfig

__all__ = ["Llama", "attention_layer_names", "build", "inverse_frequencies"]


def build(config: ModelConfig) -> Llama:
    """The module without weights; make it under ``torch.device("meta")``."""
    return Llama(config)


def attention_layer_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of the attention layers, the keys of ``ForwardContext.kv_caches``."""
    return tuple(f"layers.{index}.attention" for index in range(config.num_layers))


class Linear(nn.Module):
    """A matrix and perhaps a bias, without ``nn.Linear``'s random initialisation.

    The initialisation would be thrown away, and on the meta device it imports Dynamo (seconds).
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A table of token vectors, [vocab, E], without ``nn.Embedding``'s random initialisation."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, E]."""
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def inverse_frequencies(config: ModelConfig, factors: Tensor | None = None) -> Tensor:
    """Rotary frequencies per pair of dimensions, float32 [D/2] (Su et al., 2021).

    Args:
        config: base and scaling.
        factors: float32 [D/2], divisors from the checkpoint; for scaling kind ``factors`` only.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
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
    """Tables of cosines and sines, [max_position_embeddings, D/2], computed in float32.

    Sized by the checkpoint, never by the deployment's maxModelLen, so that compiled code fits any.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.max_position_embeddings, config.head_dim // 2)
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("sin", torch.empty(shape), persistent=False)

    def fill(self, frequencies: Tensor, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Compute the tables from ``inverse_frequencies``."""
        positions = torch.arange(self.cos.shape[0], dtype=torch.float32)
        angles = torch.outer(positions, frequencies.float())
        self.cos = angles.cos().to(dtype=dtype, device=device)
        self.sin = angles.sin().to(dtype=dtype, device=device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> cosines and sines, each [T, 1, D/2]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, D]; dimension i is paired with i + D/2 (the Hugging Face convention)."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with one fused projection for queries, keys and values."""

    def __init__(self, config: ModelConfig, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.sizes = (config.q_size, config.kv_size, config.kv_size)
        self.qkv_proj = Linear(config.hidden_size, sum(self.sizes), bias=config.attention_bias)
        self.o_proj = Linear(config.q_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        q = rotate(q.view(-1, self.num_heads, self.head_dim), cos, sin)
        k = rotate(k.view(-1, self.num_kv_heads, self.head_dim), cos, sin)
        v = v.view(-1, self.num_kv_heads, self.head_dim)
        output = torch.empty_like(q)
        torch.ops.kerf.attention(q, k, v, output, self.layer_name)
        return self.o_proj(output.view(-1, self.sizes[0]))


class MLP(nn.Module):
    """SwiGLU with one fused projection for gate and up (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, 2 * width, bias=config.mlp_bias)
        self.down_proj = Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """One transformer layer: pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: ModelConfig, layer_name: str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer_name)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


@support_torch_compile
class Llama(nn.Module):
    """The whole model; ``forward`` is what is compiled, ``compute_logits`` stays outside."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(Layer(config, name) for name in attention_layer_names(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states after the last norm.

        Args:
            input_ids: int64 [T].
            positions: int64 [T], place of each token in its sequence.

        Returns:
            [T, E] in the model's data type.
        """
        x = self.embedding(input_ids)
        cos, sin = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> float32 [R, vocab]."""
        return self.lm_head(hidden).float()
