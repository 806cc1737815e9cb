"""Rebuilds a SentencePiece BPE tokenizer, as Llama 2 and Mistral have, from GGUF metadata.  No torch.

SentencePiece has no list of merges: wherever two neighbours together are a piece of the vocabulary they may
be joined, and the piece with the best score is joined first.  The ``tokenizers`` library wants ranked pairs
instead; ``_merges`` writes them down.  Texts are not cut into words.  A space is U+2581 in the vocabulary,
and characters that it lacks are spelled with 256 pieces, one for each byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from kerf_runtime.errors import ModelError

__all__ = ["sentencepiece_from_gguf"]

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Values of ``tokenizer.ggml.token_type``; 5, unused, is a piece that no text becomes."""
_BYTES = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


def sentencepiece_from_gguf(metadata: dict[str, Any], *, where: str) -> Tokenizer:
    """The tokenizer that the metadata describes, without first and last tokens.

    Control tokens are found in a text, and what follows one is a new text with a space before it, as if
    it had been encoded alone.  Words that users defined are whole, and part of their text.

    Args:
        metadata: of the file.
        where: path of the file, for errors.

    Raises:
        ModelError: no vocabulary, one that is not complete, or a rule that is not supported.
    """
    _refuse_rules(metadata, where)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError("the file has no vocabulary", where=f"{where}: tokenizer.ggml.tokens")
    scores = _of_each_token(metadata, "scores", len(tokens), where)
    kinds = _of_each_token(metadata, "token_type", len(tokens), where)
    of_kind = {
        kind: [token for token, of in zip(tokens, kinds, strict=True) if of == kind]
        for kind in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    }
    unknown = next(iter(of_kind[_UNKNOWN]), None)
    _check_coverage(of_kind[_BYTE], unknown, where)
    normal = {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind == _NORMAL
    }
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=_merges(normal),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(of_kind[_BYTE]),
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = _normalizer(of_kind[_USER_DEFINED], prefix=prefix)
    tokenizer.decoder = decoders.Decoder.custom(_PieceDecoder(prefix=prefix))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in of_kind[_UNKNOWN] + of_kind[_CONTROL]
        ]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in of_kind[_USER_DEFINED]])
    return tokenizer


def _refuse_rules(metadata: dict[str, Any], where: str) -> None:
    """Refuse what would change a text before it is encoded: Llama and Mistral have no such rule."""
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"tokenizer.ggml.{name}"):
            raise ModelError(
                "a SentencePiece tokenizer that changes texts is not supported",
                where=f"{where}: tokenizer.ggml.{name}",
                hint="Use the safetensors checkpoint instead",
            )


def _of_each_token(metadata: dict[str, Any], name: str, count: int, where: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}") or []
    if len(values) != count:
        raise ModelError(
            f"there are {len(values)} values for {count} tokens",
            where=f"{where}: tokenizer.ggml.{name}",
            hint="Convert the file again from the original checkpoint",
        )
    return list(values)


def _check_coverage(byte_tokens: list[str], unknown: str | None, where: str) -> None:
    """Every character must become some token: its bytes, or else the unknown one."""
    missing = sorted(_BYTES.keys() - set(byte_tokens))
    if not missing or (not byte_tokens and unknown is not None):
        return
    names = ", ".join(missing[:8])
    raise ModelError(
        f"the vocabulary lacks {len(missing)} of 256 bytes, such as {names}"
        if byte_tokens
        else "the vocabulary has neither bytes nor a token for what is unknown",
        where=f"{where}: tokenizer.ggml.token_type",
        hint="Convert the file again from the original checkpoint",
    )


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that together are a piece, the best score of that piece first.

    Training gives every piece a score of its own, lower than that before it.  Should a file have equal ones,
    the lower id is first, the order of training; SentencePiece would join the leftmost.

    Args:
        scores: of the pieces that may be joined and come of joining, in the order of their ids.
    """
    return [
        (left, right)
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if (left := token[:cut]) in scores and (right := token[cut:]) in scores
    ]


def _normalizer(user_defined: list[str], *, prefix: bool) -> normalizers.Normalizer:
    """Spaces become U+2581, and one more is put in front of a text.

    The library normalises added tokens, too, and looks for the result in normalised texts, so a word that
    a user defined must stay as it is.  A text that is nothing but that word has therefore no space before
    it, which SentencePiece would add.
    """
    spaces = normalizers.Replace(" ", _SPACE)
    if not prefix:
        return spaces
    words = "".join(f"{re.escape(word)}|" for word in user_defined)
    start = normalizers.Replace(Regex(rf"\A(?!(?:{words})\z)"), _SPACE)
    return normalizers.Sequence([start, spaces])


class _PieceDecoder:
    """Pieces to text, as SentencePiece does it: each bad byte becomes one U+FFFD, the first space is dropped.

    The library's own byte fallback replaces a whole run of bytes if one is bad, so good characters, already
    sent, would turn into U+FFFD when the first byte of the next one arrives.
    """

    def __init__(self, *, prefix: bool) -> None:
        self._prefix = prefix

    def decode_chain(self, tokens: Sequence[str]) -> list[str]:
        """The parts of a text, for the library; there is one."""
        data = b"".join(_BYTES.get(t) or t.replace(_SPACE, " ").encode() for t in tokens)
        text = _ESCAPED_BYTE.sub("\ufffd", data.decode("utf-8", errors="surrogateescape"))
        if self._prefix and tokens and tokens[0].startswith(_SPACE):
            text = text[1:]
        return [text]
