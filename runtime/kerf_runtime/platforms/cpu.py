"""The CPU platform: real compiled kernels, emulated static graphs."""

from __future__ import annotations

import platform
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.config.engine import DType
from kerf_runtime.config.resolve import AttentionGraphSupport, PlatformFacts
from kerf_runtime.cudagraph.emulated import EmulatedStaticGraph
from kerf_runtime.platforms.interface import DeviceMemory, StaticGraph

__all__ = ["CpuPlatform"]

_EXTENSIONS = re.compile(
    r"^(sse|ssse|avx|amx|fma|f16c|bmi|abm|adx|popcnt|movbe|aes|vaes|pclmul|vpclmul|gfni|sha_ni|rdrnd"
    r"|rdseed|sve|asimd|crc32|bf16|i8mm)"
)


def _instruction_set_extensions(cpuinfo: Path) -> str:
    """Instruction-set extensions of the first CPU, sorted; empty where the kernel does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    listed = next((line for line in lines if line.lower().startswith(("flags", "features"))), ":")
    flags = listed.partition(":")[2].split()
    return " ".join(sorted(flag for flag in flags if _EXTENSIONS.match(flag)))


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
            mixer_graph_support=AttentionGraphSupport.ALWAYS,
        )

    def static_graph(self) -> StaticGraph:
        return EmulatedStaticGraph()

    def capture_pass(self, *, tidy: bool = True) -> AbstractContextManager[None]:
        """Nothing to tidy."""
        return nullcontext()

    def memory(self) -> DeviceMemory | None:
        """None: emulated graphs count the buffers they keep themselves."""
        return None

    def release_memory(self) -> None:
        """Nothing that is held is unused."""

    def observed_factors(self) -> dict[str, Any]:
        """Instruction set and Python ABI: the kernels are extension modules built for both.

        Inductor builds them with ``-march=native``, so every instruction-set extension counts.
        """
        return {
            "machine": platform.machine(),
            "cpuCapability": torch.backends.cpu.get_cpu_capability(),
            "cpuFeatures": _instruction_set_extensions(Path("/proc/cpuinfo")),
            "pythonAbi": sys.implementation.cache_tag,
        }

    def synchronize(self, tensor: Tensor) -> None:
        """Nothing to wait for."""
