"""A ModelDeployment's life against a real API server, with a stand-in for the kubelet."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.conftest import OperatorProcess, Place

pytestmark = pytest.mark.control_plane


def test_a_new_deployment_compiles_once_and_becomes_ready(
    place: Place, operator: OperatorProcess
) -> None:
    place.create()
    place.wait_ready()
    assert place.wait_reason("Hit", "CacheHit")["status"] == "True"
    status = place.get()["status"]
    assert status["phase"] == "Ready"
    assert status["cache"]["state"] == "Ready"
    assert status["cache"]["sizeBytes"] == 1234567
    assert status["timings"]["compile"] == 12.5
    assert status["graphs"]["effectiveMode"] == "FULL_AND_PIECEWISE"
    assert status["graphs"]["captureSizes"] == [1, 2, 4]
    assert status["revisions"]["active"] == status["revisions"]["target"]
    assert len(place.list("Job")) == 1
    assert len(place.list("CompileCache")) == 1
    assert place.names("Deployment") == ["smollm2"]
    columns = place.plane.kubectl("get", "mdep", "smollm2", "-n", place.name).splitlines()
    assert columns[0].split() == [
        "NAME",
        "READY",
        "REASON",
        "MODEL",
        "MODE",
        "CACHE",
        "REPLICAS",
        "AGE",
    ]
    key = status["cache"]["key"]
    assert columns[1].split()[:7] == [
        "smollm2", "True", "Serving", "smollm2", "FULL_AND_PIECEWISE", key, "1",
    ]  # fmt: skip
    told = [
        event["reason"]
        for event in place.list("Event")
        if event["involvedObject"]["kind"] == "ModelDeployment"
    ]
    assert sorted(told) == ["CacheHit", "CompileStarted", "CompileSucceeded", "RolledOut"]


def test_kubectl_wait_and_scale_work(place: Place, operator: OperatorProcess) -> None:
    place.create()
    place.plane.kubectl(
        "wait", "--for=condition=Ready", "--timeout=60s", "-n", place.name, "mdep/smollm2"
    )
    place.plane.kubectl("scale", "--replicas=2", "-n", place.name, "mdep/smollm2")
    found = place.wait_ready()
    place.wait("2 pods are ready", lambda: place.status("readyReplicas") == 2)
    assert len(place.list("Job")) == 1
    assert found["status"]["selector"].startswith("kerf.dev/deployment=smollm2")
    hit = place.wait_reason("Hit", "CacheHit")
    place.wait("both pods prove a hit", lambda: place.status("cache", "hits") == 2)
    assert hit["status"] == "True"


def test_capture_sizes_roll_the_pods_without_a_job_and_dtype_compiles(
    place: Place, operator: OperatorProcess
) -> None:
    place.create()
    first = place.wait_ready()["status"]
    place.patch({"compilation": {"captureSizes": [1, 8]}})
    second = place.wait_ready()["status"]
    assert second["revisions"]["active"] != first["revisions"]["active"]
    assert second["cache"]["key"] == first["cache"]["key"]
    place.wait(
        "the new sizes are in force",
        lambda: place.status("graphs", "captureSizes") == [1, 8],
    )
    assert len(place.list("Job")) == 1

    place.behaviour.hold_jobs = True
    place.patch({"engine": {"dtype": "bfloat16"}})
    waiting = place.wait_reason("Compiling")
    assert waiting["status"] == "False"
    assert len(place.list("Job")) == 2
    conditions = place.conditions()
    assert conditions["Available"]["status"] == "True"
    assert conditions["Progressing"]["status"] == "True"
    template = place.get("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert template["kerf.dev/revision"] == second["revisions"]["active"]
    place.behaviour.hold_jobs = False
    third = place.wait_ready()["status"]
    assert third["cache"]["key"] != second["cache"]["key"]
    assert len(place.list("CompileCache")) == 2

    place.patch({"engine": {"dtype": "float32"}})
    back = place.wait_ready()["status"]
    assert back["cache"]["key"] == first["cache"]["key"]
    assert len(place.list("Job")) == 2


def test_level_0_needs_no_claim_no_cache_and_no_job(
    place: Place, operator: OperatorProcess
) -> None:
    place.create(compilation={"level": 0, "cudagraphMode": "NONE"})
    place.wait_ready()
    assert place.names("PersistentVolumeClaim") == ["models"]
    assert place.list("CompileCache") == []
    assert place.list("Job") == []
    assert place.conditions()["CacheHit"]["reason"] == "NotNeeded"


def test_two_deployments_with_the_same_key_share_one_cache_and_one_job(
    place: Place, operator: OperatorProcess
) -> None:
    place.create("first", replicas=0)
    place.wait_ready("first")
    shared = {"volume": {"existingClaim": "first-cache"}}
    place.create("second", cache=shared, compilation={"captureSizes": [2]})
    place.wait_ready("second")
    assert len(place.list("CompileCache")) == 1
    assert len(place.list("Job")) == 1
    cache = place.list("CompileCache")[0]
    assert {ref["name"] for ref in cache["metadata"]["ownerReferences"]} == {"first", "second"}
    place.api.delete_any("ModelDeployment", "first", namespace=place.name)
    place.wait(
        "the first owner is gone",
        lambda: len(place.list("CompileCache")[0]["metadata"]["ownerReferences"]) == 1,
    )
    assert place.names("CompileCache") == [cache["metadata"]["name"]]


def test_suspend_removes_the_pods_and_resuming_needs_no_job(
    place: Place, operator: OperatorProcess
) -> None:
    place.create()
    place.wait_ready()
    place.patch({"suspend": True})
    place.wait_reason("Suspended")
    place.wait("the pods are gone", lambda: not _serving(place))
    place.patch({"suspend": False})
    place.wait_ready()
    assert len(place.list("Job")) == 1


def _serving(place: Place) -> list[dict[str, Any]]:
    return place.api.list(
        "Pod", namespace=place.name, labels={"app.kubernetes.io/component": "serving"}
    )


@pytest.mark.parametrize("foreground", [False, True], ids=["background", "foreground"])
def test_deletion_leaves_nothing(place: Place, operator: OperatorProcess, foreground: bool) -> None:
    place.create()
    place.wait_ready()
    assert not place.get()["metadata"].get("finalizers"), "a finalizer could wedge the namespace"
    place.api.delete_any("ModelDeployment", "smollm2", namespace=place.name, foreground=foreground)
    kinds = ("ModelDeployment", "CompileCache", "Job", "Deployment", "ReplicaSet", "Pod", "Service")
    place.wait(
        "nothing is left",
        lambda: (
            not any(place.list(kind) for kind in kinds)
            and place.names("PersistentVolumeClaim") == ["models"]
        ),
    )


def test_a_retained_claim_outlives_the_resource_and_is_used_again(
    place: Place, operator: OperatorProcess
) -> None:
    place.create(deletionPolicy="Retain")
    place.wait_ready()
    uid = place.get("PersistentVolumeClaim", "smollm2-cache")["metadata"]["uid"]
    place.api.delete_any("ModelDeployment", "smollm2", namespace=place.name)
    place.wait("the pods are gone", lambda: not place.list("Pod"))
    place.create()
    place.wait_ready()
    assert place.get("PersistentVolumeClaim", "smollm2-cache")["metadata"]["uid"] == uid


def test_children_that_somebody_deletes_or_changes_are_put_back(
    place: Place, operator: OperatorProcess
) -> None:
    place.create()
    place.wait_ready()
    before = place.get("Service")["metadata"]["uid"]
    place.api.delete_any("Service", "smollm2", namespace=place.name)
    place.wait(
        "the Service is back",
        lambda: (
            (found := place.api.get("Service", "smollm2", namespace=place.name))
            and found["metadata"]["uid"] != before
        ),
    )
    place.api.merge(
        "Deployment", "smollm2", {"spec": {"strategy": {"rollingUpdate": {"maxUnavailable": "50%"}}}},
        namespace=place.name,
    )  # fmt: skip
    place.wait(
        "maxUnavailable is put back",
        lambda: place.get("Deployment")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 1,
    )


def test_a_cache_can_be_filled_by_hand_before_it_is_needed(
    place: Place, operator: OperatorProcess
) -> None:
    place.create("first", replicas=0)
    place.wait_ready("first")
    made = place.list("CompileCache")[0]
    spec = {key: value for key, value in made["spec"].items() if key != "tokens"}
    spec["claimName"] = "models"
    by_hand = {
        "apiVersion": made["apiVersion"],
        "kind": "CompileCache",
        "metadata": {"name": f"{spec['key']}-hand", "namespace": place.name},
        "spec": spec,
    }
    place.api.create(by_hand)
    place.wait(
        "the cache is Ready",
        lambda: (
            (place.get("CompileCache", f"{spec['key']}-hand").get("status") or {}).get("state")
            == "Ready"
        ),
    )
