"""Text to tokens and back, and conversations to prompts.  No torch: the HTTP process uses it.

The ``tokenizers`` library does the work.  A folder brings ``tokenizer.json``; for a GGUF file the same
object is rebuilt from the metadata (``gguf_tokenizer``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kerf_runtime.errors import ModelError, RequestError
from kerf_runtime.models.chat_template import ChatTemplate
from kerf_runtime.models.checkpoint import find_checkpoint, read_json
from kerf_runtime.models.describe import read_model_config
from kerf_runtime.models.gguf_file import read_gguf
from kerf_runtime.models.gguf_tokenizer import tokenizer_from_gguf

__all__ = ["Tokenizer", "load_tokenizer"]


class Tokenizer:
    """The tokenizer of one checkpoint; safe to use from several threads.

    Attributes:
        eos_token_ids: tokens that end an answer.
        bos_token_id: token that starts a text, if the model has one.
        vocab_size: number of token ids, added tokens included.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_path(cls, path: Path) -> Tokenizer:
        """The tokenizer of the checkpoint at ``path``; see ``load_tokenizer``."""
        return load_tokenizer(path)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Special tokens written in the text, such as ``<|im_end|>``, become that token.

        Args:
            text: any text.
            add_special_tokens: also add what the model expects around a text, such as a first token.
        """
        # Unlike ``encode``, a batch lets other threads run meanwhile: a long text takes seconds.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included (for logs and errors)."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_name(self, token_id: int) -> str | None:
        """How the vocabulary writes a token, such as ``Ġworld``; None if there is no such token."""
        name: str | None = self._backend.id_to_token(token_id)
        return name

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` can work."""
        return self._chat_template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation; encode it with ``add_special_tokens=False``.

        Raises:
            RequestError: the model has no chat template, or the template refuses these messages.
        """
        if self._chat_template is None:
            raise RequestError(
                "the model has no chat template",
                where="messages",
                hint="Use /v1/completions with a prompt in the model's own format",
            )
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the checkpoint at ``path``.

    Raises:
        ModelError: no checkpoint, no tokenizer in it, or one of a kind that is not supported.
    """
    checkpoint = find_checkpoint(Path(path))
    config = read_model_config(path)
    if checkpoint.gguf is not None:
        metadata = read_gguf(checkpoint.gguf).metadata
        backend = tokenizer_from_gguf(metadata, where=str(checkpoint.gguf))
        tokens = metadata["tokenizer.ggml.tokens"]
        special = {
            name: tokens[token_id]
            for name, token_id in (
                ("bos_token", config.bos_token_id),
                ("eos_token", next(iter(config.eos_token_ids), None)),
            )
            if token_id is not None and token_id < len(tokens)
        }
        source = metadata.get("tokenizer.chat_template")
        where = f"{checkpoint.gguf}: tokenizer.chat_template"
    else:
        backend = _backend_from_folder(checkpoint.path)
        data = read_json(checkpoint.path / "tokenizer_config.json", required=False)
        special = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(data.get(name))) is not None
        }
        source, where = _template_of_folder(checkpoint.path, data)
    template = ChatTemplate(source, special, where=where) if source else None
    return Tokenizer(
        backend,
        chat_template=template,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
    )


def _backend_from_folder(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            "the folder has no tokenizer.json",
            where=str(folder),
            hint="Save the tokenizer in the fast format (transformers: save_pretrained)",
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    # The library raises bare Exception for every kind of bad file.
    except Exception as error:  # noqa: BLE001
        raise ModelError(f"the tokenizer cannot be read: {error}", where=str(path)) from None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_of_folder(folder: Path, data: dict[str, Any]) -> tuple[str | None, str]:
    """The chat template: a file of its own, or in ``tokenizer_config.json`` (one, or a named list)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    where = f"{folder / 'tokenizer_config.json'}: chat_template"
    value = data.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError("the chat template is not a text", where=where)
    return value, where
