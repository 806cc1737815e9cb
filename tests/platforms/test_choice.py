"""Which platform a process gets, and why not another."""

from __future__ import annotations

import pytest
import torch

from kerf_runtime.errors import ConfigError
from kerf_runtime.platforms import current_platform
from kerf_runtime.platforms.cpu import CpuPlatform
from kerf_runtime.platforms.cuda import CudaPlatform
from kerf_runtime.platforms.rocm import RocmPlatform


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """PyTorch as it answers on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("KERF_PLATFORM", raising=False)
    return monkeypatch


def test_a_gpu_is_used_where_there_is_one(gpu: pytest.MonkeyPatch) -> None:
    platform = current_platform()
    assert isinstance(platform, CudaPlatform)
    assert platform.device == torch.device("cuda", 3)
    assert (platform.facts().name, platform.facts().graph_backend) == ("cuda", "cuda")


def test_without_a_gpu_it_is_the_cpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(current_platform(), CpuPlatform)


def test_the_environment_chooses_the_cpu_on_a_machine_with_a_gpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("KERF_PLATFORM", "cpu")
    assert isinstance(current_platform(), CpuPlatform)


@pytest.mark.parametrize(
    ("name", "message"),
    [("tpu", "'tpu' is no platform"), ("rocm", "finds no rocm device on this machine")],
)
def test_a_platform_that_cannot_be_had_is_an_error(
    gpu: pytest.MonkeyPatch, name: str, message: str
) -> None:
    gpu.setenv("KERF_PLATFORM", name)
    with pytest.raises(ConfigError, match=message) as raised:
        current_platform()
    assert raised.value.where == "KERF_PLATFORM"


def test_rocm_refuses_until_told_to_try_and_says_why(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "hip", "6.4")
    gpu.delenv("KERF_ALLOW_UNTESTED_PLATFORM", raising=False)
    with pytest.raises(ConfigError, match="never been tested") as raised:
        current_platform()
    assert "KERF_ALLOW_UNTESTED_PLATFORM=1" in str(raised.value.hint)
    gpu.setenv("KERF_ALLOW_UNTESTED_PLATFORM", "yes")
    with pytest.raises(ConfigError, match="'yes' is neither on nor off"):
        current_platform()
    gpu.setenv("KERF_ALLOW_UNTESTED_PLATFORM", "1")
    platform = current_platform()
    assert isinstance(platform, RocmPlatform)
    assert "untested" in platform.facts().graph_backend
    assert "untested" in platform.facts().attention_backend
