"""The FastAPI application over an engine client."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from kerf_runtime import __version__
from kerf_runtime.errors import KerfError
from kerf_runtime.metrics import EngineCollector, EngineView, RequestMetrics
from kerf_runtime.server import chat, completions, status
from kerf_runtime.server.access import Access
from kerf_runtime.server.context import ServerContext
from kerf_runtime.server.middleware import Gate
from kerf_runtime.server.responses import (
    handle_http_exception,
    handle_kerf_error,
    handle_validation_error,
)
from kerf_runtime.server.state import ChatTokenizer, Client, ServerSettings, ServerState
from kerf_runtime.server.streaming import ClientGone

__all__ = ["create_app"]

logger = logging.getLogger(__name__)


def create_app(
    client: Client,
    tokenizer: ChatTokenizer | None,
    settings: ServerSettings,
) -> FastAPI:
    """The application; it answers at once, ``/ready`` says when it can serve.

    Args:
        client: the engine, started or starting.
        tokenizer: None if it is still loading; set ``app.state.kerf.state.tokenizer`` then.
        settings: names and limits.
    """
    state = ServerState(client=client, settings=settings, tokenizer=tokenizer)
    registry = CollectorRegistry()
    context = ServerContext(
        state=state,
        registry=registry,
        metrics=RequestMetrics(registry, settings.served_name),
    )

    def view() -> EngineView:
        started = client.started
        report = {} if started is None else started.report
        return EngineView(settings.served_name, report, client.stats, client.silent_seconds)

    registry.register(EngineCollector(view))
    app = FastAPI(
        title="Kerf",
        version=__version__,
        summary="OpenAI-compatible API of one compiled model",
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lose the body in some clients; no path of ours has two names
    )
    app.state.kerf = context
    for router in (status.router, completions.router, chat.router):
        app.include_router(router)
    app.add_exception_handler(KerfError, handle_kerf_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(ClientGone, _nobody_listens)
    app.add_middleware(
        Gate,
        max_body_bytes=settings.max_body_bytes,
        body_seconds=settings.body_seconds,
        api_key=settings.api_key,
    )
    app.add_middleware(Access, metrics=context.metrics)  # the last one added is the outermost
    return app


async def _nobody_listens(request: Request, error: Exception) -> Response:
    """The response to a client that has gone; 499 is what access logs call it."""
    return Response(status_code=499)
