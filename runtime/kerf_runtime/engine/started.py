"""What a running engine consists of."""

from __future__ import annotations

from dataclasses import dataclass

from kerf_runtime.cache import CacheSession
from kerf_runtime.compilation.prepare import PreparedModel
from kerf_runtime.config import EffectiveConfig
from kerf_runtime.cudagraph.runner import GraphRunner
from kerf_runtime.engine.runner import ModelRunner
from kerf_runtime.engine.scheduler import Scheduler
from kerf_runtime.models.config import ModelConfig

__all__ = ["StartedEngine"]


@dataclass(frozen=True)
class StartedEngine:
    """The parts of a running engine."""

    config: ModelConfig
    effective: EffectiveConfig
    prepared: PreparedModel
    cache: CacheSession
    scheduler: Scheduler
    runner: ModelRunner
    graphs: GraphRunner
