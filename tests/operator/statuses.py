"""Observations that are folded into statuses, and how tests look at the result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.operator.builders import (
    NOW,
    bound_claim,
    compile_cache,
    deployment,
    observe,
    pod,
    service,
)

from kerf_operator.api import ModelDeploymentStatus
from kerf_operator.observation import (
    ApplyFailure,
    DeploymentObservation,
)
from kerf_operator.render import Target
from kerf_operator.runtime_report import RuntimeReport, parse_report
from kerf_operator.status import (
    fold_deployment,
)


def report(key: str | None, **changes: Any) -> RuntimeReport:
    document = {
        "cache": {"key": key, "result": "hit", "reason": "Hit"},
        "counters": {"dynamo_traces": 0, "inductor_compilations": 0},
        "effective": {"requested_mode": "FULL", "mode": "FULL", "capture_sizes": [1, 2, 4]},
        "graphs": {"captured": 6, "memory_bytes": 100, "capture_seconds": 0.5},
        "dispatch": {"FULL": 5, "PIECEWISE": 1, "NONE": 0},
        "startup": {"weights": 1.0, "cache_load": 0.5, "capture": 0.5},
        **changes,
    }
    return parse_report(document)


def serving(pods: int = 1, **changes: Any) -> tuple[DeploymentObservation, Target]:
    """A ModelDeployment that is served by ``pods`` pods with a published cache."""
    spec = {"replicas": pods, **changes}
    obs, target = observe(**spec)
    owner = obs.resource
    cache = compile_cache(owner, "Ready", spec=spec, sizeBytes=1000, seconds=12.5)
    found = [pod(f"chat-{index}", target=target) for index in range(pods)]
    return (
        replace(
            obs,
            claim=bound_claim(owner),
            cache=cache,
            owned_caches=(cache,),
            deployment=deployment(owner, ready=pods, replicas=pods, spec=spec),
            service=service(owner),
            pods=tuple(found),
            reports={p["metadata"]["name"]: report(target.key) for p in found},
        ),
        target,
    )


def fold(
    obs: DeploymentObservation, target: Target | None, *failures: ApplyFailure
) -> dict[str, Any]:
    status = fold_deployment(obs, target, failures, now=NOW)
    ModelDeploymentStatus.model_validate(status)  # the shape that the CRD promises
    return status


def condition(status: dict[str, Any], kind: str) -> tuple[str, str]:
    found = next(c for c in status["conditions"] if c["type"] == kind)
    assert found["message"], f"{kind} says nothing"
    return found["status"], found["reason"]
