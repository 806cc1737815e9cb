"""The ROCm platform: the interface of CUDA's through PyTorch's ROCm build, never run by anyone yet.

PyTorch's ROCm build answers to ``torch.cuda``, records HIP graphs under the same names, and Triton has
an AMD back end, so everything may work.  Nobody has seen it work; it refuses until told to try.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from kerf_runtime.config.engine import DType
from kerf_runtime.config.resolve import AttentionGraphSupport, PlatformFacts
from kerf_runtime.environment import is_on
from kerf_runtime.errors import ConfigError
from kerf_runtime.platforms.cuda import CudaPlatform

__all__ = ["RocmPlatform"]

_PERMISSION = "KERF_ALLOW_UNTESTED_PLATFORM"


class RocmPlatform(CudaPlatform):
    """One AMD GPU, untested: CUDA's graphs and memory calls under their HIP names.

    Raises:
        ConfigError: ``KERF_ALLOW_UNTESTED_PLATFORM`` is not 1.
    """

    def __init__(self) -> None:
        if not is_on(os.environ, _PERMISSION):
            raise ConfigError(
                "the ROCm platform has never been tested: neither graphs nor attention kernels have run "
                "on an AMD GPU",
                where="platform rocm",
                hint=f"Set {_PERMISSION}=1 to try it, or KERF_PLATFORM=cpu",
            )
        super().__init__()

    def facts(self) -> PlatformFacts:
        return PlatformFacts(
            name="rocm",
            graph_backend="hip (untested)",
            attention_backend="triton (untested)",
            attention_graph_support=AttentionGraphSupport.ALWAYS,
            default_dtype=DType.AUTO,
        )

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
