"""Platforms: what differs between kinds of machines, behind one interface."""

from kerf_runtime.platforms.cpu import CpuPlatform
from kerf_runtime.platforms.interface import Platform, StaticGraph

__all__ = ["Platform", "StaticGraph", "current_platform"]


def current_platform() -> Platform:
    """The platform of this process: CPU, the only one supported so far."""
    return CpuPlatform()
