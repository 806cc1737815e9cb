"""Reason codes: why the effective configuration differs from the requested one, why a cache missed.

A code is written the same way in the log, in metric labels, in ``/debug/graphs`` and in the status
of a ModelDeployment.  Codes are CamelCase because Kubernetes condition reasons are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CacheReason", "ConfigReason", "DispatchReason", "ReasonedChange"]


class ConfigReason(StrEnum):
    """Why a part of the effective configuration is not what was requested."""

    ENFORCE_EAGER = "EnforceEager"
    LEVEL_TOO_LOW = "LevelTooLow"
    EMPTY_SPLITTING_OPS = "EmptySplittingOps"
    ATTENTION_BACKEND_LIMIT = "AttentionBackendLimit"
    MIXER_LIMIT = "StateSpaceMixerLimit"
    STATE_SPACE_LAYERS = "StateSpaceLayers"
    PLATFORM_UNSUPPORTED = "PlatformUnsupported"
    SPLITTING_OPS_LIMIT = "SplittingOpsLimit"
    EAGER_BACKEND = "EagerBackend"
    MISSING_DEPENDENCY = "MissingDependency"
    MEMORY_BUDGET = "MemoryBudget"
    CAPTURE_DELAY_LIMIT = "CaptureDelayLimit"
    STATIC_SIZES_ONLY = "StaticSizesOnly"
    TUNING_FAILED = "TuningFailed"
    CAPTURE_FAILED = "CaptureFailed"
    CAPTURE_OUT_OF_MEMORY = "CaptureOutOfMemory"


class CacheReason(StrEnum):
    """Verdict of a compile-cache lookup.  ``FactorMismatch`` is followed by ``:<factor>``."""

    HIT = "Hit"
    DISABLED = "Disabled"
    NOT_CONFIGURED = "NotConfigured"
    NOT_NEEDED = "NotNeeded"
    NO_SUCH_KEY = "NoSuchKey"
    INCOMPLETE = "Incomplete"
    CHECKSUM_MISMATCH = "ChecksumMismatch"
    FACTOR_MISMATCH = "FactorMismatch"
    FORMAT_TOO_NEW = "FormatTooNew"
    UNREADABLE = "Unreadable"
    LOADER_REFUSED = "LoaderRefused"


class DispatchReason(StrEnum):
    """Why the dispatcher chose the mode it chose for a step."""

    EXACT = "Exact"
    PADDED = "Padded"
    ABOVE_LARGEST = "AboveLargest"
    NO_GRAPH = "NoGraph"
    MODE_NONE = "ModeNone"


@dataclass(frozen=True)
class ReasonedChange:
    """One difference between what was requested and what is in force.

    A warning has the same form with ``requested`` equal to ``effective``: it is as asked, and may still
    not do what was hoped for.
    """

    field: str
    requested: str
    effective: str
    reason: ConfigReason
    message: str
