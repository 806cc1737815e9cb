"""The architectures that are a Llama with options: what differs, one row each.  Pure, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kerf_runtime.models.facts import Facts

__all__ = ["VARIANTS", "Variant"]


def _no_window(facts: Facts) -> None:
    """Every layer attends to all tokens before."""


def _window(facts: Facts) -> int | None:
    """Mistral: ``sliding_window``; null is none, and a file without the key means 4096."""
    if facts.data.get("sliding_window", 0) is None:
        return None
    return facts.integer("sliding_window", 4096)


def _window_of_some_layers(facts: Facts) -> int | None:
    """Qwen: layers from ``max_window_layers`` on, or those that ``layer_types`` names."""
    if not facts.flag("use_sliding_window", default=False):
        return None
    if facts.data.get("sliding_window", 0) is None:
        return None
    layers = facts.integer("num_hidden_layers")
    kinds = facts.data.get("layer_types")
    if kinds is None:
        slides = facts.integer("max_window_layers", 28, least=0) < layers
    else:
        slides = any(kind != "full_attention" for kind in kinds)
    return facts.integer("sliding_window", 4096) if slides else None


@dataclass(frozen=True)
class Variant:
    """One architecture.

    Attributes:
        architecture: the Hugging Face class name.
        gguf_name: its ``general.architecture``, or None where GGUF files call it by another's.
        biases: of the query, key and value projections, of attention's output, of the MLP; None where
            ``attention_bias`` (for both of attention) and ``mlp_bias`` say so.
        qk_norm: queries and keys are normalised per head before they are rotated.
        head_dim: where the file does not give it; None is hidden size by heads.
        max_positions: where the file does not give them.
        window: the sliding window that a ``config.json`` means.
        gguf_pairs: GGUF files interleave the two halves of each query and key head.
    """

    architecture: str
    gguf_name: str | None
    biases: tuple[bool, bool, bool] | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    max_positions: int = 2048
    window: Callable[[Facts], int | None] = _no_window
    gguf_pairs: bool = False


VARIANTS = (
    Variant("LlamaForCausalLM", "llama", gguf_pairs=True),
    Variant(
        "MistralForCausalLM",
        None,  # stored as llama
        biases=(False, False, False),
        max_positions=131072,
        window=_window,
    ),
    Variant(
        "Qwen2ForCausalLM",
        "qwen2",
        biases=(True, False, False),
        max_positions=32768,
        window=_window_of_some_layers,
    ),
    Variant(
        "Qwen3ForCausalLM",
        "qwen3",
        qk_norm=True,
        head_dim=128,
        max_positions=32768,
        window=_window_of_some_layers,
    ),
)
