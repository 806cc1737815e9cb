"""Renders a checkpoint's chat template in a sandbox.  No torch.

Templates come with the weights and are other people's code: Jinja2's immutable sandbox runs them, with
the few helpers that published templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kerf_runtime.errors import ModelError, RequestError

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, where: str) -> None:
        """Compile a template.

        Args:
            source: Jinja2 text.
            special_tokens: names such as ``bos_token`` and their text.
            where: file the template came from, for errors.

        Raises:
            ModelError: not valid Jinja2.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is not valid Jinja2: {error.message} in line {error.lineno}",
                where=where,
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The prompt of a conversation.

        Raises:
            RequestError: the template refuses the messages, for example two answers in a row.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # A template is arbitrary code over the client's messages: a message without content
        # surfaces as TypeError or KeyError from inside it.
        except (TemplateError, TypeError, KeyError, ValueError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", where="messages"
            ) from None


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as the model was trained on: no escapes for HTML or non-ASCII characters."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
