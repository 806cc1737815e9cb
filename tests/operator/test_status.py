"""The status of a ModelDeployment folded from observations: conditions, reasons, counts, stable times."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import (
    NOW,
    bound_claim,
    compile_cache,
    deployment,
    observe,
    pod,
    resource,
    spec_of,
    target_of,
)
from tests.operator.statuses import condition, fold, report, serving

from kerf_operator.checks.pods import parse_result
from kerf_operator.observation import (
    ApplyFailure,
    DeploymentObservation,
    StorageClassFact,
)
from kerf_operator.status import (
    differs,
    only_volatile,
)


def test_a_served_deployment_is_ready_and_its_pods_prove_the_hit() -> None:
    status = fold(*serving(2))
    assert {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]} == {
        "Ready": ("True", "Serving"),
        "Available": ("True", "PodsReady"),
        "Progressing": ("False", "Complete"),
        "Degraded": ("False", "AsExpected"),
        "StorageReady": ("True", "Bound"),
        "Compiled": ("True", "Published"),
        "CacheHit": ("True", "Hit"),
        "Scheduled": ("True", "Scheduled"),
    }
    assert status["phase"] == "Ready"
    assert status["cache"]["hits"] == 2
    assert status["cache"]["misses"] == 0
    assert status["cache"]["sizeBytes"] == 1000
    assert status["timings"] == {"compile": 12.5, "load": 1.5, "capture": 0.5, "ready": 2.0}
    assert status["graphs"] == {
        "requestedMode": "FULL_AND_PIECEWISE",
        "effectiveMode": "FULL",
        "reasons": [],
        "captureSizes": [1, 2, 4],
        "capturedCount": 6,
        "memoryBytes": 100,
        "captureSeconds": 0.5,
        "dispatch": {"FULL": 10, "PIECEWISE": 2, "NONE": 0},
    }


def test_every_condition_is_about_the_observed_generation() -> None:
    obs, target = serving()
    obs.resource["metadata"]["generation"] = 7
    status = fold(obs, target)
    assert {c["observedGeneration"] for c in status["conditions"]} == {7}
    assert status["observedGeneration"] == 7


def test_transition_times_move_only_when_a_status_changes() -> None:
    obs, target = serving()
    first = fold(obs, target)
    for entry in first["conditions"]:
        entry["lastTransitionTime"] = "2020-01-01T00:00:00Z"
    again = replace(obs, resource={**obs.resource, "status": first})
    assert not differs(first, fold(again, target))
    gone = replace(again, pods=(), reports={})
    changed = {c["type"]: c["lastTransitionTime"] for c in fold(gone, target)["conditions"]}
    assert changed["Available"] == NOW
    assert changed["Compiled"] == "2020-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"cache": {"key": "k", "result": "miss", "reason": "ChecksumMismatch"}},
            "ChecksumMismatch",
        ),
        ({"cache": {"key": "other", "result": "hit"}}, "OtherKey"),
        ({"counters": {"inductor_compilations": 3}}, "CompiledAnyway"),
    ],
)
def test_a_hit_is_what_the_pod_proves(changes: dict[str, Any], reason: str) -> None:
    obs, target = serving(2)
    obs = replace(obs, reports={**obs.reports, "chat-1": report(target.key, **changes)})
    status = fold(obs, target)
    assert condition(status, "CacheHit") == ("False", reason)
    assert condition(status, "Ready") == ("True", "Serving")
    assert condition(status, "Degraded") == ("True", "CacheMiss")
    assert status["phase"] == "Degraded"
    assert (status["cache"]["hits"], status["cache"]["misses"]) == (1, 1)


def test_a_report_that_cannot_be_read_is_unknown_and_keeps_the_last_graphs() -> None:
    obs, target = serving()
    before = fold(obs, target)
    unread = replace(
        obs, resource={**obs.resource, "status": before}, reports={"chat-0": "connection refused"}
    )
    status = fold(unread, target)
    assert condition(status, "CacheHit") == ("Unknown", "ReportUnreadable")
    assert condition(status, "Ready") == ("True", "Serving")
    assert status["graphs"] == before["graphs"]


def test_pods_of_an_older_revision_prove_nothing_about_the_new_one() -> None:
    obs, target = serving()
    older = pod("chat-0", target=target_of(engine={"dtype": "float16"}))
    status = fold(replace(obs, pods=(older,)), target)
    assert condition(status, "CacheHit") == ("Unknown", "NoReadyPods")
    assert condition(status, "Available") == ("True", "PodsReady")


def test_differing_modes_and_reasons_of_pods_are_shown() -> None:
    obs, target = serving(2)
    change = {
        "field": "cudagraphMode",
        "requested": "FULL",
        "effective": "PIECEWISE",
        "reason": "AttentionBackendLimit",
        "message": "why",
    }
    other = report(target.key, effective={"mode": "PIECEWISE", "changes": [change, change]})
    graphs = fold(replace(obs, reports={**obs.reports, "chat-1": other}), target)["graphs"]
    assert graphs["effectiveMode"] == "FULL/PIECEWISE"
    assert graphs["reasons"] == [change]


@pytest.mark.parametrize(
    ("state", "reason", "phase"),
    [("Pending", "JobPending", "Pending"), ("Compiling", "Compiling", "Compiling")],
)
def test_while_compiling_it_progresses(state: str, reason: str, phase: str) -> None:
    obs, target = observe()
    cache = compile_cache(obs.resource, state, reason=reason, text="compiles")
    status = fold(replace(obs, claim=bound_claim(obs.resource), cache=cache), target)
    assert condition(status, "Ready") == ("False", reason)
    assert condition(status, "Progressing") == ("True", reason)
    assert condition(status, "Degraded")[0] == "False"
    assert status["phase"] == phase


def test_a_failed_compile_is_degraded_and_the_old_revision_stays_available() -> None:
    obs, _ = serving()
    changes = {"engine": {"dtype": "bfloat16"}}
    after = target_of(**changes)
    cache = compile_cache(
        resource(**changes),
        "Failed",
        spec=changes,
        reason="NumericalGateError",
        text="error 0.5",
        lastFailure={
            "component": "compile",
            "reason": "NumericalGateError",
            "message": "m",
            "exitCode": 4,
        },
    )
    moved = replace(obs, resource=resource(**changes), spec=spec_of(**changes), cache=cache)
    status = fold(moved, after)
    assert condition(status, "Ready") == ("False", "NumericalGateError")
    assert condition(status, "Progressing") == ("False", "NumericalGateError")
    assert condition(status, "Available") == ("True", "PodsReady")
    assert status["phase"] == "Degraded"
    assert status["lastFailure"]["exitCode"] == 4
    assert status["lastFailure"]["time"] == NOW


@pytest.mark.parametrize(
    ("container", "reason", "words"),
    [
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "denied"}}},
            "ImagePullFailed",
            "imagePullSecrets",
        ),
        (
            {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}},
            "OOMKilled",
            "memory",
        ),
        (
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {
                    "terminated": {
                        "exitCode": 3,
                        "message": json.dumps(
                            {"error": {"reason": "ModelError", "message": "truncated GGUF"}}
                        ),
                    }
                },
            },
            "ModelError",
            "truncated GGUF",
        ),
        (
            {"lastState": {"terminated": {"exitCode": 1, "message": "Traceback: boom"}}},
            "ContainerFailed",
            "boom",
        ),
        (
            {
                "state": {
                    "waiting": {"reason": "CreateContainerConfigError", "message": "no such key"}
                }
            },
            "ContainerConfigError",
            "no such key",
        ),
    ],
)
def test_what_is_wrong_with_a_pod_is_said(
    container: dict[str, Any], reason: str, words: str
) -> None:
    obs, target = serving()
    broken = pod("chat-0", target=target, ready=False, container=container)
    waiting = deployment(obs.resource, ready=0, spec={"replicas": 1})
    status = fold(replace(obs, pods=(broken,), reports={}, deployment=waiting), target)
    assert condition(status, "Ready") == ("False", reason)
    assert condition(status, "Degraded") == ("True", reason)
    assert words in status["lastFailure"]["message"]
    assert status["lastFailure"]["pod"] == "chat-0"
    assert status["phase"] == "Failed"


def test_what_is_wrong_with_a_download_is_said() -> None:
    obs, target = serving()
    error = {"reason": "Source", "message": "hub org/model@main: 401: the hub does not accept it"}
    broken = pod("chat-0", target=target, ready=False)
    broken["status"]["initContainerStatuses"] = [
        {
            "name": "download",
            "ready": False,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 3, "message": json.dumps({"error": error})}},
        }
    ]
    waiting = deployment(obs.resource, ready=0, spec={"replicas": 1})
    status = fold(replace(obs, pods=(broken,), reports={}, deployment=waiting), target)
    assert condition(status, "Ready") == ("False", "Source")
    assert "401: the hub does not accept it" in status["lastFailure"]["message"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("0/1 nodes are available: 1 Insufficient cpu.", "Unschedulable"),
        (
            "0/2 nodes are available: 1 node(s) had volume node affinity conflict.",
            "VolumeNodeBound",
        ),
        (
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            "ClaimPending",
        ),
        ('0/1 nodes are available: persistentvolumeclaim "models" not found.', "ClaimNotFound"),
    ],
)
def test_a_pod_without_a_node_is_waiting_and_not_failure(message: str, reason: str) -> None:
    obs, target = serving()
    waiting = pod(
        "chat-0", target=target, ready=False, scheduled=False, message=message, container={}
    )
    found = deployment(obs.resource, ready=0, spec={"replicas": 1})
    status = fold(replace(obs, pods=(waiting,), reports={}, deployment=found), target)
    assert condition(status, "Scheduled") == ("False", reason)
    assert condition(status, "Ready") == ("False", reason)
    assert condition(status, "Degraded") == ("False", "AsExpected")


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        (None, "ClaimPending"),
        (StorageClassFact("fast", False), "StorageClassNotFound"),
        (StorageClassFact(None, False), "NoDefaultStorageClass"),
        (StorageClassFact("fast", True, True), "WaitForFirstConsumer"),
    ],
)
def test_an_unbound_claim_is_explained(fact: StorageClassFact | None, reason: str) -> None:
    obs, target = observe()
    claim = bound_claim(obs.resource)
    claim["status"] = {"phase": "Pending"}
    status = fold(replace(obs, claim=claim, storage_class=fact), target)
    assert condition(status, "StorageReady") == ("False", reason)


def test_a_spec_that_does_not_parse_is_said_and_nothing_else_is_guessed() -> None:
    obs = DeploymentObservation(resource(), None, spec_error="engine.dtype: unknown")
    status = fold(obs, None)
    assert condition(status, "Ready") == ("False", "InvalidSpec")
    assert condition(status, "Compiled")[0] == "Unknown"
    assert status["phase"] == "Failed"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ApplyFailure("Service", "chat", 403, "Forbidden", "exceeded quota: q"), "QuotaExceeded"),
        (ApplyFailure("PersistentVolumeClaim", "c", 422, "Invalid", "immutable"), "ClaimRefused"),
        (ApplyFailure("Service", "chat", 422, "Invalid", "port"), "ApplyFailed"),
    ],
)
def test_a_refused_write_is_a_reason(failure: ApplyFailure, reason: str) -> None:
    obs, target = observe()
    status = fold(obs, target, failure)
    assert condition(status, "Ready") == ("False", reason)
    assert condition(status, "Degraded") == ("True", reason)


def test_a_name_that_somebody_else_uses_is_said() -> None:
    obs, target = serving()
    foreign = {"kind": "Service", "metadata": {"name": "chat"}}
    status = fold(replace(obs, service=foreign), target)
    assert condition(status, "Ready") == ("False", "NameTaken")


def test_suspended_and_scaled_to_zero_are_told_apart() -> None:
    obs, _ = serving()
    changes = {"suspend": True}
    suspended = replace(obs, resource=resource(**changes), spec=spec_of(**changes))
    status = fold(suspended, target_of(**changes))
    assert condition(status, "Ready") == ("False", "Suspended")
    assert status["phase"] == "Suspended"
    empty, target = serving(0)
    assert condition(fold(empty, target), "Ready") == ("True", "ScaledToZero")


def test_an_old_failure_is_kept_and_keeps_its_time() -> None:
    obs, target = serving()
    old = {
        "component": "serving",
        "reason": "OOMKilled",
        "message": "m",
        "time": "2020-01-01T00:00:00Z",
    }
    remembered = replace(obs, resource={**obs.resource, "status": {"lastFailure": old}})
    assert fold(remembered, target)["lastFailure"] == old


def test_moving_dispatch_counters_alone_are_volatile() -> None:
    obs, target = serving()
    old = fold(obs, target)
    moved = fold(
        replace(obs, reports={"chat-0": report(target.key, dispatch={"FULL": 99})}), target
    )
    assert differs(old, moved)
    assert only_volatile(old, moved)
    gone = fold(replace(obs, pods=()), target)
    assert not only_volatile(old, gone)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", "[" * 4096, "9" * 5000], ids=lambda text: text[:9]
)
def test_a_termination_message_that_is_no_document_says_nothing(text: str) -> None:
    assert parse_result(text) == {}
