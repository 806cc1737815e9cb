"""The facts of a decoder with learned positions.  Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kerf_runtime.models.config import ModelConfig
from kerf_runtime.models.facts import Facts

__all__ = ["ActivationKind", "GptModelConfig", "activation_of", "head_size"]

ActivationKind = Literal["relu", "gelu", "gelu_tanh"]

_ACTIVATIONS: dict[str, ActivationKind] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class GptModelConfig(ModelConfig):
    """OPT or GPT-2.

    Attributes:
        activation: of the MLP.
        position_offset: rows of the table of positions before that of position 0.
        norm_first: norms stand before attention and MLP and one more behind the last layer; else each stands
            behind the addition of the residual.
        embedding_size: width of the embedding and of the head; projected where it is not the hidden size.
    """

    layer_norm_eps: float
    activation: ActivationKind
    position_offset: int = 0
    norm_first: bool = True
    embedding_size: int


def activation_of(facts: Facts, default: str) -> ActivationKind:
    """What ``activation_function`` stands for.

    Raises:
        ModelError: not supported.
    """
    name = facts.data.get("activation_function") or default
    if name not in _ACTIVATIONS:
        raise facts.error(
            "activation_function",
            f"activation {name!r} is not supported",
            f"Supported: {', '.join(_ACTIVATIONS)}",
        )
    return _ACTIVATIONS[name]


def head_size(facts: Facts, key: str, hidden: int, heads: int) -> int:
    """Size of each of ``heads`` heads.

    Raises:
        ModelError: ``hidden`` cannot be shared by them.
    """
    if hidden % heads:
        raise facts.error(key, f"{heads} heads cannot share a hidden size of {hidden} evenly")
    return hidden // heads
