"""Rebuilds a tokenizer from GGUF metadata: byte-level BPE here, SentencePiece beside it.  No torch.

Of byte-level BPE GGUF stores the vocabulary, the merges and, instead of the rules that cut text into words before
merging, only a name for them (``tokenizer.ggml.pre``).  ``_PRE_TOKENIZERS`` says what each name means;
an unknown name is an error, because guessing would give wrong tokens without a sign of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kerf_runtime.errors import ModelError
from kerf_runtime.models.gguf_sentencepiece import sentencepiece_from_gguf

__all__ = ["tokenizer_from_gguf"]

_CONTROL, _USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type`` that are matched as whole words in the text."""

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
"""The same words, with every digit on its own."""


def _bytes(*, split_words: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _bytes(split_words=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _bytes(split_words=True)])


def _llama3(words: str = _LLAMA3_WORDS) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    return pre_tokenizers.Sequence([split, _bytes(split_words=False)])


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _llama3(_QWEN2_WORDS)


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "qwen2": _qwen2,
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3"})
"""Kinds where a word that is in the vocabulary is taken whole, whatever the merges say."""
_COMPOSED = frozenset({"qwen2"})
"""Kinds that see text in Unicode's composed form, NFC."""


def tokenizer_from_gguf(metadata: dict[str, Any], *, where: str) -> Tokenizer:
    """The tokenizer that the metadata describes.

    Args:
        metadata: of the file.
        where: path of the file, for errors.

    Raises:
        ModelError: no vocabulary, or a kind of tokenizer that is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = _pre_tokenizer_name(metadata, tuple(_PRE_TOKENIZERS), where)
        tokenizer = _byte_level(metadata, pre, where)
        default_bos = pre in _WHOLE_WORDS_FIRST
    elif kind == "llama":
        _pre_tokenizer_name(metadata, ("default",), where)
        tokenizer = sentencepiece_from_gguf(metadata, where=where)
        default_bos = True
    else:
        raise ModelError(
            f"tokenizer model {kind!r} is not supported",
            where=f"{where}: tokenizer.ggml.model",
            hint="Supported: gpt2 (byte-level BPE), llama (SentencePiece BPE). "
            "Use the safetensors checkpoint instead",
        )
    _add_edges(tokenizer, metadata, default_bos=default_bos)
    return tokenizer


def _pre_tokenizer_name(metadata: dict[str, Any], supported: tuple[str, ...], where: str) -> str:
    """How the file names its rules for cutting a text into words; the first if it does not."""
    pre: str = metadata.get("tokenizer.ggml.pre", supported[0])
    if pre not in supported:
        raise ModelError(
            f"pre-tokenizer {pre!r} is not supported",
            where=f"{where}: tokenizer.ggml.pre",
            hint=f"Supported: {', '.join(supported)}",
        )
    return pre


def _byte_level(metadata: dict[str, Any], pre: str, where: str) -> Tokenizer:
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelError("the file has no vocabulary", where=f"{where}: tokenizer.ggml.tokens")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    # The library raises bare Exception when a merge is not in the vocabulary.
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # noqa: BLE001
        raise ModelError(
            f"vocabulary and merges do not fit together: {error}",
            where=f"{where}: tokenizer.ggml.merges",
        ) from None
    tokenizer = Tokenizer(model)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    added = [
        (token, of)
        for token, of in zip(tokens, kinds, strict=False)
        if of in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, of in added if of == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, of in added if of == _USER_DEFINED]
    )
    return tokenizer


def _add_edges(tokenizer: Tokenizer, metadata: dict[str, Any], *, default_bos: bool) -> None:
    """Add the first and last token that the model expects around a text."""
    tokens = metadata["tokenizer.ggml.tokens"]

    def edge(name: str, wanted: bool) -> tuple[str, int] | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not wanted or token_id is None or token_id >= len(tokens):
            return None
        return tokens[token_id], token_id

    bos = edge("bos", bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos)))
    eos = edge("eos", bool(metadata.get("tokenizer.ggml.add_eos_token", False)))
    if bos is None and eos is None:
        return
    parts = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
    special = list(dict.fromkeys(item for item in (bos, eos) if item is not None))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(parts), special_tokens=special
    )
