"""From what was observed to the status of both kinds, and to the events worth telling.  Pure.

A status is a fold over one observation; the previous status only keeps times stable (when a condition
last changed, when a failure was first seen) and what can no longer be observed (the result of a Job whose
pods are gone).
"""

from kerf_operator.status.cache import fold_cache
from kerf_operator.status.conditions import differs, only_volatile
from kerf_operator.status.deployment import fold_deployment
from kerf_operator.status.events import EventNote, cache_events, deployment_events

__all__ = [
    "EventNote",
    "cache_events",
    "deployment_events",
    "differs",
    "fold_cache",
    "fold_deployment",
    "only_volatile",
]
