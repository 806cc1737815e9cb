"""Which keys an event concerns, how looks are repeated, and the metrics they leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import generate_latest
from tests.patience import until

from kerf_operator.api.names import labels
from kerf_operator.controller import Controller
from kerf_operator.errors import ApiError, OperatorError
from kerf_operator.metrics import Metrics
from kerf_operator.reconcile import Key, Outcome

pytestmark = pytest.mark.anyio

MDEP = Key("ModelDeployment", "team", "chat")
CACHE = Key("CompileCache", "team", "k-1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Script:
    """A reconciler that does what the test says."""

    def __init__(self, act: Callable[[Key], Outcome]) -> None:
        self.act = act
        self.looks: list[Key] = []

    def reconcile(self, key: Key) -> Outcome:
        self.looks.append(key)
        return self.act(key)


def controller_of(act: Callable[[Key], Outcome]) -> tuple[Controller, Script, Metrics]:
    script, metrics = Script(act), Metrics()
    return Controller(script, metrics, workers=2), script, metrics  # type: ignore[arg-type]


def meta(name: str, **found: str) -> dict[str, Any]:
    return {"namespace": "team", "name": name, "labels": found}


@pytest.mark.parametrize(
    ("kind", "metadata", "expected"),
    [
        ("ModelDeployment", meta("chat"), {MDEP}),
        ("CompileCache", meta("k-1"), {CACHE}),
        ("Pod", meta("p", **labels("serving", deployment="chat")), {MDEP}),
        ("Job", meta("j", **labels("compile", cache="k-1")), {CACHE}),
        ("Pod", meta("p"), set()),
    ],
)
async def test_an_event_wakes_whom_it_concerns(
    kind: str, metadata: Any, expected: set[Key]
) -> None:
    controller, _, _ = controller_of(lambda key: Outcome(60))
    assert controller.concerned(kind, metadata) == expected


async def test_who_said_that_it_is_interested_is_woken_too() -> None:
    controller, script, _ = controller_of(lambda key: Outcome(60, frozenset({CACHE})))
    controller.start()
    controller.wake("ModelDeployment", meta("chat"))
    await until(lambda: script.looks == [MDEP])
    await until(lambda: controller.concerned("CompileCache", meta("k-1")) == {CACHE, MDEP})
    await controller.stop()


async def test_an_object_that_is_gone_is_forgotten() -> None:
    controller, script, _ = controller_of(lambda key: Outcome(0.01, frozenset({CACHE}), gone=True))
    controller.start()
    controller.wake("ModelDeployment", meta("chat"))
    await until(lambda: script.looks == [MDEP])
    await asyncio.sleep(0.1)
    assert script.looks == [MDEP]
    assert controller.concerned("CompileCache", meta("k-1")) == {CACHE}
    await controller.stop()


@pytest.mark.parametrize(
    "error",
    [
        ApiError(verb="get", target="/", code=503, reason="ServiceUnavailable", message="m"),
        OperatorError("ours"),
        RuntimeError("a bug"),
    ],
    ids=["API", "ours", "bug"],
)
async def test_a_failed_look_is_repeated_and_counted(error: Exception) -> None:
    def act(key: Key) -> Outcome:
        if len(script.looks) < 2:
            raise error
        return Outcome(60)

    controller, script, metrics = controller_of(act)
    controller.start()
    controller.wake("ModelDeployment", meta("chat"))
    await until(lambda: len(script.looks) == 2)
    assert controller.health()["active"] <= 1
    await controller.stop()
    text = generate_latest(metrics.registry).decode()
    assert 'kerf_operator_reconcile_total{kind="ModelDeployment",result="error"} 1.0' in text
    assert "kerf_operator_reconcile_errors_total" in text


async def test_a_resource_that_nothing_happens_to_is_looked_at_again() -> None:
    controller, script, _ = controller_of(lambda key: Outcome(0.02))
    controller.start()
    controller.wake("ModelDeployment", meta("chat"))
    await until(lambda: len(script.looks) >= 3)
    await controller.stop()


async def test_ended_workers_are_not_healthy() -> None:
    controller, _, _ = controller_of(lambda key: Outcome(60))
    controller.start()
    controller.health()
    await controller.stop()
    with pytest.raises(OperatorError, match="workers have ended"):
        controller.health()


async def test_series_of_a_deployment_appear_and_go_with_it() -> None:
    metrics = Metrics()
    metrics.deployment(
        "team",
        "chat",
        {
            "servedName": "chat",
            "replicas": 2,
            "readyReplicas": 1,
            "conditions": [{"type": "Ready", "status": "True"}],
            "cache": {"key": "k", "sizeBytes": 5, "lastCompileSeconds": 2.5},
            "graphs": {"requestedMode": "FULL", "effectiveMode": "FULL"},
            "revisions": {"active": "r"},
        },
    )
    metrics.compile_finished("team", "chat", result="succeeded")
    text = generate_latest(metrics.registry).decode()
    series = 'namespace="team"'
    for name in (
        "info",
        "condition",
        "replicas",
        "cache_bytes",
        "compile_duration_seconds",
        "compile_jobs_total",
    ):
        assert any(
            line.startswith(f"kerf_modeldeployment_{name}{{") and series in line
            for line in text.splitlines()
        ), name
    metrics.forget("team", "chat")
    assert series not in generate_latest(metrics.registry).decode()
