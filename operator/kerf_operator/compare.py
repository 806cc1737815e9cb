"""Whether an observed object already says what a manifest says, so that nothing needs to be written.  Pure.

Two questions, both must be answered yes: the digest annotation that we put on the object equals that of
the manifest (else a field may have left it), and every field of the manifest is in the object (else
somebody changed it).  Quantities are compared by value, because the API server rewrites them.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from kerf_operator.api.names import APPLIED
from kerf_runtime.config import digest

__all__ = ["covers", "is_applied", "same_quantity", "stamped"]

_QUANTITY = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")
_SCALE = {
    None: Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
}


def stamped(manifest: dict[str, Any]) -> dict[str, Any]:
    """``manifest`` with the annotation that carries its own digest."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED: digest(manifest)[:16]}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def is_applied(observed: dict[str, Any] | None, manifest: dict[str, Any]) -> bool:
    """Whether applying the stamped ``manifest`` would change nothing."""
    return observed is not None and covers(observed, manifest)


def covers(observed: Any, desired: Any) -> bool:
    """Whether everything in ``desired`` is in ``observed``; more may be there (defaults, others)."""
    if isinstance(desired, dict):
        return isinstance(observed, dict) and all(
            covers(observed[key], value) if key in observed else _empty(value)
            for key, value in desired.items()
        )
    if isinstance(desired, list):
        if not isinstance(observed, list):
            return False
        if desired and all(isinstance(item, dict) for item in desired):
            return all(_matched(item, observed) for item in desired)
        return desired == observed
    return bool(desired == observed) or same_quantity(desired, observed)


def _empty(value: Any) -> bool:
    """Empty maps and lists may be left out by the API server."""
    return value in ({}, [], None)


def _matched(item: dict[str, Any], observed: list[Any]) -> bool:
    """Whether ``observed`` has an entry for ``item``, found by its merge key where it has one."""
    for key in ("uid", "name", "mountPath", "type"):
        if key in item:
            twins = [
                other
                for other in observed
                if isinstance(other, dict) and other.get(key) == item[key]
            ]
            return any(covers(twin, item) for twin in twins)
    return any(covers(other, item) for other in observed)


def same_quantity(one: Any, other: Any) -> bool:
    """Whether two texts are the same amount: ``1024Mi`` and ``1Gi``, ``0.5`` and ``500m``."""
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    left, right = _QUANTITY.match(one), _QUANTITY.match(other)
    if left is None or right is None:
        return False
    return Decimal(left[1]) * _SCALE[left[2]] == Decimal(right[1]) * _SCALE[right[2]]
