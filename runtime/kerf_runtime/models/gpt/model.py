"""The forward pass of OPT and GPT-2: learned positions, LayerNorm, a plain MLP, biases everywhere.

Shapes: T tokens, E hidden size, F intermediate size, H heads, D head size, W embedding size.
Every layer has the same structure, so that cutting the graph at the attention calls gives a first
piece, identical middle pieces, and a last piece.  Where norms come first, the residual is carried beside the
layer's output, and every addition is next to the norm that follows it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import kerf_runtime.ops.attention  # noqa: F401  registers torch.ops.kerf.attention
from kerf_runtime.compilation.decorator import support_torch_compile
from kerf_runtime.layers.activation import Activation
from kerf_runtime.layers.embedding import Embedding, LearnedPositions
from kerf_runtime.layers.linear import Linear
from kerf_runtime.layers.norm import LayerNorm
from kerf_runtime.models.gpt.config import GptModelConfig
from kerf_runtime.models.projection import projection

__all__ = ["Gpt", "attention_layer_names", "build"]


def build(config: GptModelConfig) -> Gpt:
    """The module without weights; make it under ``torch.device("meta")``."""
    return Gpt(config)


def attention_layer_names(config: GptModelConfig) -> tuple[str, ...]:
    """Names of the attention layers, the keys of ``ForwardContext.kv_caches``."""
    return tuple(f"layers.{index}.attention" for index in range(config.num_layers))


class Attention(nn.Module):
    """Multi-head attention with one fused projection for queries, keys and values."""

    def __init__(self, config: GptModelConfig, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.shape = (-1, config.num_heads, config.head_dim)
        self.width = config.q_size
        self.qkv_proj = projection(config, config.hidden_size, 3 * self.width, bias=True)
        self.o_proj = projection(config, self.width, config.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        q, k, v = (part.view(self.shape) for part in self.qkv_proj(x).split(self.width, dim=-1))
        output = torch.empty_like(q)
        torch.ops.kerf.attention(q, k, v, output, self.layer_name)
        projected: Tensor = self.o_proj(output.view(-1, self.width))
        return projected


class MLP(nn.Module):
    """Two matrices with an activation between them."""

    def __init__(self, config: GptModelConfig) -> None:
        super().__init__()
        self.up_proj = projection(config, config.hidden_size, config.intermediate_size, bias=True)
        self.activation = Activation(config.activation)
        self.down_proj = projection(config, config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        projected: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return projected


class Layer(nn.Module):
    """One transformer layer, with its norms before or behind attention and MLP."""

    def __init__(self, config: GptModelConfig, layer_name: str) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = Attention(config, layer_name)
        self.mlp_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Output and residual of the layer before -> those of this one, [T, E].

        The first layer has no residual; with norms behind, none has.
        """
        if not self.norm_first:
            x, _ = self.attention_norm(self.attention(x), x)
            x, _ = self.mlp_norm(self.mlp(x), x)
            return x, None
        if residual is None:
            residual, x = x, self.attention_norm(x)
        else:
            x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attention(x), residual)
        return self.mlp(x), residual


@support_torch_compile
class Gpt(nn.Module):
    """The whole model; ``forward`` is what is compiled, ``compute_logits`` stays outside."""

    def __init__(self, config: GptModelConfig) -> None:
        super().__init__()
        width, hidden = config.embedding_size, config.hidden_size
        projected = width != hidden
        self.embedding = Embedding(config.vocab_size, width)
        self.project_in = Linear(width, hidden) if projected else None
        self.positions = LearnedPositions(
            config.max_position_embeddings, hidden, offset=config.position_offset
        )
        self.layers = nn.ModuleList(Layer(config, name) for name in attention_layer_names(config))
        self.norm = LayerNorm(hidden, config.layer_norm_eps) if config.norm_first else None
        self.project_out = Linear(hidden, width) if projected else None
        self.lm_head = Linear(width, config.vocab_size)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """What the head reads.

        Args:
            input_ids: int64 [T].
            positions: int64 [T], place of each token in its sequence.

        Returns:
            [T, W] in the model's data type.
        """
        x: Tensor = self.embedding(input_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = self.positions(x, positions)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        if self.norm is not None and residual is not None:
            x, _ = self.norm(x, residual)
        if self.project_out is not None:
            x = self.project_out(x)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, W] -> [R, vocab] in the model's data type."""
        logits: Tensor = self.lm_head(hidden)
        return logits
