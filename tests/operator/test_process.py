"""One operator process: quiet when nothing changes, in order when it is stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.conftest import OperatorProcess, Place

pytestmark = pytest.mark.control_plane


def test_an_idle_cluster_sees_no_write(
    place: Place, run_operator: Callable[..., OperatorProcess]
) -> None:
    operator = run_operator(place.name, "--resync-seconds", "1")
    place.create(
        resources={"requests": {"cpu": 1, "memory": "1024Mi"}, "limits": {"memory": "0.5Ti"}}
    )
    place.wait_ready()
    place.wait_reason("Hit", "CacheHit")
    place.wait(
        "the last reconciles are over",
        lambda: _versions(place) == (_pause(place) or _versions(place)),
    )
    before, size = _versions(place), operator.log.stat().st_size
    looks = place.stand_in.steps
    place.wait("about 4 s pass, several resyncs", lambda: place.stand_in.steps > looks + 35)
    assert _versions(place) == before
    assert b"apply" not in operator.log.read_bytes()[size:]


def _pause(place: Place) -> None:
    steps = place.stand_in.steps
    place.wait("a second passes", lambda: place.stand_in.steps > steps + 12)


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
    first = place.wait_ready()["status"]["graphs"]["dispatch"]["FULL"]
    place.wait(
        "the counter in the status follows",
        lambda: place.get()["status"]["graphs"]["dispatch"]["FULL"] > first,
    )


def test_the_operator_stops_in_order_when_it_is_asked_to(
    place: Place, run_operator: Callable[..., OperatorProcess]
) -> None:
    operator = run_operator(place.name)
    place.create()
    place.wait_ready()
    assert operator.stop() == 0
