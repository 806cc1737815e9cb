"""Architecture facts of a checkpoint, the same whatever the file format.  No torch, no weights."""

from __future__ import annotations

from dataclasses import dataclass

from kerf_runtime.config.compilation import MIXER_OPS
from kerf_runtime.config.engine import DType

__all__ = ["Fp8Scheme", "ModelConfig", "RopeScaling", "StateShape"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    Attributes:
        kind: ``linear`` (positions divided by ``factor``), ``llama3`` (low frequencies divided, high
            ones kept, smooth between; Llama 3.1), or ``factors`` (the checkpoint has a tensor that
            divides each frequency; GGUF's form of llama3).
        factor: the divisor.
        low_freq_factor: llama3 only.
        high_freq_factor: llama3 only.
        original_max_position: llama3 only, in tokens.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class Fp8Scheme:
    """How the linear layers between embedding and head are quantised: weights and inputs in FP8.

    Attributes:
        static: the scale of each layer's input is in the checkpoint; else it is computed per token.
        stored: the checkpoint holds FP8 weights and their scales; else they are made while loading.
    """

    static: bool
    stored: bool


@dataclass(frozen=True)
class StateShape:
    """What state-space layers keep of each sequence, however long it is.

    Attributes:
        layers: how many there are.
        taps: earlier inputs of the convolution, [taps, channels] in the model's data type.
        channels: of the convolution.
        heads: of the state, [heads, head_dim, columns] in float32, in which small steps are not lost.
        head_dim: see above.
        columns: see above.
    """

    layers: int
    taps: int
    channels: int
    heads: int
    head_dim: int
    columns: int

    def bytes_per_sequence(self, itemsize: int) -> int:
        """Bytes of one sequence in all layers; ``itemsize`` is that of the model's data type."""
        own = self.taps * self.channels * itemsize
        return self.layers * (own + 4 * self.heads * self.head_dim * self.columns)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the engine must know about a checkpoint; each family adds what its own code must know.

    Attributes:
        architecture: the Hugging Face class name, whatever the file format.
        max_position_embeddings: longest sequence, in tokens.
        sliding_window: tokens, itself included, that a token attends to; None for all before it.
        full_layers: layers that attend to all tokens although there is a window.
        dtype: data type of the stored weights; BFLOAT16 for quantised ones.
        eos_token_ids: tokens that end an answer.
        bos_token_id: token that starts a text, if the model has one.
        quantization: of the linear layers, if they are quantised while they compute.  GGUF files are
            expanded when they are loaded, so they have none.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    tie_word_embeddings: bool
    dtype: DType
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: Fp8Scheme | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_attention_layers(self) -> int:
        """Layers that have keys and values."""
        return self.num_layers

    @property
    def state_shape(self) -> StateShape | None:
        """What its state-space layers keep of each sequence; None without such layers."""
        return None

    @property
    def mixer_ops(self) -> tuple[str, ...]:
        """Operators of its state-space layers, ``namespace::name``."""
        return () if self.state_shape is None else MIXER_OPS

    def windows(self, max_model_len: int | None) -> dict[int, int]:
        """Layer -> its window, where sequences of ``max_model_len`` tokens can leave it.

        Args:
            max_model_len: in tokens; None for as long as the model allows.
        """
        window, longest = self.sliding_window, max_model_len or self.max_position_embeddings
        if window is None or longest <= window:
            return {}
        return {layer: window for layer in range(self.num_layers) if layer not in self.full_layers}
