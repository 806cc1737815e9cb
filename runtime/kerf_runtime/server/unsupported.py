"""What may not be asked, beyond what a schema can say.

A field that would change the answer and is not supported is refused, never ignored; the same field
with its neutral value (``tools: []``, ``echo: false`` in a chat) passes.  ``UNSUPPORTED`` lists those values, and
``HINTS`` the fields that never change an answer.
"""

from __future__ import annotations

from typing import Any

from kerf_runtime.errors import RequestError
from kerf_runtime.server.schema import ChatRequest, CompletionRequest, SamplingFields

__all__ = ["HINTS", "UNSUPPORTED", "check_extra_fields"]

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known fields that are not supported, with the values (beside null) that ask for nothing."""

HINTS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""Known fields that are accepted and have no effect on the answer."""


def check_extra_fields(request: SamplingFields) -> None:
    """Refuse what we would have to ignore.

    Raises:
        RequestError: an unsupported or unknown field; ``where`` names it.
    """
    if request.stream_options is not None and not request.stream:
        raise RequestError("only allowed with stream: true", where="stream_options")
    _check(request.model_extra or {}, prefix="")
    if isinstance(request, CompletionRequest) and request.best_of not in (None, request.n or 1):
        raise RequestError(
            f"best_of is {request.best_of} and n is {request.n or 1}: ranking answers is not "
            "supported",
            where="best_of",
            hint="Leave it out, and choose among n answers by their logprobs",
        )
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("only allowed with logprobs: true", where="top_logprobs")
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            if message.content is None and message.role != "assistant":
                raise RequestError("the message has no content", where=f"messages.{index}.content")
            extra = message.model_extra or {}
            for name in ("refusal", "audio", "tool_calls", "function_call", "annotations"):
                if extra.get(name) in (None, []):
                    extra.pop(name, None)
            _check(extra, prefix=f"messages.{index}.")


def _check(extra: dict[str, Any], *, prefix: str) -> None:
    for name, value in extra.items():
        if name in HINTS or value is None:
            continue
        if name in UNSUPPORTED:
            if any(_same(value, neutral) for neutral in UNSUPPORTED[name]):
                continue
            raise RequestError(
                "this parameter is not supported by this server",
                where=f"{prefix}{name}",
                hint="Leave it out",
            )
        raise RequestError("unknown parameter", where=f"{prefix}{name}", hint="Leave it out")


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells ``0`` from ``false``: completions' ``logprobs: 0`` does ask for something."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
