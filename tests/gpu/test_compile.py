"""Compiling for a GPU: nothing of the model is allocated, and a fresh process runs it without a compiler."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.dummy import LLAMA_8B, build

from kerf_runtime.compilation.artifact import load_artifact, write_artifact
from kerf_runtime.compilation.compiler import CompileOptions, compile_model
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.workers import WORKERS_VARIABLE
from kerf_runtime.config.compilation import ATTENTION_OPS
from kerf_runtime.config.passes import PassConfig
from kerf_runtime.forward_context import ForwardContext, set_forward_context

SHAPE = {
    "num_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
SMALL = dataclasses.replace(LLAMA_8B, **SHAPE)
DEVICE = torch.device("cuda")


def compile_small(model, **options):
    return compile_model(
        model,
        CompileOptions(ATTENTION_OPS, passes=PassConfig(), **options),
        device=DEVICE,
        progress=lambda *_: None,
    )


@torch.inference_mode()
def relative_error(compiled, eager, tokens):
    ids = torch.arange(tokens, device=DEVICE) % SMALL.vocab_size
    positions = torch.arange(tokens, device=DEVICE)
    with set_forward_context(ForwardContext()):
        expected, actual = eager(ids, positions).float(), compiled(ids, positions).float()
    return float((expected - actual).norm() / expected.norm())


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A model, the folder of its artifact, and the device memory that compiling it took.

    Compiled in this process: what another allocates could not be seen here.
    """
    model = build(SMALL, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WORKERS_VARIABLE, "0")
        compiled = compile_small(model)
    taken = torch.cuda.max_memory_allocated() - before
    folder = tmp_path_factory.mktemp("gpu") / "artifact"
    write_artifact(folder, compiled.plan, compiled.pieces, compiled.graph_source)
    return model, folder, taken


def test_compiling_takes_no_memory_of_the_model(stored):
    _, _, taken = stored
    # The example ids and positions; the smallest weight of a piece has 512 bytes times 256.
    assert taken <= 8192


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 500])
def test_the_stored_pieces_agree_with_eager(stored, tokens):
    model, folder, _ = stored
    with compilation_counter.expect(dynamo_traces=0, inductor_compilations=0, artifacts_loaded=3):
        artifact = load_artifact(folder, model)
    assert relative_error(artifact.forward, model, tokens) < 0.02


@pytest.mark.parametrize("intermediate", [510, 1001])
def test_products_of_sizes_that_are_not_aligned_hold_for_every_number_of_tokens(
    intermediate, tmp_path
):
    # Inductor would weigh padding them against the number of tokens it was shown.
    model = build(
        dataclasses.replace(SMALL, num_layers=1, intermediate_size=intermediate), device=DEVICE
    )
    compiled = compile_small(model)
    write_artifact(tmp_path / "a", compiled.plan, compiled.pieces, compiled.graph_source)
    artifact = load_artifact(tmp_path / "a", model)
    for tokens in (1, 7, 500):
        assert relative_error(artifact.forward, model, tokens) < 0.02


def wrappers(folder, shape="general"):
    return [path.read_text() for path in folder.glob(f"rank_0/pieces/*/{shape}/wrapper.py")]


def test_what_65536_tokens_keep_within_reach_of_32_bits_is_indexed_with_them(stored):
    _, folder, _ = stored
    assert len(wrappers(folder)) == 3
    assert not any("tl.int64)" in line for line in kernels(wrappers(folder)))


def kernels(sources):
    """The lines that compute indices of elements; token ids are int64 themselves."""
    return [line for source in sources for line in source.splitlines() if "tl.program_id(" in line]


