"""The status of both kinds.  The models exist for the CRD schema and its ``kubectl explain`` texts.

``kerf_operator.status`` builds plain dictionaries of this shape; a test validates them against these
models, so the two cannot drift apart.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kerf_runtime.config import ConfigModel

__all__ = ["CacheState", "CompileCacheStatus", "Condition", "ModelDeploymentStatus"]

Text = Annotated[str, Field(max_length=32768)]
Name = Annotated[str, Field(max_length=316)]
Count = Annotated[int, Field(ge=0)]


class ConditionValue(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ConfigModel):
    """One aspect of the current state, as Kubernetes defines conditions."""

    type: Name = Field(description="Name of the condition.")
    status: ConditionValue = Field(description="True, False or Unknown.")
    reason: Annotated[str, Field(max_length=1024)] = Field(
        description="CamelCase reason for the status, for programs."
    )
    message: Text = Field(description="What is the case and what to do about it, for people.")
    last_transition_time: Name = Field(description="When the status last changed, RFC 3339.")
    observed_generation: int = Field(
        ge=0, description="The metadata.generation that the condition is about."
    )


class CacheState(StrEnum):
    """Where a CompileCache stands."""

    PENDING = "Pending"
    COMPILING = "Compiling"
    READY = "Ready"
    FAILED = "Failed"


class Failure(ConfigModel):
    """The most recent failure that was seen."""

    component: Name = Field(description="What failed: compile, serving, storage or operator.")
    reason: Name = Field(description="CamelCase reason.")
    message: Text = Field(description="What happened and what to do about it.")
    exit_code: int | None = Field(None, description="Exit code of the container, if one ended.")
    pod: Name | None = Field(None, description="Pod in which it happened.")
    time: Name | None = Field(None, description="When it was first seen, RFC 3339.")


class CacheStatus(ConfigModel):
    """The compile cache that this deployment uses."""

    key: Name | None = Field(None, description="Cache key that the current spec needs.")
    name: Name | None = Field(None, description="Name of the CompileCache object.")
    path: Name | None = Field(None, description="Folder of the key on the claim.")
    claim: Name | None = Field(None, description="Claim that holds the cache.")
    state: CacheState | None = Field(
        None, description="State of the CompileCache: Pending, Compiling, Ready or Failed."
    )
    size_bytes: Count | None = Field(None, description="Size of the published artifacts in bytes.")
    factors: dict[str, object] | None = Field(
        None, description="Declared factors of the key: a change of one of them needs a new cache."
    )
    hits: Count | None = Field(
        None,
        description="Ready pods that loaded every artifact from the cache and compiled nothing.",
    )
    misses: Count | None = Field(None, description="Ready pods that could not use the cache.")
    last_compile_seconds: float | None = Field(
        None, description="Seconds that the last compile Job took."
    )


class GraphReason(ConfigModel):
    """One difference between the requested and the effective configuration."""

    field: Name = Field(description="Field that differs.")
    requested: Name = Field(description="What was asked for.")
    effective: Name = Field(description="What is in force.")
    reason: Name = Field(description="Reason code.")
    message: Text = Field(description="Why, for people.")


class Dispatch(ConfigModel):
    """Model steps by the mode they ran in, summed over the Ready pods; refreshed about once a minute."""

    FULL: Count = Field(
        0, alias="FULL", description="Steps replayed as one whole graph. Default 0."
    )
    PIECEWISE: Count = Field(
        0, alias="PIECEWISE", description="Steps replayed piece by piece. Default 0."
    )
    NONE: Count = Field(0, alias="NONE", description="Steps that ran without a graph. Default 0.")


class GraphStatus(ConfigModel):
    """Recorded graphs, as the Ready pods of the current revision report them."""

    requested_mode: Name | None = Field(None, description="cudagraphMode of the spec.")
    effective_mode: Name | None = Field(
        None, description="Mode in force; several, joined by /, while pods differ."
    )
    reasons: Annotated[list[GraphReason], Field(max_length=32)] | None = Field(
        None, description="Why the effective configuration differs from the requested one."
    )
    capture_sizes: Annotated[list[int], Field(max_length=256)] | None = Field(
        None, description="Sizes, in tokens, that have a recorded graph."
    )
    captured_count: Count | None = Field(None, description="Recorded graphs per pod (the fewest).")
    memory_bytes: Count | None = Field(
        None, description="Memory of the graphs per pod in bytes (the most)."
    )
    capture_seconds: float | None = Field(
        None, description="Seconds that recording took per pod (the longest)."
    )
    dispatch: Dispatch | None = Field(None, description="Model steps by mode.")


class Revisions(ConfigModel):
    """Revisions of the pod template."""

    active: Name | None = Field(None, description="Revision that the Deployment runs.")
    target: Name | None = Field(None, description="Revision that the spec asks for.")


class Timings(ConfigModel):
    """Seconds of the phases from spec to ready; of the slowest pod where pods have them."""

    compile: float | None = Field(None, description="The compile Job, in seconds.")
    load: float | None = Field(None, description="Loading weights and artifacts, in seconds.")
    capture: float | None = Field(None, description="Recording graphs, in seconds.")
    ready: float | None = Field(None, description="Process start to ready, in seconds.")


class ModelDeploymentStatus(ConfigModel):
    """What is the case, as the operator last saw it."""

    observed_generation: int | None = Field(
        None, ge=0, description="The metadata.generation that this status is about."
    )
    phase: Name | None = Field(
        None,
        description=(
            "Summary for people only: Pending, Compiling, RollingOut, Ready, Degraded, Failed or "
            "Suspended. Programs read conditions."
        ),
    )
    conditions: Annotated[list[Condition], Field(max_length=16)] | None = Field(
        None,
        description=(
            "Ready, Available, Progressing, Degraded, StorageReady, Compiled, CacheHit, Scheduled."
        ),
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
    served_name: Name | None = Field(None, description="Model name in the HTTP API.")
    replicas: Count | None = Field(None, description="Pods that exist.")
    ready_replicas: Count | None = Field(None, description="Pods that serve.")
    selector: Name | None = Field(None, description="Label selector of the pods, for autoscalers.")
    cache: CacheStatus | None = Field(None, description="The compile cache in use.")
    graphs: GraphStatus | None = Field(None, description="Recorded graphs and how steps use them.")
    revisions: Revisions | None = Field(None, description="Active and target revision.")
    timings: Timings | None = Field(None, description="Seconds of the phases from spec to ready.")
    last_failure: Failure | None = Field(None, description="The most recent failure.")


class CompileCacheStatus(ConfigModel):
    """What is the case, as the operator last saw it."""

    observed_generation: int | None = Field(
        None, ge=0, description="The metadata.generation that this status is about."
    )
    state: CacheState | None = Field(
        None,
        description=(
            "Pending: waits for its claim or its Job. Compiling: the Job runs. Ready: published on "
            "the claim. Failed: the Job gave up; nothing was published."
        ),
    )
    conditions: Annotated[list[Condition], Field(max_length=8)] | None = Field(
        None,
        description="Ready: the artifacts are published on the claim.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
    message: Text | None = Field(None, description="The message of condition Ready.")
    claim_uid: Name | None = Field(
        None, description="Identity of the claim; a claim that was replaced needs a new Job."
    )
    job_name: Name | None = Field(None, description="The compile Job of the current attempt.")
    result: Name | None = Field(
        None, description="What the Job found: published, or hit when the key was there already."
    )
    size_bytes: Count | None = Field(None, description="Size of the published artifacts in bytes.")
    seconds: float | None = Field(None, description="Seconds that the compile Job took.")
    gate: dict[str, object] | None = Field(
        None, description="Result of the numerical gate: compiled output against eager output."
    )
    counters: dict[str, int] | None = Field(
        None, max_length=64, description="What the compiler did: graphs, pieces, compilations."
    )
    users: Annotated[list[Name], Field(max_length=256)] | None = Field(
        None, description="ModelDeployments that use this cache."
    )
    last_failure: Failure | None = Field(None, description="The most recent failure.")
