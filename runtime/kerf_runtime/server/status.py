"""What people, probes and scrapers read: health, readiness, metrics, version, graphs, models."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from kerf_runtime import __version__
from kerf_runtime.metrics import exposition
from kerf_runtime.server.context import context_of
from kerf_runtime.server.documentation import REFUSALS
from kerf_runtime.server.responses import UnknownModelError
from kerf_runtime.server.state import ServerState

__all__ = ["debug_report", "router"]

router = APIRouter()

_NOT_SO: dict[int | str, dict[str, Any]] = {503: {"description": "It is not; the body says why."}}


@router.get("/health", responses=_NOT_SO)
async def health(request: Request) -> JSONResponse:
    """Live: 503 only when this process can never answer again and must be restarted."""
    state = context_of(request).state
    readiness = state.readiness()
    return JSONResponse(readiness.to_json(), status_code=503 if state.error() else 200)


@router.get("/ready", responses=_NOT_SO)
async def ready(request: Request) -> JSONResponse:
    """Ready: model loaded, pieces compiled, graphs captured, engine alive, not draining."""
    readiness = context_of(request).state.readiness()
    return JSONResponse(readiness.to_json(), status_code=200 if readiness.ready else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics, as OpenMetrics if the scraper accepts it."""
    body, content_type = exposition(context_of(request).registry, request.headers.get("accept"))
    return Response(body, media_type=content_type)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this server."""
    return {"version": __version__}


@router.get("/debug/graphs")
async def debug_graphs(request: Request) -> dict[str, Any]:
    """Cache verdict, effective configuration, graphs with their hits, dispatch, start-up phases."""
    return debug_report(context_of(request).state)


@router.get("/v1/models", responses=REFUSALS)
async def models(request: Request) -> dict[str, Any]:
    """The one model of this server."""
    return {"object": "list", "data": [_model(context_of(request).state)]}


@router.get("/v1/models/{name:path}", responses=REFUSALS)
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model by its name."""
    state = context_of(request).state
    if name != state.settings.served_name:
        raise UnknownModelError(
            f"the model {name!r} does not exist here",
            where="model",
            hint=f"This server serves {state.settings.served_name!r}",
        )
    return _model(state)


def debug_report(state: ServerState) -> dict[str, Any]:
    """The engine's start-up report with the latest counters, hits and dispatches folded in."""
    readiness = state.readiness()
    started = state.client.started
    stats = state.client.stats
    report: dict[str, Any] = dict(started.report) if started is not None else {}
    body = {
        **report,
        "version": __version__,
        "served_name": state.settings.served_name,
        "phase": readiness.status,
        "ready": readiness.ready,
        "dispatch": dict.fromkeys(("FULL", "PIECEWISE", "NONE"), 0),
        "dispatch_detail": [],
    }
    if not readiness.ready and readiness.detail:
        body["detail"] = readiness.detail
    if not stats:
        return body
    body["counters"] = stats["counters"]
    body["dispatch_detail"] = [
        {"mode": mode, "size": size, "reason": reason, "count": count}
        for mode, size, reason, count in stats["dispatch"]
    ]
    for row in body["dispatch_detail"]:
        body["dispatch"][row["mode"]] += row["count"]
    if "graphs" in body:
        body["graphs"] = _with_hits(body["graphs"], stats["graph_hits"])
    return body


def _with_hits(graphs: dict[str, Any], rows: list[list[Any]]) -> dict[str, Any]:
    hits: Counter[tuple[str, int, bool]] = Counter()
    for mode, num_tokens, uniform_decode, count in rows:
        hits[mode, num_tokens, uniform_decode] += count
    descriptors = [
        {**d, "hits": hits[d["mode"], d["num_tokens"], d["uniform_decode"]]}
        for d in graphs.get("descriptors") or []
    ]
    return {**graphs, "descriptors": descriptors}


def _model(state: ServerState) -> dict[str, Any]:
    started = state.client.started
    return {
        "id": state.settings.served_name,
        "object": "model",
        "created": state.created,
        "owned_by": "kerf",
        "max_model_len": None if started is None else started.max_model_len,
    }
