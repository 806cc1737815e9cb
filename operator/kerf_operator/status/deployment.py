"""The status of a ModelDeployment, folded from one observation.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerf_operator.api.names import REVISION_LABEL
from kerf_operator.api.status import CacheState
from kerf_operator.checks import (
    Finding,
    Severity,
    check_claim,
    check_deployment,
    check_failures,
    check_names,
    check_pods,
    is_ready_pod,
    worst,
)
from kerf_operator.observation import (
    ApplyFailure,
    DeploymentObservation,
    JsonObject,
    conditions_of,
)
from kerf_operator.plan import (
    active_revision,
    cache_is_ready,
    is_rolled_out,
    may_roll_out,
    wanted_replicas,
)
from kerf_operator.render import Target
from kerf_operator.render.deployment import selector_labels
from kerf_operator.status.conditions import Verdict, condition_list, failure_record
from kerf_operator.status.graphs import (
    PodReport,
    cache_hit,
    count_hits,
    fold_graphs,
    fold_timings,
)

__all__ = ["fold_deployment"]


def fold_deployment(
    obs: DeploymentObservation,
    target: Target | None,
    failures: Sequence[ApplyFailure] = (),
    *,
    now: str,
) -> dict[str, Any]:
    """The whole status of a ModelDeployment.

    Args:
        obs: what was observed.
        target: where it wants to be; None when its spec does not parse.
        failures: writes of this reconcile that the API server refused.
        now: RFC 3339 time for what changed now.
    """
    previous = obs.resource.get("status") or {}
    return _Fold(obs, target, failures, previous).status(now)


class _Fold:
    """The parts of one fold; every method is a pure function of the observation."""

    def __init__(
        self,
        obs: DeploymentObservation,
        target: Target | None,
        failures: Sequence[ApplyFailure],
        previous: dict[str, Any],
    ) -> None:
        self.obs = obs
        self.target = target
        self.previous = previous
        mine = [obs.deployment, obs.service, obs.autoscaler]
        if target is not None and target.creates_claim:
            mine.append(obs.claim)
        self.refused = worst((check_failures(failures), check_names(obs.uid, mine)))
        self.reports = self._reports()
        self.storage_finding = self._check_claim()
        self.storage = self._storage()
        self.compiled = self._compiled()
        self.pods = check_pods(obs.pods, component="serving")
        self.rollout = check_deployment(obs.deployment)
        self.hit = cache_hit(self.reports, target.key if target else None)

    def status(self, now: str) -> dict[str, Any]:
        obs, target = self.obs, self.target
        ready = self._ready()
        failing = self._failing()
        verdicts = {
            "Ready": ready,
            "Available": self._available(),
            "Progressing": self._progressing(ready, failing),
            "Degraded": (
                Verdict(True, failing.reason, failing.message)
                if failing
                else Verdict(False, "AsExpected", "nothing needs attention")
            ),
            "StorageReady": self.storage,
            "Compiled": self.compiled,
            "CacheHit": self.hit,
            "Scheduled": self._scheduled(),
        }
        counts = (obs.deployment or {}).get("status") or {}
        status: dict[str, Any] = {
            "observedGeneration": obs.generation,
            "phase": self._phase(ready, failing),
            "conditions": condition_list(
                verdicts,
                previous=self.previous.get("conditions"),
                generation=obs.generation,
                now=now,
            ),
            "replicas": counts.get("replicas", 0),
            "readyReplicas": counts.get("readyReplicas", 0),
            "selector": ",".join(
                f"{key}={value}" for key, value in selector_labels(obs.name).items()
            ),
        }
        if obs.spec is not None and target is not None:
            status["servedName"] = obs.spec.model.served_name or obs.name
            status["graphs"] = fold_graphs(
                self.reports,
                requested_mode=obs.spec.compilation.cudagraph_mode.value,
                previous=self.previous.get("graphs"),
            )
            status["revisions"] = self._revisions(target)
            cache = self._cache(target)
            if cache:
                status["cache"] = cache
            timings = fold_timings(self.reports, cache.get("lastCompileSeconds"))
            if timings:
                status["timings"] = timings
        failure = failure_record(failing, self.previous.get("lastFailure"), now)
        if failure is not None:
            status["lastFailure"] = failure
        return status

    def _reports(self) -> list[PodReport]:
        """Reports of the Ready pods of the target's revision, in the order of their names."""
        if self.target is None:
            return []
        found = []
        for pod in sorted(self.obs.pods, key=lambda pod: str(pod["metadata"]["name"])):
            name = str(pod["metadata"]["name"])
            revision = (pod["metadata"].get("labels") or {}).get(REVISION_LABEL)
            if is_ready_pod(pod) and revision == self.target.revision:
                found.append(PodReport(name, self.obs.reports.get(name, "not read yet")))
        return found

    def _check_claim(self) -> Finding | None:
        target, obs = self.target, self.obs
        if target is None or target.claim is None:
            return None
        return check_claim(
            obs.claim, obs.storage_class, name=target.claim, ours=target.creates_claim
        )

    def _storage(self) -> Verdict:
        target = self.target
        if target is None:
            return Verdict(None, "InvalidSpec", "the spec cannot be read")
        if target.claim is None:
            return Verdict(True, "NotNeeded", "nothing is cached, so no claim is needed")
        if self.storage_finding is None:
            return Verdict(True, "Bound", f"claim {target.claim} is bound")
        return Verdict.from_finding(self.storage_finding)

    def _compiled(self) -> Verdict:
        target, obs = self.target, self.obs
        if target is None or obs.spec is None:
            return Verdict(None, "InvalidSpec", "the spec cannot be read")
        if target.cache_name is None:
            return Verdict(True, "NotNeeded", "a level below 3 or enforceEager: nothing is cached")
        if cache_is_ready(obs.cache):
            return Verdict(True, "Published", f"key {target.key} is on claim {target.claim}")
        if obs.cache is None and obs.spec.suspend:
            return Verdict(False, "Suspended", "suspend is set: no compile Job is started")
        ready = conditions_of(obs.cache).get("Ready")
        if ready is None:
            return Verdict(False, "Pending", f"CompileCache {target.cache_name} is being set up")
        return Verdict(False, ready["reason"], ready["message"])

    def _compile_finding(self) -> Finding | None:
        """The CompileCache's own failure; its details are the cache's ``lastFailure``."""
        cache = self.obs.cache or {}
        status = cache.get("status") or {}
        if self.target is None or self.target.cache_name is None or cache_is_ready(cache or None):
            return None
        if self.compiled.reason in ("Compiling", "Pending", "Suspended", "JobPending"):
            return None
        record = status.get("lastFailure") or {}
        same = record.get("reason") == self.compiled.reason
        severity = (
            Severity.FAILING
            if same or status.get("state") == CacheState.FAILED
            else Severity.WAITING
        )
        return Finding(
            self.compiled.reason,
            self.compiled.message,
            "compile",
            severity,
            pod=record.get("pod") if same else None,
            exit_code=record.get("exitCode") if same else None,
        )

    def _invalid(self) -> Finding | None:
        if self.obs.spec_error is None:
            return None
        return Finding("InvalidSpec", self.obs.spec_error, "operator", Severity.FAILING)

    def _missed(self) -> Finding | None:
        """A pod that could not use the cache serves, but not as it should."""
        if self.hit.status is not False:
            return None
        return Finding(
            "CacheMiss", f"{self.hit.reason}: {self.hit.message}", "serving", Severity.FAILING
        )

    def _finding(self) -> Finding | None:
        """What keeps the deployment from being ready: failures first, then what is waited for."""
        return worst(
            (
                self._invalid(),
                self.refused,
                self.storage_finding if self._storage_matters() else None,
                self._compile_finding(),
                self.pods,
                self.rollout,
            )
        )

    def _storage_matters(self) -> bool:
        """A claim that waits for its first consumer says less than the consumer does."""
        finding = self.storage_finding
        return finding is not None and (
            finding.severity is Severity.FAILING
            or conditions_of(self.obs.cache).get("Ready") is None
        )

    def _failing(self) -> Finding | None:
        found = worst((self._finding(), self._missed()))
        return found if found is not None and found.severity is Severity.FAILING else None

    def _desired(self) -> int:
        wanted = wanted_replicas(self.obs.spec) if self.obs.spec else None
        if wanted is not None:
            return wanted
        found = ((self.obs.deployment or {}).get("spec") or {}).get("replicas", 1)
        return int(found)

    def _ready(self) -> Verdict:
        obs, target = self.obs, self.target
        finding = self._finding()
        if target is None or obs.spec is None:
            return Verdict.from_finding(finding or Finding("InvalidSpec", "", "operator"))
        if obs.spec.suspend:
            return Verdict(
                False, "Suspended", "suspend is set: there are no pods; set it to false to serve"
            )
        counts = (obs.deployment or {}).get("status") or {}
        ready, desired = counts.get("readyReplicas", 0), self._desired()
        complete = is_rolled_out(
            obs.deployment, target.revision
        ) and ready == desired == counts.get("replicas", 0)
        if complete and self.refused is None:
            if desired == 0:
                return Verdict(
                    True, "ScaledToZero", "replicas is 0: everything is in place, nothing serves"
                )
            return Verdict(
                True, "Serving", f"{ready} of {desired} pods serve revision {target.revision}"
            )
        if finding is not None:
            return Verdict.from_finding(finding)
        if not may_roll_out(obs, target):
            return Verdict(False, self.compiled.reason, self.compiled.message)
        return Verdict(
            False, "RollingOut", f"{ready} of {desired} pods are ready, revision {target.revision}"
        )

    def _available(self) -> Verdict:
        ready = sum(1 for pod in self.obs.pods if is_ready_pod(pod))
        if ready:
            return Verdict(
                True, "PodsReady", "at least one pod serves, of this or an older revision"
            )
        return Verdict(False, "NoReadyPods", "no pod serves")

    def _progressing(self, ready: Verdict, failing: Finding | None) -> Verdict:
        if ready.status:
            return Verdict(False, "Complete", "the spec is in force")
        if failing is not None:
            return Verdict(False, failing.reason, "held until the failure is mended")
        if ready.reason == "Suspended":
            return Verdict(False, "Suspended", "suspend is set")
        return Verdict(True, ready.reason, ready.message)

    def _scheduled(self) -> Verdict:
        live = [pod for pod in self.obs.pods if "deletionTimestamp" not in pod["metadata"]]
        if not live:
            return Verdict(None, "NoPods", "there are no pods yet")
        waiting = [
            pod
            for pod in live
            if (conditions_of(pod).get("PodScheduled") or {}).get("status") != "True"
        ]
        if waiting:
            finding = check_pods(waiting, component="serving")
            if finding is not None:
                return Verdict.from_finding(finding)
            return Verdict(False, "Scheduling", "some pods have no node yet")
        return Verdict(True, "Scheduled", "every pod has a node")

    def _phase(self, ready: Verdict, failing: Finding | None) -> str:
        if ready.reason == "Suspended":
            return "Suspended"
        if failing is not None:
            return "Degraded" if self._available().status else "Failed"
        if ready.status:
            return "Ready"
        if self.compiled.status is False:
            state = ((self.obs.cache or {}).get("status") or {}).get("state")
            return "Compiling" if state == CacheState.COMPILING else "Pending"
        return "RollingOut"

    def _revisions(self, target: Target) -> dict[str, str]:
        revisions = {"target": target.revision}
        active = active_revision(self.obs.deployment)
        if active is not None:
            revisions["active"] = active
        return revisions

    def _cache(self, target: Target) -> dict[str, Any]:
        if target.cache_name is None or target.key is None:
            return {}
        observed: JsonObject = (self.obs.cache or {}).get("status") or {}
        hits, misses = count_hits(self.reports, target.key)
        cache: dict[str, Any] = {
            "key": target.key,
            "name": target.cache_name,
            "path": target.cache_path,
            "claim": target.claim,
            "state": observed.get("state", CacheState.PENDING.value),
            "factors": target.factors,
            "hits": hits,
            "misses": misses,
        }
        if "sizeBytes" in observed:
            cache["sizeBytes"] = observed["sizeBytes"]
        if "seconds" in observed:
            cache["lastCompileSeconds"] = observed["seconds"]
        return cache
