"""Plans of both kinds, from observations to the writes that are missing."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import (
    CACHE_UID,
    UID,
    as_observed,
    bound_claim,
    compile_cache,
    deployment,
    job,
    observe,
    owner_of,
    pod,
    resource,
    service,
    spec_of,
    target_of,
)

from kerf_operator.actions import Action, Apply, Create, Delete
from kerf_operator.api.names import SCALE_MANAGER, owner_manager
from kerf_operator.observation import CacheObservation, DeploymentObservation
from kerf_operator.plan import plan_cache, plan_deployment


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [f"{type(action).__name__} {action.target.split('/')[0]}" for action in actions]


def settled(**changes: Any) -> tuple[DeploymentObservation, Any]:
    """A ModelDeployment that is served by one pod, with nothing left to do."""
    obs, target = observe(**changes)
    owner = obs.resource
    cache = compile_cache(owner, "Ready", spec=changes)
    return (
        replace(
            obs,
            claim=bound_claim(owner, **changes),
            cache=cache,
            owned_caches=(cache,),
            deployment=deployment(owner, ready=1, spec=changes),
            service=service(owner, **changes),
            pods=(pod(target=target),),
        ),
        target,
    )


def test_a_new_resource_gets_a_claim_a_cache_and_a_service_but_no_pods() -> None:
    obs, target = observe()
    assert kinds(plan_deployment(obs, target)) == [
        "Apply PersistentVolumeClaim",
        "Apply CompileCache",
        "Apply Service",
    ]


def test_a_settled_resource_needs_no_write() -> None:
    obs, target = settled()
    assert plan_deployment(obs, target) == ()


@pytest.mark.parametrize("state", [None, "Pending", "Compiling", "Failed"])
def test_pods_wait_for_the_published_cache(state: str | None) -> None:
    obs, target = observe()
    obs = replace(obs, claim=bound_claim(obs.resource), cache=compile_cache(obs.resource, state))
    assert kinds(plan_deployment(obs, target)) == ["Apply Service"]


def test_the_published_cache_starts_the_pods_with_replicas_of_their_own_manager() -> None:
    obs, target = observe(replicas=3)
    changes = {"replicas": 3}
    obs = replace(
        obs,
        claim=bound_claim(obs.resource),
        cache=compile_cache(obs.resource, "Ready", spec=changes),
        service=service(obs.resource),
    )
    actions = plan_deployment(obs, target)
    assert kinds(actions) == ["Apply Deployment", "Apply Deployment"]
    first, second = actions
    assert isinstance(first, Apply)
    assert isinstance(second, Apply)
    assert first.manifest["spec"]["replicas"] == 3
    assert second.manager == SCALE_MANAGER
    assert second.manifest["spec"] == {"replicas": 3}


@pytest.mark.parametrize(
    "changes",
    [
        *({"compilation": {"level": level}} for level in (0, 1, 2)),
        {"engine": {"enforceEager": True}},
    ],
)
def test_without_compilation_pods_start_at_once_and_there_is_no_claim(changes: Any) -> None:
    obs, target = observe(**changes)
    assert kinds(plan_deployment(obs, target)) == [
        "Apply Deployment",
        "Apply Deployment",
        "Apply Service",
    ]
    template = plan_deployment(obs, target)[0].manifest["spec"]["template"]  # type: ignore[union-attr]
    assert "cache" not in [volume["name"] for volume in template["spec"]["volumes"]]


def test_scaling_writes_one_field_and_starts_no_job() -> None:
    obs, _ = settled()
    changes = {"replicas": 2}
    scaled = replace(obs, resource=resource(**changes), spec=spec_of(**changes))
    actions = plan_deployment(scaled, target_of(**changes))
    assert kinds(actions) == ["Apply Deployment"]
    assert actions[0].manifest["spec"] == {"replicas": 2}  # type: ignore[union-attr]


def test_other_capture_sizes_roll_the_pods_and_keep_the_cache() -> None:
    obs, before = settled()
    changes = {"compilation": {"captureSizes": [1, 8]}}
    after = target_of(**changes)
    changed = replace(obs, resource=resource(**changes), spec=spec_of(**changes))
    assert after.cache_name == before.cache_name
    assert after.revision != before.revision
    assert kinds(plan_deployment(changed, after)) == ["Apply Deployment"]


def test_another_dtype_needs_another_cache_and_the_old_pods_keep_serving() -> None:
    obs, before = settled()
    changes = {"engine": {"dtype": "bfloat16"}}
    after = target_of(**changes)
    assert after.cache_name != before.cache_name
    changed = replace(obs, resource=resource(**changes), spec=spec_of(**changes), cache=None)
    actions = plan_deployment(changed, after)
    assert kinds(actions) == ["Apply CompileCache"]
    still = replace(changed, cache=compile_cache(changed.resource, "Compiling", spec=changes))
    assert plan_deployment(still, after) == ()
    ready = replace(changed, cache=compile_cache(changed.resource, "Ready", spec=changes))
    assert kinds(plan_deployment(ready, after)) == ["Apply Deployment"]


def test_the_old_revision_can_be_scaled_while_the_new_one_compiles() -> None:
    obs, _ = settled()
    changes = {"engine": {"dtype": "bfloat16"}, "replicas": 4}
    after = target_of(**changes)
    changed = replace(
        obs,
        resource=resource(**changes),
        spec=spec_of(**changes),
        cache=compile_cache(resource(**changes), "Compiling", spec=changes),
    )
    actions = plan_deployment(changed, after)
    assert kinds(actions) == ["Apply Deployment"]
    assert actions[0].manifest["spec"] == {"replicas": 4}  # type: ignore[union-attr]


def test_suspend_takes_the_pods_away_and_keeps_everything_else() -> None:
    obs, _ = settled()
    changes = {"suspend": True}
    suspended = replace(obs, resource=resource(**changes), spec=spec_of(**changes))
    actions = plan_deployment(suspended, target_of(**changes))
    assert kinds(actions) == ["Apply Deployment"]
    assert actions[0].manifest["spec"] == {"replicas": 0}  # type: ignore[union-attr]


def test_a_new_suspended_resource_starts_no_job_and_no_pod() -> None:
    obs, target = observe(suspend=True)
    assert kinds(plan_deployment(obs, target)) == ["Apply Service"]


def test_an_autoscaler_owns_replicas() -> None:
    changes = {"autoscaling": {"minReplicas": 2, "maxReplicas": 5}}
    obs, target = settled(**changes)
    found = obs.deployment
    assert found is not None
    found["spec"]["replicas"] = 5
    actions = plan_deployment(obs, target)
    assert kinds(actions) == ["Apply HorizontalPodAutoscaler"]


def test_an_autoscaler_that_left_the_spec_is_removed() -> None:
    obs, target = settled()
    changes = {"autoscaling": {"maxReplicas": 5}}
    with_scaler, its_target = observe(**changes)
    manifest = next(
        action.manifest
        for action in plan_deployment(with_scaler, its_target)
        if isinstance(action, Apply) and action.manifest["kind"] == "HorizontalPodAutoscaler"
    )
    obs = replace(obs, autoscaler=as_observed(manifest))
    assert kinds(plan_deployment(obs, target)) == ["Delete HorizontalPodAutoscaler"]


def test_a_resource_that_is_being_deleted_gets_no_write() -> None:
    obs, target = observe()
    obs.resource["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    assert plan_deployment(obs, target) == ()


def test_a_field_that_somebody_changed_is_put_back() -> None:
    obs, target = settled()
    assert obs.deployment is not None
    changed = copy.deepcopy(obs.deployment)
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    assert kinds(plan_deployment(replace(obs, deployment=changed), target)) == ["Apply Deployment"]


def test_what_others_add_is_left_alone() -> None:
    obs, target = settled()
    assert obs.deployment is not None
    changed = copy.deepcopy(obs.deployment)
    changed["metadata"]["annotations"]["somebody.example/note"] = "hello"
    changed["spec"]["template"]["spec"]["containers"].append({"name": "sidecar"})
    assert plan_deployment(replace(obs, deployment=changed), target) == ()


def test_an_object_of_somebody_else_is_never_taken_over() -> None:
    obs, target = settled()
    foreign = {"kind": "Service", "metadata": {"name": "chat", "namespace": "team"}, "spec": {}}
    assert plan_deployment(replace(obs, service=foreign), target) == ()


def test_retain_gives_the_claim_no_owner() -> None:
    obs, target = observe(deletionPolicy="Retain")
    claim = plan_deployment(obs, target)[0].manifest  # type: ignore[union-attr]
    assert "ownerReferences" not in claim["metadata"]


class TestSharedCaches:
    """Several ModelDeployments on one CompileCache."""

    other = "99999999-dddd-4000-8000-000000000009"

    def test_a_second_owner_joins_without_deciding_how_the_job_runs(self) -> None:
        first = resource("first")
        shared = compile_cache(first, "Compiling")
        changes = {"cache": {"volume": {"existingClaim": "first-cache"}}}
        obs, target = observe("second", uid=self.other, **changes)
        assert target.cache_name == shared["metadata"]["name"]
        obs = replace(obs, cache=shared, claim=bound_claim(first))
        actions = plan_deployment(obs, target)
        join = actions[0]
        assert isinstance(join, Apply)
        assert join.manager == owner_manager(self.other)
        assert "job" not in join.manifest["spec"]
        assert join.manifest["metadata"]["ownerReferences"][0]["uid"] == self.other

    def test_the_only_owner_of_an_abandoned_compile_deletes_it(self) -> None:
        obs, target = settled()
        abandoned = compile_cache(obs.resource, "Compiling", spec={"engine": {"dtype": "bfloat16"}})
        assert obs.cache is not None
        obs = replace(obs, owned_caches=(obs.cache, abandoned))
        actions = plan_deployment(obs, target)
        assert kinds(actions) == ["Delete CompileCache"]
        assert isinstance(actions[0], Delete)
        assert actions[0].uid == CACHE_UID

    def test_one_of_two_owners_only_lets_go(self) -> None:
        obs, target = settled()
        abandoned = owner_of(
            compile_cache(obs.resource, "Compiling", spec={"engine": {"dtype": "bfloat16"}}),
            self.other,
            "second",
        )
        assert obs.cache is not None
        obs = replace(obs, owned_caches=(obs.cache, abandoned))
        actions = plan_deployment(obs, target)
        assert kinds(actions) == ["Apply CompileCache"]
        assert isinstance(actions[0], Apply)
        assert actions[0].manager == owner_manager(UID)
        assert "spec" not in actions[0].manifest

    def test_the_newest_published_cache_is_kept_for_going_back(self) -> None:
        obs, target = settled()
        older = compile_cache(obs.resource, "Ready", spec={"engine": {"dtype": "float16"}})
        older["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        newer = compile_cache(obs.resource, "Ready", spec={"engine": {"dtype": "bfloat16"}})
        newer["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
        assert obs.cache is not None
        obs = replace(obs, owned_caches=(obs.cache, older, newer))
        actions = plan_deployment(obs, target)
        assert [action.target for action in actions] == [
            f"CompileCache/{older['metadata']['name']}"
        ]

    def test_a_cache_that_running_pods_mount_is_kept(self) -> None:
        obs, before = settled()
        changes = {"engine": {"dtype": "bfloat16"}}
        after = target_of(**changes)
        assert obs.cache is not None
        moved = replace(
            obs,
            resource=resource(**changes),
            spec=spec_of(**changes),
            cache=compile_cache(resource(**changes), "Ready", spec=changes),
            deployment=deployment(resource(**changes), ready=1, spec=changes),
            pods=(pod("old", target=before), pod("new", target=after)),
            owned_caches=(obs.cache,),
        )
        assert plan_deployment(moved, after) == ()

    def test_a_cache_made_by_hand_is_used_and_never_changed(self) -> None:
        obs, target = settled()
        by_hand = copy.deepcopy(obs.cache)
        assert by_hand is not None
        by_hand["metadata"]["labels"] = {}
        by_hand["metadata"]["ownerReferences"] = []
        assert plan_deployment(replace(obs, cache=by_hand, owned_caches=()), target) == ()

    def test_a_changed_token_is_written(self) -> None:
        obs, _ = settled()
        changes = {"compile": {"token": "again"}}
        obs = replace(obs, resource=resource(**changes), spec=spec_of(**changes))
        actions = plan_deployment(obs, target_of(**changes))
        assert kinds(actions) == ["Apply CompileCache"]
        assert actions[0].manifest["spec"]["tokens"] == {"chat": "again"}  # type: ignore[union-attr]


class TestCachePlan:
    """At most one Job at a time, made once."""

    claim = bound_claim(resource())

    def test_the_job_is_created_when_the_claim_exists(self) -> None:
        cache = compile_cache(resource())
        assert plan_cache(CacheObservation(cache)).actions == ()
        plan = plan_cache(CacheObservation(cache, claim=self.claim))
        assert [type(action) for action in plan.actions] == [Create]
        assert plan.job is not None
        assert plan.job.startswith(cache["metadata"]["name"])

    @pytest.mark.parametrize("condition", [None, "Complete", "Failed"])
    def test_an_existing_job_is_never_created_again(self, condition: str | None) -> None:
        cache = compile_cache(resource())
        obs = CacheObservation(cache, claim=self.claim, jobs=(job(cache, condition=condition),))
        assert plan_cache(obs).actions == ()

    def test_a_published_cache_needs_no_job_even_when_the_job_is_gone(self) -> None:
        cache = compile_cache(resource(), "Ready")
        assert plan_cache(CacheObservation(cache, claim=self.claim)).actions == ()

    def test_a_claim_that_was_replaced_is_filled_again(self) -> None:
        cache = compile_cache(resource(), "Ready")
        replaced = copy.deepcopy(self.claim)
        replaced["metadata"]["uid"] = "another"
        plan = plan_cache(CacheObservation(cache, claim=replaced))
        assert [type(action) for action in plan.actions] == [Create]

    def test_a_token_runs_a_failed_job_again(self) -> None:
        cache = compile_cache(resource())
        failed = job(cache, condition="Failed")
        retried = copy.deepcopy(cache)
        retried["spec"]["tokens"] = {"chat": "again"}
        plan = plan_cache(CacheObservation(retried, claim=self.claim, jobs=(failed,)))
        assert [type(action) for action in plan.actions] == [Create]
        assert plan.job != failed["metadata"]["name"]

    def test_a_token_does_not_disturb_a_running_job(self) -> None:
        cache = compile_cache(resource())
        running = job(cache)
        changed = copy.deepcopy(cache)
        changed["spec"]["tokens"] = {"chat": "again"}
        plan = plan_cache(CacheObservation(changed, claim=self.claim, jobs=(running,)))
        assert plan.actions == ()
        assert plan.job == running["metadata"]["name"]

    def test_other_settings_replace_a_job_that_has_not_finished(self) -> None:
        cache = compile_cache(resource())
        running = job(cache)
        changed = copy.deepcopy(cache)
        changed["spec"]["job"]["resources"] = {"requests": {"cpu": "1"}}
        plan = plan_cache(CacheObservation(changed, claim=self.claim, jobs=(running,)))
        assert [type(action) for action in plan.actions] == [Delete]
        after = plan_cache(CacheObservation(changed, claim=self.claim, jobs=()))
        assert [type(action) for action in after.actions] == [Create]

    def test_the_job_of_an_earlier_cache_must_be_gone_first(self) -> None:
        cache = compile_cache(resource())
        stranger = job(cache)
        stranger["metadata"]["ownerReferences"][0]["uid"] = "earlier"
        plan = plan_cache(CacheObservation(cache, claim=self.claim, jobs=(stranger,)))
        assert plan.actions == ()

    def test_a_key_that_is_not_that_of_the_factors_is_an_error(self) -> None:
        cache = compile_cache(resource())
        cache["spec"]["factors"] = {**cache["spec"]["factors"], "dtype": "float16"}
        plan = plan_cache(CacheObservation(cache, claim=self.claim))
        assert plan.actions == ()
        assert plan.error is not None
        assert "spec.key" in plan.error

    def test_a_document_that_does_not_parse_is_an_error_that_names_the_field(self) -> None:
        cache = compile_cache(resource())
        cache["spec"]["document"] = {"model": {"source": {}}}
        plan = plan_cache(CacheObservation(cache, claim=self.claim))
        assert plan.error is not None
        assert "spec.document.model.source" in plan.error
