"""A stand-in for the engine process, for HTTP edge cases that a real engine cannot be made to show."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from tests.patience import join
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kerf_runtime.compilation.counters import PASS_COUNTERS
from kerf_runtime.engine.messages import (
    AddRequest,
    Failed,
    Phase,
    Started,
    TokenLogprobs,
    TokenOutput,
)
from kerf_runtime.errors import EngineError
from kerf_runtime.server.app import create_app
from kerf_runtime.server.connection import http_config, watch_peers
from kerf_runtime.server.lifecycle import bind
from kerf_runtime.server.state import ServerSettings, ServerState
from kerf_runtime.stats import EngineStats

END = 256
"""Token that ends an answer; tokens 0 to 255 are bytes."""

COUNTERS = {
    "dynamo_traces": 1,
    "compilations_after_startup": 0,
    "captures_after_startup": 0,
    **dict.fromkeys(PASS_COUNTERS.values(), 0),
}

REPORT: dict[str, Any] = {
    "cache": {
        "key": "0123456789abcdef",
        "result": "hit",
        "reason": "Hit",
        "message": "verified",
        "bytes": 1234,
    },
    "counters": COUNTERS,
    "effective": {
        "requested_level": 3,
        "level": 3,
        "requested_mode": "FULL",
        "mode": "FULL_AND_PIECEWISE",
        "platform": {"attention_backend": "reference", "graph_backend": "emulated"},
        "changes": [{"field": "cudagraphMode", "reason": "AttentionBackendLimit"}],
    },
    "graphs": {
        "backend": "emulated",
        "captured": 2,
        "memory_bytes": 4096,
        "shared_bytes": 1024,
        "estimated_bytes": 4300,
        "estimate_error": 0.05,
        "pending": ["FULL decode 3", "FULL decode 5"],
        "longest_delay_seconds": 0.03,
        "capture_seconds": 0.5,
        "dropped": [{"mode": "FULL", "num_tokens": 16, "reason": "MemoryBudget"}],
        "descriptors": [
            {
                "mode": mode,
                "num_tokens": 8,
                "uniform_decode": mode == "FULL",
                "nodes": 3,
                "bytes": 2048,
                "seconds": 0.25,
                "hits": 0,
            }
            for mode in ("FULL", "PIECEWISE")
        ],
    },
    "startup": {"import": 1.5, "weights": 0.5, "ready": 3.0},
    "compile": {"trace": 0.7, "inductor": 12.0},
}


class ByteTokenizer:
    """A real byte-level tokenizer whose token ids are bytes; chat is ``role: content`` lines."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        order = {_byte_of(char): char for char in alphabet}
        vocab = {order[byte]: byte for byte in range(256)}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(["<end>"])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        [encoding] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_name(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


def _byte_of(char: str) -> int:
    """The byte that a character of the byte-level alphabet stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if ord(char) < 0x100:
        return ord(char)
    return [byte for byte in range(256) if byte not in printable][ord(char) - 0x100]


@dataclass
class FakeClient:
    """Answers every prompt with ``reply`` in UTF-8, ``per_step`` tokens at a time.

    ``hold`` keeps requests running without a token until it is set; ``endless`` never stops by itself.
    ``cached`` says how many tokens of a prompt were in the KV cache.
    """

    reply: Callable[[AddRequest], str] = lambda request: "Hello"
    cached: Callable[[AddRequest], int] = lambda request: 0
    per_step: int = 1
    max_model_len: int = 64
    endless: bool = False
    start_seconds: float = 0.0
    failed: Failed | None = None
    phase: Phase = field(default_factory=lambda: Phase(name="import"))
    started: Started | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    seen: list[AddRequest] = field(default_factory=list)
    hold: threading.Event | None = None
    closed: bool = False
    silent_seconds: float = 0.0
    is_stalled: bool = False

    def make_ready(self) -> FakeClient:
        """As after ``Started``."""
        self.phase = Phase(name="ready")
        self.started = Started(
            max_model_len=self.max_model_len, vocab_size=257, eos_token_ids=(END,), report=REPORT
        )
        engine = EngineStats(kv_blocks_total=100)
        self.stats = engine.to_values(counters=COUNTERS)
        return self

    async def start(self) -> None:
        async def become_ready() -> None:
            await asyncio.sleep(self.start_seconds)
            if self.failed is None:
                self.make_ready()

        self._starting = asyncio.create_task(become_ready())

    async def close(self) -> None:
        self.closed = True
        self._starting.cancel()

    async def generate(self, request: AddRequest) -> AsyncGenerator[TokenOutput, None]:
        self.seen.append(request)
        finished = False
        try:
            tokens = [*self.reply(request).encode(), END]
            limit = request.params.max_tokens
            produced = 0
            while True:
                while self.hold is not None and not self.hold.is_set():
                    self._check_alive()
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.001)
                self._check_alive()
                chunk = tokens[produced : produced + self.per_step]
                if self.endless:
                    chunk = [ord("x")]
                chunk = chunk[: limit - produced]
                produced += len(chunk)
                reason = None
                if chunk and chunk[-1] == END:
                    reason = "stop"
                elif produced >= limit:
                    reason = "length"
                finished = reason is not None
                first = bool(chunk) and produced == len(chunk)
                yield TokenOutput(
                    request.request_id,
                    chunk,
                    reason,
                    _logprobs(request, chunk),
                    cached_tokens=self.cached(request) if first else 0,
                    prompt_logprobs=_prompt_logprobs(request) if first else None,
                )
                if finished:
                    return
        finally:
            if not finished:
                self.aborted.append(request.request_id)

    def _check_alive(self) -> None:
        if self.failed is not None:
            raise EngineError(self.failed.what)


def _logprobs(request: AddRequest, tokens: list[int]) -> list[TokenLogprobs] | None:
    """A token's own value is minus a thousandth of it; the likeliest are it, then A, B, C and so on."""
    count = request.params.logprobs
    if count is None:
        return None
    others = [(ord("A") + i, -1.0 - i) for i in range(count)]
    return [TokenLogprobs(-t / 1000, [(t, -t / 1000), *others][:count]) for t in tokens]


def _prompt_logprobs(request: AddRequest) -> list[TokenLogprobs | None] | None:
    if not request.params.prompt_logprobs:
        return None
    _, *rest = _logprobs(request, request.prompt_token_ids) or []
    return [None, *rest]


@contextlib.contextmanager
def running_server(
    client: FakeClient, *, unread_seconds: float = 60.0, **settings: Any
) -> Iterator[tuple[str, ServerState]]:
    """The application on a real socket of 127.0.0.1: its base URL and its state."""
    app = create_app(client, ByteTokenizer(), ServerSettings(served_name="tiny", **settings))
    listener = bind("127.0.0.1", 0)
    watch_peers(listener, unread_seconds=unread_seconds)
    server = uvicorn.Server(http_config(app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.kerf.state
    finally:
        server.should_exit = True
        join(thread)
        listener.close()
