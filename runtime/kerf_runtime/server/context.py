"""What the routes share: state, metrics, and the way to run an admitted request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from fastapi import Request
from prometheus_client import CollectorRegistry

from kerf_runtime.errors import OverloadedError
from kerf_runtime.metrics import RequestMetrics
from kerf_runtime.server.admission import Admitted
from kerf_runtime.server.generation import Piece, generate
from kerf_runtime.server.logprobs import TokenTexts
from kerf_runtime.server.state import ServerState

__all__ = ["ServerContext", "context_of"]


@dataclass(frozen=True)
class ServerContext:
    """Kept in ``app.state.kerf``."""

    state: ServerState
    registry: CollectorRegistry
    metrics: RequestMetrics

    @contextmanager
    def answering(
        self, admitted: Admitted, arrived: float
    ) -> Iterator[list[AsyncGenerator[Piece, None]]]:
        """Pieces of every answer of ``admitted``.

        However a request ends, each of its answers is counted once.
        """
        tokenizer = self.state.tokenizer
        assert tokenizer is not None  # admission refuses requests before it is loaded
        unfinished = len(admitted.requests)

        def ended(reason: str) -> None:
            nonlocal unfinished
            unfinished -= 1
            self.metrics.finished(reason)

        try:
            yield [
                generate(
                    self.state.client,
                    tokenizer,
                    self.metrics,
                    request,
                    admitted.stops,
                    arrived,
                    ended=ended,
                    continues=admitted.continues,
                    seconds=self.state.settings.request_seconds,
                )
                for request in admitted.requests
            ]
        finally:
            for _ in range(unfinished):  # the client left before the first piece was asked for
                self.metrics.finished("abort")

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Single tokens as text; what was decoded for one request is known to the next."""
        assert self.state.tokenizer is not None  # as above
        return TokenTexts(self.state.tokenizer)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count requests that the queue limit turned away."""
        try:
            yield
        except OverloadedError:
            self.metrics.finished("refused")
            raise


def context_of(request: Request) -> ServerContext:
    """The context of the application that got ``request``."""
    return cast("ServerContext", request.app.state.kerf)
