"""Memory that ran out is told as that, whichever part of the machine says so."""

from __future__ import annotations

import pytest
import torch

from kerf_runtime.cudagraph import cuda
from kerf_runtime.cudagraph.out_of_memory import is_out_of_memory, memory_explained
from kerf_runtime.errors import CaptureError, CaptureMemoryError
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.platforms import DeviceMemory

GIB = 2**30


def accelerator_error(code: int, text: str) -> RuntimeError:
    error = torch.AcceleratorError(text)
    error.error_code = code
    return error


MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    accelerator_error(2, "CUDA error: the driver's words in another version"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous"),
    RuntimeError("cudaErrorMemoryAllocation"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
OTHER = [
    accelerator_error(900, "CUDA error: operation not permitted when stream is capturing"),
    RuntimeError("shapes cannot be multiplied"),
    ValueError("out of memory"),
]


@pytest.mark.parametrize("error", MEMORY)
def test_memory_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER)
def test_anything_else_is_not_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_what_was_being_done_and_what_is_in_use_are_told() -> None:
    with (
        pytest.raises(CaptureMemoryError) as raised,
        memory_explained("warming up", lambda: DeviceMemory(8 * GIB, GIB, 6 * GIB)),
    ):
        raise torch.OutOfMemoryError("no room\nadvice on environment variables")
    assert raised.value.what == (
        "out of memory while warming up: 7.00 of 8.00 GiB are used, 6.00 GiB by this process's "
        "tensors. no room"
    )
    assert "captureSizes" in str(raised.value.hint)


@pytest.mark.parametrize("error", [*OTHER, CaptureError("waits")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, memory_explained("warming up", lambda: None):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", MEMORY)
def test_an_error_of_the_driver_while_a_graph_is_made_is_not_blamed_on_the_model(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 6 * GIB)
    with set_forward_context(ForwardContext()):
        explained = cuda._explained(error)
    assert isinstance(explained, CaptureMemoryError)
    assert explained.what.startswith("out of memory while capturing a graph: 7.00 of 8.00 GiB")


def test_what_cannot_be_recorded_is_told_as_before() -> None:
    with set_forward_context(ForwardContext()):
        explained = cuda._explained(OTHER[0])
    assert type(explained) is CaptureError
    assert "cannot be recorded" in explained.what
