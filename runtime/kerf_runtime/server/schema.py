"""What may be asked: the bodies of ``/v1/completions`` and ``/v1/chat/completions``.

What the schemas do not know is kept, and judged in ``unsupported``.  Names and defaults are those of OpenAI's API, plus
``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``, ``ignore_eos``, ``stop_token_ids`` and
``priority``, which the field's servers share.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kerf_runtime.engine.fair_queue import MAX_PRIORITY
from kerf_runtime.engine.messages import SamplingParams
from kerf_runtime.engine.seeds import seed_of_choice
from kerf_runtime.errors import RequestError

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "SamplingFields",
    "StreamOptions",
    "check_text",
]

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_MOST_BIASES = 1024

# A body may hold millions of wrong items: one error each would take minutes and gigabytes to report.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
ManyTokenIds = Annotated[list[TokenIds], Field(fail_fast=True, max_length=4096)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = Field(False, description="Send a last chunk with the token counts.")
    include_obfuscation: Literal[False, None] = Field(
        None, description="Padding against traffic analysis; only false is supported."
    )


class SamplingFields(BaseModel, ABC):
    """What both APIs share."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str = Field(description="A name listed by /v1/models.")
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(
        None, description="Number of answers to each prompt. Default 1."
    )
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        None, description="0 always takes the most likely token. Default 1."
    )
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        None,
        description="Draw from the most likely tokens that make up this probability. Default 1.",
    )
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None, description="Draw from this many of the most likely tokens; 0 and -1: all. Default 0."
    )
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = Field(
        None,
        description="Drop tokens less likely than this share of the likeliest. Default 0: none.",
    )
    presence_penalty: Penalty | None = Field(
        None, description="Subtracted from the logits of tokens in the answer. Default 0."
    )
    frequency_penalty: Penalty | None = Field(
        None, description="Subtracted once per time that a token is in the answer. Default 0."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = (
        Field(
            None,
            description="Above 1 makes tokens of prompt and answer less likely. Default 1.",
        )
    )
    logit_bias: Annotated[dict[str, Bias], Field(max_length=_MOST_BIASES)] | None = Field(
        None, description="Token ids (as text) and what is added to their logits, -100 to 100."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="The same seed and request give the same answer. Default: drawn."
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Most tokens of the answer."
    )
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Nothing ends the answer before this many tokens. Default 0."
    )
    stop: str | Texts | None = Field(
        None, description="Up to 16 strings that end the answer and are not part of it."
    )
    stop_token_ids: Annotated[TokenIds, Field(max_length=64)] | None = Field(
        None, description="Tokens that end the answer."
    )
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = Field(
        None, description="A lower number is served sooner, as if it had waited longer. Default 0."
    )
    ignore_eos: bool | None = Field(
        None, description="Go on after the model's end token (benchmarks). Default false."
    )
    stream: bool | None = Field(None, description="Send the answer in pieces. Default false.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream: true.")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _not_too_many(cls, value: object) -> object:
        """Its length, before its items: every wrong item is an error of its own."""
        if isinstance(value, dict) and len(value) > _MOST_BIASES:
            raise ValueError(f"{len(value)} tokens; at most {_MOST_BIASES} may be given")
        return value

    def stops(self) -> list[str]:
        """The stop strings.

        Raises:
            RequestError: too many, or an empty one.
        """
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if len(stops) > 16:
            raise RequestError(f"{len(stops)} stop strings; at most 16 are allowed", where="stop")
        if "" in stops:
            raise RequestError("a stop string is empty", where="stop", hint="Leave it out")
        for stop in stops:
            check_text(stop, where="stop")
        return stops

    def bias(self) -> tuple[tuple[int, float], ...]:
        """Token ids and what is added to their logits.

        Raises:
            RequestError: a key is no token id.
        """
        pairs = []
        for key, value in (self.logit_bias or {}).items():
            # Canonical, so that no token is named twice; short, because int() limits digits.
            if not (_TOKEN_ID.fullmatch(key)):
                raise RequestError(
                    f"{key[:40]!r} is not a token id",
                    where="logit_bias",
                    hint="Keys are token ids, written as decimal numbers",
                )
            pairs.append((int(key), float(value)))
        return tuple(pairs)

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """None for no log probabilities; else the number of alternatives per token."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's own tokens get log probabilities too."""
        return False

    def sampling(self, *, max_tokens: int, choice: int) -> SamplingParams:
        """The engine's parameters.

        Args:
            max_tokens: as admission decided.
            choice: which of ``n`` answers; each has a seed of its own.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.bias(),
            min_tokens=self.min_tokens or 0,
            seed=None if self.seed is None else seed_of_choice(self.seed, choice),
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.wanted_logprobs,
            prompt_logprobs=self.wants_prompt_logprobs,
        )

    @property
    def wants_stream_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: str | Texts | TokenIds | ManyTokenIds = Field(
        description="One prompt, as text or as token ids, or a list of them."
    )
    logprobs: TopLogprobs | None = Field(
        None, description="Tell the log probability of every token and of this many likelier ones."
    )
    echo: bool | None = Field(None, description="Begin the answer with the prompt. Default false.")
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Most tokens of the answer; 0, which needs echo, for the prompt alone."
    )
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Only the value of n is supported: answers are not ranked."
    )

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, value: object) -> object:
        return None if value is False else value

    @property
    def wanted_logprobs(self) -> int | None:
        """None for no log probabilities; else the number of alternatives per token."""
        return self.logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        """What is echoed is a part of the answer, with log probabilities if the answer has them."""
        return bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list.

        Raises:
            RequestError: there is none.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("the list of prompts is empty", where="prompt")
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


class TextPart(BaseModel):
    """Text inside a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates expect it; ``developer`` is the newer name of ``system``."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] = Field(
        description="The conversation so far."
    )
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Most tokens of the answer; the newer name of max_tokens."
    )

    logprobs: bool | None = Field(
        None, description="Tell the log probability of every token. Default false."
    )
    top_logprobs: TopLogprobs | None = Field(
        None, description="Also those of this many likeliest tokens; needs logprobs: true."
    )

    @property
    def wanted_logprobs(self) -> int | None:
        """None for no log probabilities; else the number of alternatives per token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer, whichever name was used."""
        return self.max_completion_tokens or self.max_tokens


def check_text(text: str, *, where: str) -> None:
    """Refuse half surrogate pairs: JSON can write them (``\\ud800``), but they are no characters.

    Raises:
        RequestError: there is one in ``text``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has half a surrogate pair at character {error.start}, which is no character",
            where=where,
        ) from None
