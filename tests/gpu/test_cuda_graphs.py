"""Recorded CUDA graphs keep the contract of a static graph, share memory, and fail with a useful error."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.cuda import CudaStaticGraph, capture_pass
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.wrapper import CaptureGate, CUDAGraphWrapper
from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.platforms import current_platform

pytestmark = pytest.mark.gpu
EIGHT = BatchDescriptor(8)


@pytest.fixture(autouse=True)
def _in_a_forward() -> Iterator[None]:
    with torch.inference_mode(), set_forward_context(ForwardContext(descriptor=EIGHT)):
        yield


class Doubling(nn.Module):
    """Counts how often its Python code runs."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2 + 1


class Waiting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


class Synchronising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return x * 2


class Greedy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty(1 << 40, dtype=torch.uint8, device="cuda")[:1]


def test_a_replay_reads_the_captured_addresses_and_never_runs_python() -> None:
    model, x = Doubling(), torch.ones(8, device="cuda")
    graph = CudaStaticGraph()
    graph.capture(model, (x,))
    assert (model.calls, graph.nodes) == (1, 2)
    addresses = set()
    for value in (1.0, 5.0, -3.0):
        x.fill_(value)
        output = graph.replay()
        addresses.add(output.data_ptr())
        assert output.tolist() == [value * 2 + 1] * 8
    assert (model.calls, len(addresses)) == (1, 1)


def test_graphs_of_one_pass_share_memory_when_captured_largest_first() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x * 1.5).relu() @ torch.eye(1024, device="cuda")
        return x

    sizes = (4096, 2048, 1024, 512)
    inputs = {size: torch.randn(size, 1024, device="cuda") for size in sizes}
    graphs = {}
    with capture_pass():
        for size in sizes:
            work(inputs[size])
            graphs[size] = CudaStaticGraph()
            graphs[size].capture(work, (inputs[size],))
    held = [graphs[size].memory_bytes for size in sizes]
    assert held[0] > 4096 * 1024 * 4
    assert sum(held[1:]) <= held[0] // 4
    for size in sizes:
        expected = work(inputs[size])
        assert torch.equal(graphs[size].replay(), expected)


def test_pieces_captured_one_after_another_replay_to_the_eager_result() -> None:
    """Outputs are weak references; memory of early pieces is used again by later ones."""
    gate = CaptureGate(open=True)

    def piece(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scratch = (x @ x.T) * 0.01
        return (scratch @ y).tanh(), (x + y).tanh()

    wrappers = [
        CUDAGraphWrapper(piece, CUDAGraphMode.PIECEWISE, CudaStaticGraph, gate) for _ in range(12)
    ]

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x
        for wrapper in wrappers:
            x, y = wrapper(x, y)
            y.sin_()  # between the pieces, and into a buffer of theirs, as attention does
        return x + y

    inputs = {size: torch.randn(size, 256, device="cuda") for size in (512, 256, 128)}
    contexts = {
        (mode, size): ForwardContext(mode=mode, descriptor=BatchDescriptor(size))
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE)
        for size in inputs
    }
    with capture_pass():
        for size, x in inputs.items():
            for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
                with set_forward_context(contexts[mode, size]):
                    forward(x)
    gate.open = False
    first = {w.captured[BatchDescriptor(512)].graph.memory_bytes for w in wrappers}
    later = [w.captured[BatchDescriptor(128)].graph.memory_bytes for w in wrappers]
    assert max(first) > 0
    assert sum(later) == 0
    for _ in range(3):
        for size, x in inputs.items():
            x.copy_(torch.randn_like(x))
            with set_forward_context(contexts[CUDAGraphMode.NONE, size]):
                expected = forward(x)
            with set_forward_context(contexts[CUDAGraphMode.PIECEWISE, size]):
                found = forward(x)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", [Waiting(), Synchronising()])
def test_a_forward_that_waits_is_an_error_that_names_module_and_line(model: nn.Module) -> None:
    x = torch.ones(8, device="cuda")
    with pytest.raises(CaptureError, match="cannot be recorded in the graph of 8 tokens") as raised:
        CudaStaticGraph().capture(model, (x,))
    assert raised.value.where is not None
    assert type(model).__name__ in raised.value.where
    assert f"{__file__}:" in raised.value.where
    assert ".item()" in str(raised.value.hint)
    assert gc.isenabled()
    # The process can go on.
    assert float((x + 1).sum()) == 16
    graph = CudaStaticGraph()
    graph.capture(Doubling(), (x,))
    assert graph.replay().tolist() == [3.0] * 8


def test_running_out_of_memory_names_the_size_what_is_used_and_what_to_change() -> None:
    x = torch.ones(8, device="cuda")
    with pytest.raises(
        CaptureError, match="out of memory while capturing the graph of 8"
    ) as raised:
        CudaStaticGraph().capture(Greedy(), (x,))
    assert "GiB are used" in raised.value.what
    assert "Greedy" in str(raised.value.where)
    assert "kvCacheMemory" in str(raised.value.hint)
    graph = CudaStaticGraph()
    graph.capture(Doubling(), (x,))
    assert graph.replay().tolist() == [3.0] * 8


def test_captures_do_not_nest() -> None:
    x = torch.ones(8, device="cuda")

    def nested(x: torch.Tensor) -> torch.Tensor:
        return CudaStaticGraph().capture(Doubling(), (x,))

    with pytest.raises(CaptureError, match="already running"):
        CudaStaticGraph().capture(nested, (x,))


def test_the_garbage_collector_rests_during_a_pass_and_works_after_it() -> None:
    with capture_pass():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_platform_is_cuda_and_says_what_kernels_depend_on() -> None:
    platform = current_platform()
    facts = platform.facts()
    assert (facts.name, facts.graph_backend, facts.attention_backend) == ("cuda", "cuda", "triton")
    found = platform.observed_factors()
    assert found["gpu"] == torch.cuda.get_device_name()
    assert found["driverCudaMajor"] >= int(str(torch.version.cuda).partition(".")[0])
    memory = platform.memory()
    assert memory is not None
    assert 0 < memory.free < memory.total
