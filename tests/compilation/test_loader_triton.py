"""Wrappers with Triton kernels: run on the current device, from cubins, whatever device they were made on.

The wrapper below has the statements that Inductor generates for CUDA; the kernels are stand-ins.
"""

from __future__ import annotations

import pytest
import torch

from kerf_runtime.compilation import loader
from kerf_runtime.compilation.loader import load_wrapper, parse_wrapper
from kerf_runtime.errors import CompileError

WRAPPER = """
import torch
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
import triton
''', device_str='cuda')
triton_poi_fused_mul_1 = async_compile.triton('triton_poi_fused_mul_1', '''
import triton
''', device_str='cuda')

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        s72 = arg1_1
        with torch.cuda._DeviceGuard(3):
            torch.cuda.set_device(3)
            buf0 = empty_strided_cpu((s72, 3), (3, 1), torch.float32)
            triton_poi_fused_add_0_xnumel = 3*s72
            stream3 = get_raw_stream(3)
            triton_poi_fused_add_0.run(arg0_1, buf0, triton_poi_fused_add_0_xnumel, stream=stream3)
            stream3 = get_raw_stream(3)
            triton_poi_fused_mul_1.run(buf0, s72, 3, stream=stream3)
        return (buf0, )

runner = Runner(partitions=[])
call = runner.call
"""


@pytest.fixture
def streams(monkeypatch):
    """How often the current stream is asked for; kernels add and double on the CPU."""
    asked = []

    def current_stream(index):
        asked.append(index)
        return 42

    def load_kernel(path):
        def add(x, out, numel, *, stream):
            assert (numel, stream) == (x.numel(), 42)
            out.copy_(x + 1)

        def double(out, rows, columns, *, stream):
            assert ((rows, columns), stream) == (out.shape, 42)
            out.mul_(2)

        return add if path.stem == "kernel_0" else double

    monkeypatch.setattr(loader, "_current_raw_stream", current_stream)
    monkeypatch.setattr(loader, "load_kernel", load_kernel)
    return asked


def cubins(folder):
    return [folder / "kernel_0.cubin", folder / "kernel_1.cubin"]


def test_it_runs_on_the_current_device_and_asks_for_its_stream_once(streams, tmp_path):
    call = load_wrapper(WRAPPER, cubins(tmp_path), num_inputs=2, identity="test")
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(call([x, 2])[0], (x + 1) * 2)
    assert len(streams) == 1


def test_kernels_are_known_by_name_and_language():
    kernels = parse_wrapper(WRAPPER).kernels
    assert [(k.name, k.language, k.suffix) for k in kernels] == [
        ("triton_poi_fused_add_0", "triton", ".cubin"),
        ("triton_poi_fused_mul_1", "triton", ".cubin"),
    ]


def test_a_shared_object_in_place_of_a_cubin_is_refused(streams, tmp_path):
    files = [tmp_path / "kernel_0.so", tmp_path / "kernel_1.cubin"]
    with pytest.raises(CompileError, match=r"kernel_0\.so for a kernel in triton"):
        load_wrapper(WRAPPER, files, num_inputs=2, identity="test")


def test_another_context_manager_than_the_device_guard_is_refused():
    with pytest.raises(CompileError, match="does not know"):
        parse_wrapper(WRAPPER.replace("torch.cuda._DeviceGuard(3)", "torch.cuda.stream(None)"))
