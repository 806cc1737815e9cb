"""Events of a ModelDeployment: told once, when something changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.operator.builders import (
    bound_claim,
    compile_cache,
    observe,
    resource,
)
from tests.operator.statuses import fold, serving

from kerf_operator.status import (
    deployment_events,
)


class TestEvents:
    """Told once, when something changed."""

    def told(self, before: dict[str, Any] | None, after: dict[str, Any]) -> list[str]:
        found = {**resource(), "status": before or {}}
        return [event.reason for event in deployment_events(found, after)]

    def test_the_story_of_a_deployment(self) -> None:
        obs, target = observe()
        claim = bound_claim(obs.resource)
        compiling = fold(
            replace(obs, claim=claim, cache=compile_cache(obs.resource, "Compiling")), target
        )
        assert self.told(None, compiling) == ["CompileStarted"]
        published = fold(
            replace(obs, claim=claim, cache=compile_cache(obs.resource, "Ready")), target
        )
        assert self.told(compiling, published) == ["CompileSucceeded"]
        served = fold(*serving())
        assert self.told(published, served) == ["RolledOut", "CacheHit"]
        assert self.told(served, served) == []

    def test_a_failure_is_told_once_and_not_twice_in_other_words(self) -> None:
        obs, target = observe()
        failed = fold(
            replace(
                obs,
                claim=bound_claim(obs.resource),
                cache=compile_cache(obs.resource, "Failed", reason="JobFailed", text="it failed"),
            ),
            target,
        )
        assert self.told(None, failed) == ["CompileFailed"]
        assert self.told(failed, failed) == []

    def test_the_same_event_has_the_same_name(self) -> None:
        served = fold(*serving())
        first, second = (
            [event.event_name(resource()) for event in deployment_events(resource(), served)]
            for _ in "12"
        )
        assert first == second
        assert len(set(first)) == len(first)
