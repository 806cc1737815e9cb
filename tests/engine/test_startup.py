"""What a start leaves for the KV cache on a device that tells its memory, and addresses that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.engines import engine_args, generate, started

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.cudagraph.runner import GraphRunner
from kerf_runtime.engine import startup
from kerf_runtime.engine.runner import ModelRunner
from kerf_runtime.errors import CaptureError, ConfigError
from kerf_runtime.platforms import CpuPlatform, DeviceMemory

MIB = 2**20
TOTAL, WEIGHTS, WORKSPACE, ACTIVATIONS = 1000 * MIB, 300 * MIB, 8 * MIB, 200 * MIB


class Device(CpuPlatform):
    """A CPU that counts memory as a GPU does: what a step had stays reserved until it is released."""

    def __init__(self) -> None:
        self.in_use, self.cached = WEIGHTS, 0

    def step(self) -> None:
        """A library takes a workspace for good in the first step, and every step needs its activations."""
        self.in_use, self.cached = WEIGHTS + WORKSPACE, ACTIVATIONS

    def memory(self) -> DeviceMemory:
        reserved = self.in_use + self.cached
        return DeviceMemory(TOTAL, TOTAL - reserved, reserved)

    def release_memory(self) -> None:
        self.cached = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device, sampling = Device(), ModelRunner.warm_up_sampling

    def warm_up_sampling(runner: ModelRunner, hidden: torch.Tensor) -> None:
        sampling(runner, hidden)
        device.step()

    monkeypatch.setattr(startup, "current_platform", lambda: device)
    monkeypatch.setattr(ModelRunner, "warm_up_sampling", warm_up_sampling)
    return device


def blocks(path: Path, mode: str, memory: str) -> int:
    engine = {"kvCacheMemory": memory, "gpuMemoryUtilization": 1.0}
    core = started(engine_args(path, mode=mode, engine=engine))
    cache = next(iter(core.engine.runner.kv_caches.values()))
    assert cache[0].shape[0] == core.engine.scheduler.limits.num_blocks
    return cache[0].shape[0]


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_activations_are_set_aside_once_in_every_mode(
    tiny_path: Path, device: Device, mode: str
) -> None:
    left = (TOTAL - WEIGHTS - WORKSPACE - ACTIVATIONS) // MIB
    graphs = 0 if mode == "NONE" else 1
    fitting = blocks(tiny_path, mode, f"{left - graphs}Mi")
    with pytest.raises(ConfigError, match=f"or to at most {left - graphs}Mi"):
        blocks(tiny_path, mode, f"{left + 1}Mi")
    of_a_mebibyte = fitting // (left - graphs) + 1
    assert fitting <= blocks(tiny_path, mode, "auto") <= fitting + graphs * of_a_mebibyte


def test_weights_that_moved_while_graphs_were_captured_are_noticed_before_serving(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_all = GraphRunner.capture_all

    def capture_and_move(graphs: GraphRunner, *args: Any) -> None:
        capture_all(graphs, *args)
        _, weight = next(iter(graphs._weights.tensors()))
        weight.data = weight.data.clone()

    monkeypatch.setattr(GraphRunner, "capture_all", capture_and_move)
    with pytest.raises(CaptureError, match="weights moved since the graphs were captured"):
        started(engine_args(tiny_path, mode="FULL_DECODE_ONLY"))


def test_in_debug_mode_everything_that_graphs_read_stays_where_it_was(
    tiny_path: Path, tiny_prompts: list[list[int]], tmp_path: Path
) -> None:
    plain = started(engine_args(tiny_path, mode="FULL"))
    debug = started(engine_args(tiny_path, mode="FULL", debug_dump_path=tmp_path))
    with compilation_counter.expect(captures_after_startup=0):
        assert generate(debug, tiny_prompts) == generate(plain, tiny_prompts)
    [addresses] = {
        len(e.context_addresses) for e in debug.engine.graphs._recorder._full.captured.values()
    }
    assert addresses == 4 + 2 * len(debug.engine.runner.kv_caches)
