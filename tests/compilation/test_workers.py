"""Compiling in other processes gives what compiling here gives, and its counts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tests.compilation.graphs import ATTENTION
from tests.compilation.helpers import run
from tests.compilation.models import tiny

from kerf_runtime.compilation.artifact import load_artifact, write_artifact
from kerf_runtime.compilation.backends import CompileRequest
from kerf_runtime.compilation.backends.warm_up import warm_up_program
from kerf_runtime.compilation.compiler import CompileOptions, compile_model
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.program import describe_program, rebuild_program
from kerf_runtime.compilation.split import resolve_splitting_ops, split_graph
from kerf_runtime.compilation.trace import trace_forward
from kerf_runtime.compilation.workers import WORKERS_VARIABLE, CompileWorkers, worker_count
from kerf_runtime.errors import CompileError, ConfigError


def pieces_of(layers):
    ids = torch.zeros(32, dtype=torch.int64)
    arguments = {"input_ids": ids, "positions": torch.zeros_like(ids)}
    traced = trace_forward(tiny(layers).model, arguments)
    split = split_graph(traced.module, resolve_splitting_ops(ATTENTION))
    for piece in split.compilable:
        nodes = piece.module.graph.nodes
        yield piece.module, [n.meta["example_value"] for n in nodes if n.op == "placeholder"]


def test_a_piece_is_the_same_after_it_travelled_as_plain_data():
    for module, values in pieces_of(2):
        again, fakes = rebuild_program(describe_program(module, values))
        real = [
            7 if not isinstance(v, torch.Tensor) else torch.ones(*_seven(v), dtype=v.dtype)
            for v in values
        ]
        for expected, actual in zip(_run(module, real), _run(again, real), strict=True):
            torch.testing.assert_close(actual, expected, equal_nan=True)
        assert [_symbolic(v) for v in fakes] == [_symbolic(v) for v in values]


def _seven(value):
    return [7 if isinstance(size, torch.SymInt) else size for size in value.shape]


def _symbolic(value):
    if not isinstance(value, torch.Tensor):
        return isinstance(value, torch.SymInt)
    return value.dtype, [isinstance(s, torch.SymInt) or s for s in value.shape]


def _run(module, inputs):
    outputs = module(*inputs)
    # An output that the piece only allocates has no defined values.
    return [
        o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.is_floating_point()
    ][:1]


def test_workers_compile_what_this_process_would_and_their_counts_arrive(monkeypatch, tmp_path):
    monkeypatch.setenv(WORKERS_VARIABLE, "1")
    loaded = tiny(2)
    with compilation_counter.expect(dynamo_traces=1, backend_compilations=3):
        compiled = compile_model(
            loaded.model,
            CompileOptions(ATTENTION, backend="eager"),
            device=torch.device("cpu"),
            progress=lambda *_: None,
        )
    write_artifact(tmp_path / "a", compiled.plan, compiled.pieces, compiled.graph_source)
    artifact = load_artifact(tmp_path / "a", loaded.model)
    assert torch.equal(run(artifact.forward, 5), run(loaded.model, 5))


def test_compiling_after_startup_is_refused_before_a_worker_is_asked(monkeypatch):
    monkeypatch.setattr(compile_gate, "open", False)
    module = torch.fx.GraphModule({}, torch.fx.Graph())
    with (
        CompileWorkers("eager", 1, torch.device("cpu")) as workers,
        compilation_counter.expect(compilations_after_startup=1),
        pytest.raises(CompileError, match="was attempted after start-up"),
    ):
        next(workers.compile([CompileRequest(module, [])]))


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_workers_are_for_inductor_on_a_gpu_with_processors_to_spare(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert worker_count(None, "inductor", GPU) == 3
    assert worker_count(None, "inductor", CPU) == worker_count(None, "eager", GPU) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    assert worker_count(None, "inductor", GPU) == 0


def test_a_number_of_workers_that_is_asked_for_is_used():
    assert worker_count("0", "inductor", GPU) == 0
    assert worker_count("3", "eager", CPU) == 3


@pytest.mark.parametrize("text", ["", "-1", "two", "65", "1.5", "²"])
def test_a_number_of_workers_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="no number of worker processes") as raised:
        worker_count(text, "inductor", GPU)
    assert raised.value.where == WORKERS_VARIABLE


def test_what_workers_are_forked_from_never_asks_for_a_device():
    """After that a fork could not use it."""
    code = """
import threading
import torch

def refuse(*_):
    raise SystemExit("asked the driver")

torch._C._cuda_getDeviceCount = torch._C._cuda_init = refuse
import kerf_runtime.compilation.preload
assert threading.active_count() == 1, threading.enumerate()
"""
    environment = {**os.environ, "TORCH_WARM_POOL": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_worker_that_cannot_be_set_up_says_why_and_what_to_do():
    request = CompileRequest(*next(pieces_of(1)))
    with CompileWorkers("no such back end", 1, CPU) as workers:
        workers._backend = "eager"
        with pytest.raises(CompileError, match="a compile worker could not be set up") as raised:
            next(workers.compile([request]))
    assert "no such back end" in str(raised.value)
    assert "KERF_COMPILE_WORKERS=0" in str(raised.value)


def test_a_static_size_for_a_gpu_is_timed_alone():
    module, values = next(pieces_of(1))
    with CompileWorkers("eager", 1, GPU) as workers:
        requests = [CompileRequest(module, values), CompileRequest(module, values, tokens=8)]
        assert [workers._submit(r) is None for r in requests] == [False, True]


def test_the_program_that_warms_a_worker_up_is_a_piece():
    module, values = rebuild_program(warm_up_program("cpu"))
    real = [7, *(torch.ones(*_seven(v), dtype=v.dtype) for v in values[1:])]
    assert [tuple(output.shape) for output in module(*real)] == [(7, 64), (7, 64)]
