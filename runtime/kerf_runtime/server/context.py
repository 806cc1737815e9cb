"""What the routes share: state, metrics, and the way to run one prompt of an admitted request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

    def run(self, admitted: Admitted, index: int, arrived: float) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer to one prompt of ``admitted``."""
        tokenizer = self.state.tokenizer
        assert tokenizer is not None  # admission refuses requests before it is loaded
        return generate(
            self.state.client,
            tokenizer,
            self.metrics,
            admitted.requests[index],
            admitted.stops,
            arrived,
            seconds=self.state.settings.request_seconds,
        )

    def run_all(self, admitted: Admitted, arrived: float) -> list[AsyncGenerator[Piece, None]]:
        """``run`` of every answer."""
        return [self.run(admitted, index, arrived) for index in range(len(admitted.requests))]

    @property
    def token_texts(self) -> TokenTexts:
        """Single tokens as text."""
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
