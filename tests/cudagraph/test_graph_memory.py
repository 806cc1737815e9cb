"""What is told of memory is what the device really has lost."""

from __future__ import annotations

import pytest

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.estimate import MemoryEstimate
from kerf_runtime.cudagraph.graph_memory import GraphMemory
from kerf_runtime.cudagraph.recorder import Recorded
from kerf_runtime.platforms import CpuPlatform, DeviceMemory


class Device(CpuPlatform):
    """Tells how much is free; None as a CPU does."""

    free: int | None = 1000

    def memory(self):
        return None if self.free is None else DeviceMemory(2000, self.free, 0)


def full(size):
    return CUDAGraphMode.FULL, BatchDescriptor(size, True)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def memory(device):
    memory = GraphMemory(device)
    memory.bytes.update({full(8): 80, full(4): 40})
    return memory


@pytest.mark.parametrize(("back", "kept"), [(0, 80), (30, 50), (80, 0), (200, 0), (-10, 80)])
def test_what_the_device_does_not_get_back_from_a_dropped_graph_is_still_held(
    device, memory, back, kept
):
    def forget(keys):
        assert list(keys) == [full(8)]
        device.free += back

    memory.drop([full(8)], forget)
    report = memory.report()
    assert memory.bytes == {full(4): 40}
    assert report["unreleased_bytes"] == report["shared_bytes"] == kept
    assert report["memory_bytes"] == 40 + kept
    assert memory.measured.total() == 40  # what a budget is about


def test_a_graph_that_was_never_captured_leaves_nothing(memory):
    memory.drop([full(2)], list)
    assert memory.report()["unreleased_bytes"] == 0


def test_where_graphs_have_buffers_of_their_own_all_of_it_is_given_back(device, memory):
    device.free = None
    memory.drop([full(8)], list)
    assert memory.report()["memory_bytes"] == 40
    assert not memory.pooled


def test_the_estimate_is_compared_with_the_graphs_that_are_left(memory):
    memory.estimate = MemoryEstimate(0, {full(8): 90, full(4): 44})
    memory.drop([full(8)], list)
    report = memory.report()
    assert report["estimated_bytes"] == 44
    assert report["estimate_error"] == pytest.approx(0.1)


def test_what_trials_left_is_neither_needed_again_nor_forgotten(device, memory):
    memory.bytes.clear()
    before = memory.begin_pass()
    device.free -= 30
    memory.end_trials(before)
    memory.estimate = MemoryEstimate(10, {full(8): 60, full(4): 30})
    assert memory.still_needed() == 70
    memory.begin_pass()
    memory.note_peak(Recorded(0, 0, device.free - 120))
    memory.bytes.update({full(8): 50, full(4): 20})
    memory.share_out([full(8), full(4)])
    assert memory.report()["memory_bytes"] == 30 + 70
    assert memory.bytes == {full(8): 60, full(4): 30}
    assert memory.report()["peak_bytes"] == 150
