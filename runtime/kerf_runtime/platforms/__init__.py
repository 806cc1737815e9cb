"""Platforms: what differs between kinds of machines, behind one interface."""

from __future__ import annotations

import os

import torch

from kerf_runtime.errors import ConfigError
from kerf_runtime.platforms.cpu import CpuPlatform
from kerf_runtime.platforms.cuda import CudaPlatform
from kerf_runtime.platforms.interface import DeviceMemory, Platform, StaticGraph
from kerf_runtime.platforms.rocm import RocmPlatform

__all__ = ["DeviceMemory", "Platform", "StaticGraph", "current_platform"]

_VARIABLE = "KERF_PLATFORM"


def current_platform() -> Platform:
    """The platform of this process: the GPU PyTorch can use, else the CPU.

    The environment variable ``KERF_PLATFORM`` (cpu, cuda, rocm) chooses another.

    Raises:
        ConfigError: the variable names no platform, or one that this machine does not have.
    """
    wanted = os.environ.get(_VARIABLE) or _detect()
    if wanted == "cpu":
        return CpuPlatform()
    if wanted not in ("cuda", "rocm"):
        raise ConfigError(
            f"{wanted!r} is no platform",
            where=_VARIABLE,
            hint="Use cpu, cuda or rocm, or leave it unset",
        )
    if _detect() != wanted:
        raise ConfigError(
            f"PyTorch {torch.__version__} finds no {wanted} device on this machine",
            where=_VARIABLE,
            hint="Unset it, or run where the device and a PyTorch built for it are",
        )
    return CudaPlatform() if wanted == "cuda" else RocmPlatform()


def _detect() -> str:
    """Which platform PyTorch can use; its ROCm build answers through ``torch.cuda`` too."""
    if not torch.cuda.is_available():
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"
