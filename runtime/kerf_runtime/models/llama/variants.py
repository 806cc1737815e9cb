"""The architectures that are a Llama with options: what differs, one row each.  Pure, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kerf_runtime.models.facts import Facts

__all__ = ["VARIANTS", "Variant", "Window"]

_FULL, _SLIDING = "full_attention", "sliding_attention"


Window = tuple[int | None, tuple[int, ...]]
"""Tokens that a token attends to (None: all before it), and the layers that it does not hold for."""


def _no_window(facts: Facts) -> Window:
    """Every layer attends to all tokens before."""
    return None, ()


def _window(facts: Facts) -> Window:
    """Mistral: ``sliding_window`` of all layers; null is none, and a file without the key means 4096."""
    if facts.data.get("sliding_window", 0) is None:
        return None, ()
    return facts.integer("sliding_window", 4096), ()


def _window_of_some_layers(facts: Facts) -> Window:
    """Qwen: layers from ``max_window_layers`` on, or those that ``layer_types`` names."""
    if not facts.flag("use_sliding_window", default=False):
        return None, ()
    if facts.data.get("sliding_window", 0) is None:
        return None, ()
    layers = range(facts.integer("num_hidden_layers"))
    kinds = facts.data.get("layer_types")
    if kinds is None:
        first = facts.integer("max_window_layers", 28, least=0)
        kinds = [_SLIDING if layer >= first else _FULL for layer in layers]
    if not isinstance(kinds, list) or not set(kinds) <= {_SLIDING, _FULL}:
        raise facts.error("layer_types", f"layers are {_FULL} or {_SLIDING}, not {kinds}")
    if len(kinds) != len(layers):
        raise facts.error("layer_types", f"{len(kinds)} kinds of layers for {len(layers)} layers")
    if _SLIDING not in kinds:
        return None, ()
    window = facts.integer("sliding_window", 4096)
    return window, tuple(layer for layer in layers if kinds[layer] == _FULL)


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
    window: Callable[[Facts], Window] = _no_window
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
