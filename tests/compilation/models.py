"""Models that compile in seconds, and forwards that must not compile at all.

They live in an importable module because traced code must: its content is a factor of the cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kerf_runtime.ops.attention  # noqa: F401  registers torch.ops.kerf.attention
from kerf_runtime.compilation.decorator import support_torch_compile
from kerf_runtime.config import DType
from kerf_runtime.layers.linear import Fp8Linear
from kerf_runtime.layers.quantization import quantize_rows
from kerf_runtime.models.config import Fp8Scheme
from kerf_runtime.models.llama.config import LlamaModelConfig
from kerf_runtime.models.llama.model import attention_layer_names, build, inverse_frequencies
from kerf_runtime.models.loader import LoadedModel

VOCAB = 64
MAX_POSITIONS = 128


def llama(
    num_layers: int, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> LoadedModel:
    """A Llama of the runtime's own model code, narrow, with random weights."""
    config = LlamaModelConfig(
        **{
            "architecture": "LlamaForCausalLM",
            "num_layers": num_layers,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": DType.FLOAT32,
            "eos_token_ids": (0,),
            "bos_token_id": None,
            **changes,
        }
    )
    model = build(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.4, generator=generator)
    model = model.to(dtype)
    model.rotary.fill(inverse_frequencies(config), dtype=dtype, device="cpu")
    return LoadedModel(model.eval(), config, attention_layer_names(config))


def fp8_llama(num_layers: int, *, static: bool, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A Llama with random weights whose projections are quantised; wide enough for FP8 products."""
    plain = llama(
        num_layers,
        dtype=dtype,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    config = replace(plain.config, quantization=Fp8Scheme(static=static, stored=True))
    model = build(config)
    modules = dict(model.named_modules())
    for name, parameter in plain.model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = modules[owner]
        if isinstance(module, Fp8Linear):
            module.weight.data, module.weight_scale.data = quantize_rows(parameter.data)
            if module.input_scale is not None:
                module.input_scale.data.fill_(0.02)
        else:
            setattr(module, leaf, parameter)
    model.rotary = plain.model.rotary
    return LoadedModel(model.eval(), config, plain.attention_layers)


@dataclass(frozen=True)
class TinyConfig:
    """What ``prepare_model`` reads of a configuration."""

    vocab_size: int = VOCAB
    max_position_embeddings: int = MAX_POSITIONS


class TinyLayer(nn.Module):
    """Attention between two matrices; nothing that needs a C++ kernel."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.query = nn.Parameter(torch.empty(width, width))
        self.output = nn.Parameter(torch.empty(width, width))

    def forward(self, x: Tensor) -> Tensor:
        q = torch.mm(x, self.query).view(-1, 2, x.shape[1] // 2)
        output = torch.empty_like(q)
        torch.ops.kerf.attention(q, q, q, output, self.name)
        return torch.addmm(x, output.view(-1, x.shape[1]), self.output)


@support_torch_compile
class Tiny(nn.Module):
    """The structure of a Llama, cut where a Llama is cut, with almost nothing to compile."""

    def __init__(self, num_layers: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCAB, width))
        self.layers = nn.ModuleList(TinyLayer(width, f"layer.{i}") for i in range(num_layers))

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.embedding) + positions.unsqueeze(1) * 0.01
        for layer in self.layers:
            x = layer(x)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.t()


def tiny(num_layers: int, *, width: int = 8, seed: int = 0) -> LoadedModel:
    """``Tiny`` with random weights."""
    model = Tiny(num_layers, width)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.4, generator=generator)
    names = tuple(layer.name for layer in model.layers)
    return LoadedModel(model.eval(), TinyConfig(), names)  # type: ignore[arg-type]


class Awkward(nn.Module):
    """Base of the forwards below: a table, a buffer and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(VOCAB, 4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.plain = torch.full((4,), 3.0)

    def rows(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.table)


@support_torch_compile
class WithBuffer(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.rows(input_ids) * self.scale + positions.unsqueeze(1)


@support_torch_compile
class CallsStandardLibrary(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.rows(input_ids) * len(os.path.join("a", "b"))  # noqa: PTH118 - frozen code


@support_torch_compile
class WithTiedWeights(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.table

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.rows(input_ids) + F.embedding(positions, self.again)


@support_torch_compile
class PlainTensorAttribute(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.rows(input_ids) * self.plain


@support_torch_compile
class BreaksTheGraph(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.rows(input_ids)
        print("a graph break")  # noqa: T201
        return x


@support_torch_compile
class BranchesOnValues(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.rows(input_ids)
        return x if x.sum() > 0 else -x


@support_torch_compile
class ReadsAValue(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.rows(input_ids)
        return x * x.sum().item()


@support_torch_compile
class MasksRows(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.rows(input_ids)[input_ids > 0]


@support_torch_compile
class FixesTheNumberOfTokens(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.rows(input_ids).view(32, 4)


@support_torch_compile
class BranchesOnTheNumberOfTokens(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.rows(input_ids)
        return x + 1 if input_ids.shape[0] > 16 else x


@support_torch_compile
class HalvesTheNumberOfTokens(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.rows(input_ids).view(-1, 2, 4).sum(1)


@support_torch_compile
class ReturnsTwo(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows(input_ids), self.rows(positions)


@support_torch_compile
class RemembersATensor(Awkward):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.seen = input_ids + 1
        return self.rows(input_ids)


@support_torch_compile
class WritesInPlace(Awkward):
    """In-place and out-variant operators, and a view that is written through."""

    def __init__(self) -> None:
        super().__init__()
        self.table.data.normal_(generator=torch.Generator().manual_seed(0))

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.rows(input_ids)
        y = x * 2
        y[:, :2].add_(positions.unsqueeze(1))
        output = torch.empty_like(y)
        torch.mul(y, x, out=output)
        y.view(-1).sub_(1)
        return x + y + output

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden
