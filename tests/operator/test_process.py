"""One operator process: quiet when nothing changes, in order when it is stopped."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.operator.conftest import OperatorProcess, Place
from tests.patience import PATIENCE

pytestmark = pytest.mark.control_plane


def test_an_idle_cluster_sees_no_write(
    place: Place, run_operator: Callable[..., OperatorProcess]
) -> None:
    metrics = _free_port()
    run_operator(place.name, "--resync-seconds=1", f"--metrics-port={metrics}")
    place.create(
        resources={"requests": {"cpu": 1, "memory": "1024Mi"}, "limits": {"memory": "0.5Ti"}}
    )
    place.wait_ready()
    place.wait_reason("Hit", "CacheHit")
    place.wait(
        "the last reconciles are over",
        lambda: _versions(place) == (_wait_for_looks(place, metrics) or _versions(place)),
    )
    before, requests = _versions(place), _requests(metrics)
    _wait_for_looks(place, metrics)
    assert _versions(place) == before
    after = _requests(metrics)
    assert after.pop("get") > requests.pop("get"), "the operator did not look"
    assert after == requests, "the operator wrote"


def _requests(port: int) -> dict[str, float]:
    """Requests of the operator by verb."""
    text = _read(port, "metrics").text
    found: dict[str, float] = {}
    for verb, count in re.findall(
        r'kerf_operator_api_requests_total\{.*verb="(\w+)"\} (\S+)', text
    ):
        found[verb] = found.get(verb, 0) + float(count)
    return found


def _read(port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=PATIENCE)


def _wait_for_looks(place: Place, metrics: int) -> None:
    """The operator has looked three times more at each of the two resources."""

    def looks() -> dict[str, float]:
        found = re.findall(
            r'kerf_operator_reconcile_total\{kind="(\w+)",result="ok"\} (\S+)',
            _read(metrics, "metrics").text,
        )
        return {kind: float(count) for kind, count in found}

    before = looks()
    place.wait(
        "several resyncs",
        lambda: all(count >= before.get(kind, 0) + 3 for kind, count in looks().items()),
    )


def _versions(place: Place) -> dict[str, str]:
    kinds = (
        "ModelDeployment",
        "CompileCache",
        "Job",
        "Deployment",
        "Service",
        "PersistentVolumeClaim",
        "Event",
    )
    return {
        f"{kind}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for kind in kinds
        for item in place.list(kind)
        if kind != "Event" or item.get("reportingComponent") == "kerf-operator"
    }


def test_moving_dispatch_counters_are_refreshed_at_the_resync_rate(
    place: Place, run_operator: Callable[..., OperatorProcess]
) -> None:
    run_operator(place.name, "--resync-seconds", "1")
    steps = {"count": 100}

    def moving(report: dict[str, Any]) -> dict[str, Any]:
        steps["count"] += 1
        return {**report, "dispatch": {"FULL": steps["count"], "PIECEWISE": 0, "NONE": 0}}

    place.behaviour.report = moving
    place.create()
    place.wait_ready()
    # Ready is the Deployment's word; what the pods report may reach the status one look later.
    place.wait_reason("Hit", "CacheHit")
    first = place.wait("a count", lambda: place.status("graphs", "dispatch", "FULL"))
    place.wait(
        "the counter in the status follows",
        lambda: (place.status("graphs", "dispatch", "FULL") or 0) > first,
    )


def test_the_operator_stops_in_order_when_it_is_asked_to(
    place: Place, run_operator: Callable[..., OperatorProcess]
) -> None:
    operator = run_operator(place.name)
    place.create()
    place.wait_ready()
    assert operator.stop() == 0


def test_an_api_server_that_restarts_loses_nothing(
    place: Place, run_operator: Callable[..., OperatorProcess]
) -> None:
    operator = run_operator(place.name)
    place.behaviour.hold_jobs = True
    place.create()
    place.wait_reason("Compiling")
    place.plane.restart_api_server()
    place.behaviour.hold_jobs = False
    place.wait_ready(seconds=90)
    assert operator.process.poll() is None
    assert len(place.list("Job")) == 1


def test_two_operators_at_once_duplicate_nothing(
    place: Place, run_operator: Callable[..., OperatorProcess]
) -> None:
    for _ in "12":
        run_operator(place.name)
    place.create(replicas=2)
    place.wait_ready()
    place.wait_reason("Hit", "CacheHit")
    assert len(place.list("Job")) == 1
    assert len(place.list("CompileCache")) == 1
    assert len(place.list("ReplicaSet")) == 1
    told = [
        e["reason"] for e in place.list("Event") if e["involvedObject"]["kind"] == "ModelDeployment"
    ]
    assert len(told) == len(set(told))


def test_the_ports_answer(place: Place, run_operator: Callable[..., OperatorProcess]) -> None:
    liveness, metrics = _free_port(), _free_port()
    run_operator(place.name, f"--liveness-port={liveness}", f"--metrics-port={metrics}")
    place.create()
    place.wait_ready()
    health = _read(liveness, "healthz")
    assert health.status_code == 200
    assert "queue" in health.json()
    text = _read(metrics, "metrics").text
    for name in (
        "kerf_operator_reconcile_total",
        "kerf_operator_reconcile_duration_seconds_bucket",
        "kerf_operator_queue_depth",
        "kerf_operator_active_workers",
        "kerf_operator_last_watch_event_timestamp_seconds",
        "kerf_operator_api_requests_total",
        "kerf_modeldeployment_info",
        "kerf_modeldeployment_condition",
        "kerf_modeldeployment_compile_jobs_total",
        "kerf_modeldeployment_compile_duration_seconds",
        "kerf_modeldeployment_cache_bytes",
        "kerf_modeldeployment_replicas",
    ):
        assert f"\n{name}{{" in text or f"\n{name} " in text, name
    place.api.delete_any("ModelDeployment", "smollm2", namespace=place.name)
    place.wait(
        "its series are gone",
        lambda: place.name not in _read(metrics, "metrics").text,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
