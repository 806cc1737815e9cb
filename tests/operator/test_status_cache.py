"""The status and the events of a CompileCache."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tests.operator.builders import (
    CLAIM_UID,
    NOW,
    bound_claim,
    compile_cache,
    job,
    pod,
    resource,
)

from kerf_operator.api import CompileCacheStatus
from kerf_operator.observation import (
    ApplyFailure,
    CacheObservation,
)
from kerf_operator.plan import plan_cache
from kerf_operator.status import (
    cache_events,
    fold_cache,
)


class TestCacheStatus:
    """The status of a CompileCache."""

    claim = bound_claim(resource())

    def fold(self, obs: CacheObservation, *failures: ApplyFailure) -> dict[str, Any]:
        status = fold_cache(obs, plan_cache(obs), failures, now=NOW)
        CompileCacheStatus.model_validate(status)
        return status

    def succeeded(self, message: str) -> dict[str, Any]:
        ended = {"exitCode": 0, "reason": "Completed", "message": message}
        return pod(
            "job-1",
            component="compile",
            phase="Succeeded",
            container={"state": {"terminated": ended}},
        )

    def completed(self, cache: dict[str, Any], message: str) -> CacheObservation:
        """The Job is complete and its pod left ``message``."""
        return CacheObservation(
            cache,
            claim=self.claim,
            jobs=(job(cache, condition="Complete"),),
            pods=(self.succeeded(message),),
        )

    def test_it_waits_for_its_claim(self) -> None:
        status = self.fold(CacheObservation(compile_cache(resource())))
        assert status["state"] == "Pending"
        assert status["conditions"][0]["reason"] == "ClaimNotFound"

    def test_a_finished_job_publishes_what_it_reported(self) -> None:
        cache = compile_cache(resource())
        message = json.dumps(
            {
                "result": "published",
                "sizeBytes": 5,
                "seconds": 2.5,
                "counters": {"a": 1},
                "gate": {"passed": True},
            }
        )
        status = self.fold(self.completed(cache, message))
        assert status["state"] == "Ready"
        assert (status["sizeBytes"], status["seconds"], status["result"]) == (5, 2.5, "published")
        assert status["counters"] == {"a": 1}
        assert status["gate"] == {"passed": True}
        assert status["claimUid"] == CLAIM_UID
        assert status["users"] == ["chat"]

    @pytest.mark.parametrize("message", ["", "not JSON", '["a list"]', '{"sizeBytes": "many"}'])
    def test_a_result_that_cannot_be_read_is_still_a_published_cache(self, message: str) -> None:
        cache = compile_cache(resource())
        status = self.fold(self.completed(cache, message))
        assert status["state"] == "Ready"
        assert "sizeBytes" not in status

    def test_the_result_outlives_the_job(self) -> None:
        cache = compile_cache(resource(), "Ready", sizeBytes=5, seconds=2.5, jobName="j")
        status = self.fold(CacheObservation(cache, claim=self.claim))
        assert (status["state"], status["sizeBytes"], status["jobName"]) == ("Ready", 5, "j")

    def test_without_pods_the_jobs_own_duration_is_used(self) -> None:
        cache = compile_cache(resource())
        obs = CacheObservation(cache, claim=self.claim, jobs=(job(cache, condition="Complete"),))
        assert self.fold(obs)["seconds"] == 10.0

    @pytest.mark.parametrize(
        ("reason", "ended", "expected"),
        [
            ("DeadlineExceeded", None, "DeadlineExceeded"),
            ("BackoffLimitExceeded", {"exitCode": 137, "reason": "OOMKilled"}, "OOMKilled"),
            (
                "PodFailurePolicy",
                {
                    "exitCode": 4,
                    "message": '{"error": {"reason": "NumericalGateError", "message": "error 0.5"}}',
                },
                "NumericalGateError",
            ),
            ("BackoffLimitExceeded", None, "JobFailed"),
        ],
    )
    def test_a_failed_job_says_why(
        self, reason: str, ended: dict[str, Any] | None, expected: str
    ) -> None:
        cache = compile_cache(resource())
        pods = ()
        if ended is not None:
            state = {"state": {"terminated": ended}}
            pods = (
                pod("job-1", component="compile", phase="Failed", ready=False, container=state),
            )
        obs = CacheObservation(
            cache,
            claim=self.claim,
            jobs=(job(cache, condition="Failed", reason=reason),),
            pods=pods,
        )
        status = self.fold(obs)
        assert status["state"] == "Failed"
        assert status["conditions"][0]["reason"] == expected
        assert status["lastFailure"]["component"] == "compile"

    def test_one_failed_pod_is_not_a_failed_job(self) -> None:
        cache = compile_cache(resource())
        ended = {"state": {"terminated": {"exitCode": 1, "message": "boom"}}}
        failed = pod("job-1", component="compile", phase="Failed", ready=False, container=ended)
        obs = CacheObservation(cache, claim=self.claim, jobs=(job(cache),), pods=(failed,))
        assert self.fold(obs)["state"] == "Compiling"

    def test_a_job_that_gets_no_pod_shows_what_its_events_say(self) -> None:
        cache = compile_cache(resource())
        obs = CacheObservation(
            cache,
            claim=self.claim,
            jobs=(job(cache),),
            job_events=("pods is forbidden: exceeded quota: q",),
        )
        status = self.fold(obs)
        assert status["state"] == "Compiling"
        assert status["conditions"][0]["reason"] == "QuotaExceeded"

    def test_its_events_are_told_at_the_changes(self) -> None:
        cache = compile_cache(resource())
        compiling = self.fold(CacheObservation(cache, claim=self.claim, jobs=(job(cache),)))
        assert [e.reason for e in cache_events(cache, compiling)] == ["CompileStarted"]
        running = copy.deepcopy(cache) | {"status": compiling}
        done = self.fold(
            CacheObservation(running, claim=self.claim, jobs=(job(cache, condition="Complete"),))
        )
        assert [e.reason for e in cache_events(running, done)] == ["CompileSucceeded"]
        assert cache_events(running | {"status": done}, done) == []
