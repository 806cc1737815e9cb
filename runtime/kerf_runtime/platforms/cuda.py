"""The CUDA platform: recorded CUDA graphs, Triton attention, the current device."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.config.engine import DType
from kerf_runtime.config.resolve import AttentionGraphSupport, PlatformFacts
from kerf_runtime.cudagraph.cuda import (
    CudaStaticGraph,
    capture_pass,
    driver_version,
    release_memory,
)
from kerf_runtime.platforms.interface import DeviceMemory, StaticGraph

__all__ = ["CudaPlatform"]


class CudaPlatform:
    """One NVIDIA GPU: the device that is current when the platform is made.

    Both attention kernels find their work from metadata on the device with a grid that depends on the
    padded batch alone, so attention can be recorded in any batch.  The state-space mixer launches kernels by
    the lengths of sequences, which are known only where each has one token.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def facts(self) -> PlatformFacts:
        return PlatformFacts(
            name="cuda",
            graph_backend="cuda",
            attention_backend="triton",
            attention_graph_support=AttentionGraphSupport.ALWAYS,
            default_dtype=DType.AUTO,
            mixer_graph_support=AttentionGraphSupport.SINGLE_TOKEN_DECODE,
        )

    def static_graph(self) -> StaticGraph:
        return CudaStaticGraph()

    def capture_pass(self, *, tidy: bool = True) -> AbstractContextManager[None]:
        """Empties PyTorch's cache once, and keeps the garbage collector away until all is captured."""
        return capture_pass(tidy=tidy)

    def memory(self) -> DeviceMemory | None:
        """As the driver and PyTorch's allocator count it now."""
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(total, free, torch.cuda.memory_reserved(self.device))

    def release_memory(self) -> None:
        """Empty PyTorch's cache."""
        release_memory()

    def observed_factors(self) -> dict[str, Any]:
        """Kernels are machine code for one architecture, tuned for one model of GPU.

        Of the driver only the newest CUDA major version that it supports counts.
        """
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "gpu": properties.name,
            "computeCapability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driverCudaMajor": driver_version() // 1000,
            "pythonAbi": sys.implementation.cache_tag,
        }

    def synchronize(self, tensor: Tensor) -> None:
        """Wait for the current stream of the device."""
        torch.cuda.current_stream(tensor.device).synchronize()
