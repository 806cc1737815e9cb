"""Facts that GGUF files of every architecture give in the same way.  Pure, no torch."""

from __future__ import annotations

from kerf_runtime.config.engine import DType
from kerf_runtime.models.facts import Facts
from kerf_runtime.models.gguf_file import GgufFile

__all__ = ["ending_tokens", "shortest", "stored_dtype", "vocabulary_size"]

_DTYPES = {"F32": DType.FLOAT32, "F16": DType.FLOAT16}


def stored_dtype(header: GgufFile) -> DType:
    """The data type of the matrices; BFLOAT16 if they are quantised or of several."""
    kinds = {t.type_name for t in header.tensors.values() if len(t.shape) > 1}
    only = next(iter(kinds)) if len(kinds) == 1 else ""
    return _DTYPES.get(only, DType.BFLOAT16)


def vocabulary_size(header: GgufFile) -> int | None:
    """Number of tokens in the vocabulary, else rows of the embedding, else None."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    embedding = header.tensors.get("token_embd.weight")
    return len(tokens) if tokens else embedding.shape[0] if embedding else None


def ending_tokens(facts: Facts) -> tuple[int, ...]:
    """Tokens that end a text or a turn."""
    ids = facts.tokens("tokenizer.ggml.eos_token_id") + facts.tokens("tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(ids))


def shortest(value: float) -> float:
    """The decimal number that was meant: GGUF stores 1e-05 as a 32-bit float."""
    return float(f"{value:.7g}")
