"""The CPU platform: real compiled kernels, emulated static graphs."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.config.engine import DType
from kerf_runtime.config.resolve import AttentionGraphSupport, PlatformFacts
from kerf_runtime.cudagraph.emulated import EmulatedStaticGraph
from kerf_runtime.platforms.interface import StaticGraph

__all__ = ["CpuPlatform"]


class CpuPlatform:
    """CPU: attention runs anywhere in a graph, because graphs are emulated (and say so)."""

    device = torch.device("cpu")

    def facts(self) -> PlatformFacts:
        return PlatformFacts(
            name="cpu",
            graph_backend="emulated",
            attention_backend="cpu-paged",
            attention_graph_support=AttentionGraphSupport.ALWAYS,
            default_dtype=DType.FLOAT32,
        )

    def static_graph(self) -> StaticGraph:
        return EmulatedStaticGraph()

    def observed_factors(self) -> dict[str, Any]:
        """Instruction set and Python ABI: the kernels are extension modules built for both."""
        return {
            "machine": platform.machine(),
            "cpuCapability": torch.backends.cpu.get_cpu_capability(),
            "pythonAbi": sys.implementation.cache_tag,
        }

    def synchronize(self, tensor: Tensor) -> None:
        """Nothing to wait for."""
