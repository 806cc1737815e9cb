"""Events for ``kubectl describe``: told once, when something changed.  Pure.

An event is a difference between the old and the new status.  Its name is a digest of what it tells, so an
operator that was killed after telling and before writing the status tells the same event again under the
same name, and the API server refuses the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kerf_operator.api.names import short_hash
from kerf_operator.api.status import CacheState
from kerf_operator.observation import JsonObject, conditions_of

__all__ = ["EventNote", "cache_events", "deployment_events"]


@dataclass(frozen=True)
class EventNote:
    """One event about an object.

    Attributes:
        about: what makes it another event than the last one of the same reason (key, revision, ...).
    """

    reason: str
    message: str
    about: str
    warning: bool = False

    def event_name(self, obj: JsonObject) -> str:
        """A name that is the same for the same event about the same object."""
        text = f"{obj['metadata']['uid']}/{self.reason}/{self.about}"
        return f"{obj['metadata']['name']}.{short_hash(text, 16)}"


def deployment_events(resource: JsonObject, new: dict[str, Any]) -> list[EventNote]:
    """What changed for a ModelDeployment from its present status to ``new``."""
    old = resource.get("status") or {}
    before, after = conditions_of({"status": old}), conditions_of({"status": new})
    events = list(_compile_events(old.get("cache") or {}, new.get("cache") or {}, after))
    revision = (new.get("revisions") or {}).get("active")
    if _became(before, after, "Ready", "True") and revision:
        events.append(EventNote("RolledOut", after["Ready"]["message"], revision))
    if _became(before, after, "CacheHit", "True"):
        events.append(EventNote("CacheHit", after["CacheHit"]["message"], str(revision)))
    if _became(before, after, "CacheHit", "False"):
        hit = after["CacheHit"]
        events.append(
            EventNote(
                "CacheMiss",
                f"{hit['reason']}: {hit['message']}",
                f"{revision}/{hit['reason']}",
                warning=True,
            )
        )
    events.extend(_degraded_events(before, after, told={event.message for event in events}))
    return events


def _compile_events(
    old: dict[str, Any], new: dict[str, Any], conditions: dict[str, JsonObject]
) -> Iterator[EventNote]:
    key, state = new.get("key"), new.get("state")
    if key is None or (old.get("key"), old.get("state")) == (key, state):
        return
    if state == CacheState.COMPILING:
        yield EventNote("CompileStarted", f"compiling key {key}", key)
    elif state == CacheState.READY:
        yield EventNote("CompileSucceeded", _published(new, new.get("lastCompileSeconds")), key)
    elif state == CacheState.FAILED:
        compiled = conditions["Compiled"]
        yield EventNote(
            "CompileFailed",
            f"{compiled['reason']}: {compiled['message']}",
            f"{key}/{compiled['observedGeneration']}",
            warning=True,
        )


def _published(cache: dict[str, Any], seconds: float | None) -> str:
    parts = [f"key {cache.get('key')} is published"]
    if "sizeBytes" in cache:
        parts.append(f"{cache['sizeBytes']} bytes")
    if seconds is not None:
        parts.append(f"{seconds} s")
    return ", ".join(parts)


def _degraded_events(
    before: dict[str, JsonObject], after: dict[str, JsonObject], *, told: set[str]
) -> Iterator[EventNote]:
    now, then = after.get("Degraded"), before.get("Degraded")
    if now is None or now["status"] != "True":
        return
    if then is not None and (then["status"], then["reason"]) == ("True", now["reason"]):
        return
    if now["message"] in told or f"{now['reason']}: {now['message']}" in told:
        return
    yield EventNote(
        now["reason"], now["message"], f"degraded/{now['observedGeneration']}", warning=True
    )


def _became(
    before: dict[str, JsonObject], after: dict[str, JsonObject], kind: str, value: str
) -> bool:
    return (after.get(kind) or {}).get("status") == value and (before.get(kind) or {}).get(
        "status"
    ) != value


def cache_events(resource: JsonObject, new: dict[str, Any]) -> list[EventNote]:
    """What changed for a CompileCache from its present status to ``new``."""
    old = resource.get("status") or {}
    if old.get("state") == new["state"]:
        return []
    attempt = str(new.get("jobName"))
    if new["state"] == CacheState.COMPILING:
        return [EventNote("CompileStarted", f"Job {attempt} started", attempt)]
    if new["state"] == CacheState.READY:
        found = {**new, "key": resource["spec"]["key"]}
        return [EventNote("CompileSucceeded", _published(found, new.get("seconds")), attempt)]
    if new["state"] == CacheState.FAILED:
        ready = conditions_of({"status": new})["Ready"]
        return [
            EventNote(
                "CompileFailed", f"{ready['reason']}: {ready['message']}", attempt, warning=True
            )
        ]
    return []
