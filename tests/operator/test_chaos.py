"""An operator that is killed after any of its calls and started again ends in the same state.

A first start makes about 30 calls before its first write (discovery, lists, watches, the first look); the whole
story has about 20 writes, and between two of them only reads, which leave nothing behind.  So the first 30 calls
are tried in turn, and then every write.

Many namespaces, each with its own ModelDeployment and its own operator, so that every kill falls into the
same story; several at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hack.cluster import ControlPlane
from tests.operator.conftest import Place, operator_arguments
from tests.operator.proxy import CountingProxy
from tests.operator.zygote import Zygote

from kerf_operator.client import connect

pytestmark = [pytest.mark.control_plane, pytest.mark.slow, pytest.mark.timeout(900)]

AT_A_TIME = 4
CHILDREN = (
    "CompileCache",
    "Job",
    "Deployment",
    "ReplicaSet",
    "Pod",
    "Service",
    "HorizontalPodAutoscaler",
)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    found = Zygote()
    yield found
    found.close()


def every_call(method: str, path: str) -> bool:
    return True


def writes_only(method: str, path: str) -> bool:
    return method != "GET"


@pytest.mark.parametrize(
    ("counts", "kills"),
    [(every_call, range(1, 31)), (writes_only, range(1, 21))],
    ids=["after each of the first 30 calls", "after each of the 20 writes"],
)
def test_a_killed_operator_continues_where_it_was(
    counts: Callable[[str, str], bool],
    kills: range,
    make_place: Callable[[], Place],
    zygote: Zygote,
    control_plane: ControlPlane,
    tmp_path: Path,
) -> None:
    places = {kill: make_place() for kill in kills}

    def story(kill: int) -> dict[str, Any]:
        place = places[kill]
        place.create()
        proxy = CountingProxy(connect(control_plane.kubeconfig), counts=counts, last=kill)
        config = proxy.write_kubeconfig(tmp_path / f"{place.name}.kubeconfig")
        log = tmp_path / f"{place.name}.log"
        first = zygote.run(operator_arguments(place.name, config), log)
        proxy.kill = first.kill
        try:
            place.wait(
                f"call {kill} has been made", lambda: proxy.killed.is_set() or settled(place)
            )
        finally:
            first.kill()
            proxy.close()
        second = zygote.run(operator_arguments(place.name, control_plane.kubeconfig), log)
        try:
            place.wait_ready()
            place.wait_reason("Hit", "CacheHit")
            place.wait("told of the roll-out", lambda: settled(place))
            return final_state(place)
        finally:
            second.kill()

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        states = dict(zip(kills, pool.map(story, kills), strict=True))
    expected = states[kills[0]]
    assert expected["Job"] == ["Complete"]
    assert expected["jobs run"] == 1
    assert {kill: state for kill, state in states.items() if state != expected} == {}

    for place in places.values():
        place.api.delete_any("ModelDeployment", "smollm2", namespace=place.name)
    for place in places.values():
        place.wait("nothing is left", lambda place=place: not leftovers(place), 90)


def settled(place: Place) -> bool:
    """The story is over; writes that came together may have made it a little shorter than 20."""
    told = {"RolledOut", "CacheHit"} <= set(events(place))
    return told and place.conditions().get("CacheHit", {}).get("status") == "True"


def events(place: Place) -> list[str]:
    """What was told about the ModelDeployment, sorted."""
    return sorted(
        event["reason"]
        for event in place.list("Event")
        if event["involvedObject"]["kind"] == "ModelDeployment"
    )


def final_state(place: Place) -> dict[str, Any]:
    """Everything that must be the same however the operator got there."""
    status = place.get()["status"]
    return {
        "Job": [place_condition(job) for job in place.list("Job")],
        "jobs run": place.stand_in.jobs_run[place.name],
        "children": {kind: len(place.list(kind)) for kind in CHILDREN},
        "claims": place.names("PersistentVolumeClaim"),
        "caches": place.names("CompileCache"),
        "template": place.get("Deployment")["spec"]["template"],
        "replicas": place.get("Deployment")["spec"]["replicas"],
        "conditions": {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]},
        "cache": {k: v for k, v in status["cache"].items() if k != "hits"},
        "phase": status["phase"],
        "told": sorted(set(events(place)) - {"CompileStarted"}),
        "told twice": [reason for reason in set(events(place)) if events(place).count(reason) > 1],
    }


def place_condition(job: dict[str, Any]) -> str:
    return next(
        (
            c["type"]
            for c in job["status"].get("conditions", [])
            if c["type"] in ("Complete", "Failed")
        ),
        "Running",
    )


def leftovers(place: Place) -> list[str]:
    """What is still there after the deletion."""
    found = [f"{kind}/{name}" for kind in CHILDREN for name in place.names(kind)]
    return found + [name for name in place.names("PersistentVolumeClaim") if name != "models"]
