"""The ROCm platform: the interface of CUDA's through PyTorch's ROCm build, never run by anyone yet.

PyTorch's ROCm build answers to ``torch.cuda``, records HIP graphs under the same names, and Triton has
an AMD back end, so everything may work.  Nobody has seen it work; it refuses until told to try.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.config.engine import DType
from kerf_runtime.config.resolve import AttentionGraphSupport, PlatformFacts
from kerf_runtime.cudagraph.cuda import CudaStaticGraph, capture_pass
from kerf_runtime.errors import ConfigError
from kerf_runtime.platforms.interface import DeviceMemory, StaticGraph

__all__ = ["RocmPlatform"]

_PERMISSION = "KERF_ALLOW_UNTESTED_PLATFORM"


class RocmPlatform:
    """One AMD GPU, untested.

    Raises:
        ConfigError: ``KERF_ALLOW_UNTESTED_PLATFORM`` is not 1.
    """

    def __init__(self) -> None:
        if os.environ.get(_PERMISSION) != "1":
            raise ConfigError(
                "the ROCm platform has never been tested: neither graphs nor attention kernels have run "
                "on an AMD GPU",
                where="platform rocm",
                hint=f"Set {_PERMISSION}=1 to try it, or KERF_PLATFORM=cpu",
            )
        self.device = torch.device("cuda", torch.cuda.current_device())

    def facts(self) -> PlatformFacts:
        return PlatformFacts(
            name="rocm",
            graph_backend="hip (untested)",
            attention_backend="triton (untested)",
            attention_graph_support=AttentionGraphSupport.ALWAYS,
            default_dtype=DType.AUTO,
        )

    def static_graph(self) -> StaticGraph:
        return CudaStaticGraph()

    def capture_pass(self) -> AbstractContextManager[None]:
        """As on CUDA."""
        return capture_pass()

    def memory(self) -> DeviceMemory | None:
        """As the driver and PyTorch's allocator count it now."""
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(total, free, torch.cuda.memory_reserved(self.device))

    def observed_factors(self) -> dict[str, Any]:
        """Kernels are machine code for one architecture."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "gpu": properties.name,
            "architecture": getattr(properties, "gcnArchName", "unknown"),
            "multiprocessors": properties.multi_processor_count,
            "hip": torch.version.hip,
            "pythonAbi": sys.implementation.cache_tag,
        }

    def synchronize(self, tensor: Tensor) -> None:
        """Wait for the current stream of the device."""
        torch.cuda.current_stream(tensor.device).synchronize()
