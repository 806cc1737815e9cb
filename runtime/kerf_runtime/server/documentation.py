"""What ``/openapi.json`` says about answers; nothing here runs when one is made.

The bodies are put together by hand for speed.  These models describe them for people and for tools that
generate clients or tests; the tests hold every answer against them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ANSWERS_OF_CHAT", "ANSWERS_OF_COMPLETIONS", "REFUSALS"]


class _Exactly(BaseModel):
    """These fields and no others."""

    model_config = ConfigDict(extra="forbid")


class Error(_Exactly):
    """What went wrong."""

    message: str = Field(description="What happened and what to do.")
    type: str
    param: str | None = Field(description="Path of the wrong field.")
    code: str | None


class ErrorAnswer(_Exactly):
    """Every refusal and failure."""

    error: Error


class PromptTokensDetails(_Exactly):
    """Where the tokens of prompts came from."""

    cached_tokens: int = Field(description="Tokens that were in the KV cache already.")


class Usage(_Exactly):
    """Tokens of all prompts and answers of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length"]


class CompletionChoice(_Exactly):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: FinishReason


class Completion(_Exactly):
    """Answers to all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnswerMessage(_Exactly):
    """The model's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Exactly):
    """One answer to the conversation."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatCompletion(_Exactly):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


Responses = dict[int | str, dict[str, Any]]

REFUSALS: Responses = {
    "4XX": {"model": ErrorAnswer, "description": "The request is refused; the error says why."}
}
"""Of every route that can refuse."""


def _answers(model: type[BaseModel]) -> Responses:
    return {
        200: {
            "model": model,
            "description": "The answer; with stream: true, pieces of it as server-sent events.",
            "content": {"text/event-stream": {}},
        },
        **REFUSALS,
        503: {
            "model": ErrorAnswer,
            "description": "Starting, shutting down, or failed; another replica may answer.",
        },
        504: {"model": ErrorAnswer, "description": "The answer took too long."},
    }


ANSWERS_OF_COMPLETIONS = _answers(Completion)
ANSWERS_OF_CHAT = _answers(ChatCompletion)
