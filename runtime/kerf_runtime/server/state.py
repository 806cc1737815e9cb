"""What every handler sees: the engine client, the tokenizer, the settings, and whether we are ready.

``Readiness`` is computed from the engine client and never stored, so that ``/ready`` cannot lag.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kerf_runtime.engine.failures import error_of
from kerf_runtime.engine.messages import AddRequest, Failed, Phase, Started, TokenOutput
from kerf_runtime.errors import KerfError

__all__ = [
    "ChatTokenizer",
    "Client",
    "Readiness",
    "ServerSettings",
    "ServerState",
]


class Client(Protocol):
    """What the server needs of ``kerf_runtime.engine.client.EngineClient``."""

    @property
    def phase(self) -> Phase:
        """The start-up phase the engine is in."""

    @property
    def started(self) -> Started | None:
        """Set once the engine is ready."""

    @property
    def failed(self) -> Failed | None:
        """Set once the engine cannot go on."""

    @property
    def stats(self) -> dict[str, Any]:
        """The latest ``kerf_runtime.stats.EngineStats.to_values()``; empty before the first."""

    @property
    def silent_seconds(self) -> float:
        """How long a started engine has said nothing."""

    @property
    def is_stalled(self) -> bool:
        """Whether it has said nothing for so long that it is probably stuck in a step."""

    def generate(self, request: AddRequest) -> AsyncGenerator[TokenOutput, None]:
        """Tokens of one request; closing the generator aborts it."""


class ChatTokenizer(Protocol):
    """What the server needs of ``kerf_runtime.models.tokenizer.Tokenizer``."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def token_name(self, token_id: int) -> str | None:
        """How the vocabulary writes a token; None if there is no such token."""

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation."""


@dataclass(frozen=True)
class ServerSettings:
    """Limits and names of one server."""

    served_name: str
    max_num_seqs: int = 16
    max_queue_len: int = 256
    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body; a long prompt is far below it."""
    body_seconds: float = 30.0
    """How long a request body may take to arrive: half a request must not hold a connection for ever."""
    max_answers: int = 64
    """Most answers of one request: prompts times ``n``."""
    request_seconds: float | None = None
    """How long a request may take from its arrival; None for ever."""
    drain_seconds: float = 30.0
    drain_lag_seconds: float = 2.0
    """After SIGTERM, new requests are still served this long: endpoints take a moment to forget a pod."""
    api_key: str | None = None


@dataclass(frozen=True)
class Readiness:
    """Whether requests may come, and if not, why: ``status`` is the phase, ``stalled``, ``draining`` or ``failed``."""

    ready: bool
    status: str
    detail: str = ""
    fraction: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The body of ``/ready`` and ``/health``."""
        body: dict[str, Any] = {"status": self.status}
        if self.detail:
            body["detail"] = self.detail
        if self.fraction is not None:
            body["fraction"] = round(self.fraction, 4)
        return body


@dataclass
class ServerState:
    """Mutable state of one server; changed by ``lifecycle`` and by admission only."""

    client: Client
    settings: ServerSettings
    tokenizer: ChatTokenizer | None = None
    failure: KerfError | None = None
    """A failure of this process's own start-up, such as an unreadable tokenizer."""
    draining_since: float | None = None
    outstanding: int = 0
    """Answers that are owed, from before their prompts are tokenised until they are complete."""
    long_texts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))
    """Held while a long text is tokenised: many at once would take the memory of all of them."""
    created: int = field(default_factory=lambda: int(time.time()))

    def error(self) -> KerfError | None:
        """Why this server can never answer again, or None."""
        if self.failure is not None:
            return self.failure
        failed = self.client.failed
        return None if failed is None else error_of(failed)

    def readiness(self) -> Readiness:
        """The answer of ``/ready``."""
        error = self.error()
        if error is not None:
            return Readiness(False, "failed", str(error))
        if self.draining_since is not None:
            return Readiness(False, "draining", f"{self.outstanding} requests are still running")
        phase = self.client.phase
        if self.client.started is None:
            return Readiness(False, phase.name, phase.detail, phase.fraction)
        if self.tokenizer is None:
            return Readiness(False, "tokenizer", "loading the tokenizer")
        if self.client.is_stalled:
            silent = self.client.silent_seconds
            return Readiness(False, "stalled", f"one step has taken {silent:.0f} seconds so far")
        return Readiness(True, "ready")

    def refuses_new_requests(self) -> bool:
        """Whether draining has gone on for longer than endpoints need to forget us."""
        return (
            self.draining_since is not None
            and time.monotonic() - self.draining_since >= self.settings.drain_lag_seconds
        )
