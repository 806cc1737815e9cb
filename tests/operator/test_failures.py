"""What people meet: every failure is surfaced with a reason and with what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.operator.conftest import OperatorProcess, Place

pytestmark = pytest.mark.control_plane


def test_a_failed_gate_holds_the_rollout_and_a_token_tries_again(
    place: Place, operator: OperatorProcess
) -> None:
    place.behaviour.job_exit = 4
    place.behaviour.job_message = json.dumps(
        {
            "error": {
                "reason": "NumericalGateError",
                "message": "max absolute error 0.5 is above 0.001",
                "exitCode": 4,
            }
        }
    )
    place.create()
    ready = place.wait_reason("NumericalGateError")
    assert "0.5" in ready["message"]
    assert place.conditions()["Degraded"]["status"] == "True"
    status = place.get()["status"]
    assert status["phase"] == "Failed"
    assert status["lastFailure"]["component"] == "compile"
    assert status["lastFailure"]["exitCode"] == 4
    assert place.list("Deployment") == []
    assert place.stand_in.jobs_run[place.name] == 1, (
        "an error that another try cannot mend was tried again"
    )
    events = {event["reason"] for event in place.list("Event")}
    assert "CompileFailed" in events

    place.behaviour.job_exit, place.behaviour.job_message = 0, None
    place.patch({"compile": {"token": "again"}})
    place.wait_ready()
    assert place.conditions()["Degraded"]["status"] == "False"


def test_a_job_out_of_memory_says_so_and_more_memory_tries_again(
    place: Place, operator: OperatorProcess
) -> None:
    place.behaviour.job_exit, place.behaviour.job_reason = 137, "OOMKilled"
    place.behaviour.job_message = ""
    place.create(compile={"job": {"backoffLimit": 0}})
    ready = place.wait_reason("OOMKilled")
    assert "memory" in ready["message"]
    place.behaviour.job_exit, place.behaviour.job_reason, place.behaviour.job_message = (
        0,
        None,
        None,
    )
    place.patch({"compile": {"job": {"resources": {"limits": {"memory": "8Gi"}}}}})
    place.wait_ready()


HUB = {"source": {"huggingFace": {"repo": "org/model"}}}


def test_a_hub_that_refuses_ends_the_job_at_once_and_a_secret_starts_another(
    place: Place, operator: OperatorProcess
) -> None:
    message = "hub org/model@main: 401: the hub does not accept the token"
    place.behaviour.download_exit = 3
    place.behaviour.download_message = json.dumps(
        {"error": {"reason": "Source", "message": message, "exitCode": 3}}
    )
    place.create(model=HUB)
    assert place.wait_reason("Source")["message"].startswith(message)
    assert place.conditions()["Degraded"]["status"] == "True"
    assert place.get()["status"]["lastFailure"]["exitCode"] == 3
    assert place.stand_in.jobs_run[place.name] == 1, "the Job did not end at once"

    place.behaviour.download_exit = 0
    token = {"tokenSecretRef": {"name": "hub"}}
    place.patch({"model": {"source": {"huggingFace": token}}})  # another Secret is another Job
    place.wait_ready()


def test_an_image_that_cannot_be_pulled_is_named(place: Place, operator: OperatorProcess) -> None:
    place.behaviour.image_error = "manifest unknown"
    place.create()
    ready = place.wait_reason("ImagePullFailed")
    assert "registry.test/kerf-runtime:1" in ready["message"]
    assert "runtimeImage" in ready["message"]
    place.behaviour.image_error = None
    place.wait_ready()


def test_pods_that_fit_no_node_are_explained(place: Place, operator: OperatorProcess) -> None:
    place.create(
        resources={"requests": {"cpu": 9999}},
        compile={"job": {"resources": {"requests": {"cpu": "1m"}}}},
    )
    ready = place.wait_reason("Unschedulable")
    assert "Insufficient cpu" in ready["message"]
    assert place.conditions()["Scheduled"]["status"] == "False"
    assert place.conditions()["Degraded"]["status"] == "False", "waiting is not failure"


def test_a_quota_is_explained(place: Place, operator: OperatorProcess) -> None:
    place.api.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "none", "namespace": place.name},
            "spec": {"hard": {"pods": "0"}},
        }
    )
    place.wait("the quota is in force", lambda: place.list("ResourceQuota")[0].get("status"))
    place.create()
    ready = place.wait_reason("QuotaExceeded")
    assert "exceeded quota" in ready["message"]


def test_a_missing_storage_class_is_named(place: Place, operator: OperatorProcess) -> None:
    place.create(cache={"volume": {"claimTemplate": {"storageClassName": "missing"}}})
    storage = place.wait_reason("StorageClassNotFound", "StorageReady")
    assert "missing" in storage["message"]


def test_a_missing_claim_is_named_and_used_once_it_is_there(
    place: Place, operator: OperatorProcess
) -> None:
    place.create(cache={"volume": {"existingClaim": "shared"}})
    ready = place.wait_reason("ClaimNotFound")
    assert "existingClaim" in ready["message"]
    place.api.create(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "shared", "namespace": place.name},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
    )
    place.wait_ready()


def test_a_pod_that_missed_the_cache_serves_and_is_reported(
    place: Place, operator: OperatorProcess
) -> None:
    def missed(report: dict[str, Any]) -> dict[str, Any]:
        cache = {
            **report["cache"],
            "result": "miss",
            "reason": "ChecksumMismatch",
            "message": "piece 1",
        }
        return {**report, "cache": cache, "counters": {"inductor_compilations": 3}}

    place.behaviour.report = missed
    place.create()
    hit = place.wait_reason("ChecksumMismatch", "CacheHit")
    assert hit["status"] == "False"
    place.wait_ready()
    assert place.conditions()["Degraded"]["reason"] == "CacheMiss"
    assert place.get()["status"]["cache"]["misses"] == 1
    assert "CacheMiss" in {event["reason"] for event in place.list("Event")}


def test_a_pod_that_claims_a_hit_and_compiled_is_not_believed(
    place: Place, operator: OperatorProcess
) -> None:
    place.behaviour.report = lambda report: {**report, "counters": {"dynamo_traces": 1}}
    place.create()
    assert place.wait_reason("CompiledAnyway", "CacheHit")["status"] == "False"