def test_a_model_as_wide_as_a_llama_of_70b_is_right_beyond_what_32_bits_can_index(tmp_path):
    model = build(
        dataclasses.replace(
            SMALL, num_layers=1, intermediate_size=28672, max_position_embeddings=65536
        ),
        device=DEVICE,
    )
    compiled = compile_small(model)
    write_artifact(tmp_path / "a", compiled.plan, compiled.pieces, compiled.graph_source)
    assert any("tl.int64)" in line for line in kernels(wrappers(tmp_path / "a")))
    artifact = load_artifact(tmp_path / "a", model)
    # 40000 rows of 57344 columns are 2.3e9 elements, 4.6 GB; one in sixteen is beyond 2**31.
    for tokens in (1, 7, 40000):
        assert relative_error(artifact.forward, model, tokens) < 0.02


FRESH = """
import dataclasses, json, sys
from pathlib import Path
import torch
from benchmarks.dummy import LLAMA_8B, build
from kerf_runtime.compilation.artifact import load_artifact
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.forward_context import ForwardContext, set_forward_context
device = torch.device("cuda")
model = build(dataclasses.replace(LLAMA_8B, **json.loads(sys.argv[2])), device=device)
artifact = load_artifact(Path(sys.argv[1]), model)
with torch.inference_mode(), set_forward_context(ForwardContext()):
    ids = torch.arange(9, device=device)
    finite = bool(artifact.forward(ids, ids).isfinite().all())
heavy = [name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules]
print(json.dumps({"finite": finite, "heavy": heavy, "counters": compilation_counter.snapshot()}))
"""


def test_a_fresh_process_imports_neither_inductor_nor_triton(stored):
    _, folder, _ = stored
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder), json.dumps(SHAPE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["finite"]
    assert result["heavy"] == []
    assert result["counters"]["dynamo_traces"] == result["counters"]["backend_compilations"] == 0


def test_a_static_size_is_autotuned_stored_and_right(tmp_path):
    model = build(dataclasses.replace(SMALL, num_layers=1), device=DEVICE)
    with compilation_counter.expect(inductor_compilations=4, static_compilations=2):
        compiled = compile_small(model, sizes=(8,))
    write_artifact(tmp_path / "a", compiled.plan, compiled.pieces, compiled.graph_source)
    artifact = load_artifact(tmp_path / "a", model)
    for tokens in (8, 8, 9):  # the first run always takes the general code
        assert relative_error(artifact.forward, model, tokens) < 0.02


def test_a_static_size_of_a_model_with_biases_can_be_stored_whatever_tuning_chooses(tmp_path):
    # As OPT, GPT-2 and Qwen2 have; among the candidates is a product that only tuning has.
    model = build(
        dataclasses.replace(SMALL, num_layers=1, attention_bias=True, mlp_bias=True), device=DEVICE
    )
    with compilation_counter.expect(static_compilations=4, untuned_compilations=0):
        compiled = compile_small(model, sizes=(8, 256))
    write_artifact(tmp_path / "a", compiled.plan, compiled.pieces, compiled.graph_source)
    artifact = load_artifact(tmp_path / "a", model)
    for tokens in (9, 8, 256):
        assert relative_error(artifact.forward, model, tokens) < 0.02


def test_tuning_is_on_for_static_sizes_and_off_for_any_number_whatever_is_asked(tmp_path):
    model = build(dataclasses.replace(SMALL, num_layers=1), device=DEVICE)
    compiled = compile_small(model, sizes=(8,), inductor={"max_autotune": True})
    write_artifact(tmp_path / "a", compiled.plan, compiled.pieces, compiled.graph_source)
    for shape, on in (("general", False), ("size_8", True)):
        with_kernels = [s for s in wrappers(tmp_path / "a", shape) if "'max_autotune':" in s]
        assert with_kernels
        assert all(f"'max_autotune': {on}" in source for source in with_kernels)


def test_pieces_are_recorded_into_a_cuda_graph(stored):
    model, folder, _ = stored
    forward = load_artifact(folder, model).forward
    ids = torch.arange(16, device=DEVICE)
    with torch.inference_mode(), set_forward_context(ForwardContext()):
        forward(ids, ids)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = forward(ids, ids)
        ids.copy_(torch.arange(16, device=DEVICE).flip(0))
        graph.replay()
        torch.testing.assert_close(output, forward(ids, ids))
