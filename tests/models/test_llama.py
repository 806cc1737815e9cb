"""Our Llama gives the logits of transformers' Llama, whatever the file format and the variant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.models.checkpoints import (
    make_llama,
    our_logits,
    reference_logits,
    write_gguf,
    write_safetensors,
)
from transformers import LlamaForCausalLM

from kerf_runtime.config.engine import DType
from kerf_runtime.models import load_model, read_model_config
from kerf_runtime.models.llama.model import inverse_frequencies

IDS = [(7 * i * i + 3) % 320 for i in range(90)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(path, dtype=dtype, device="cpu")


def assert_same(path: Path, model: LlamaForCausalLM, *, atol: float = 2e-4) -> None:
    torch.testing.assert_close(
        our_logits(load(path), IDS), reference_logits(model, IDS), atol=atol, rtol=1e-4
    )


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({}, id="grouped-query attention"),
        pytest.param({"num_key_value_heads": 4}, id="multi-head attention"),
        pytest.param({"num_key_value_heads": 1}, id="multi-query attention"),
        pytest.param({"head_dim": 32}, id="heads wider than the hidden size"),
        pytest.param({"tie_word_embeddings": True}, id="tied head"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"rms_norm_eps": 1e-2}, id="another epsilon"),
        pytest.param(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, id="theta"
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            id="linear rope scaling",
        ),
        pytest.param({"rope_parameters": LLAMA3}, id="llama3 rope scaling"),
    ],
)
def test_safetensors_give_the_logits_of_transformers(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    model = make_llama(**variant)
    assert_same(write_safetensors(tmp_path, model), model)


def test_sharded_safetensors_are_read_through_their_index(tmp_path: Path) -> None:
    model = make_llama()
    write_safetensors(tmp_path, model, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same(tmp_path, model)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({}, id="separate head"),
        pytest.param({"tie_word_embeddings": True}, id="tied head"),
        pytest.param({"attention_bias": True}, id="biases"),
    ],
)
def test_gguf_gives_the_logits_of_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    model = make_llama(**variant)
    assert_same(write_gguf(tmp_path / "model.gguf", model), model)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    model = make_llama()
    write_gguf(tmp_path / "model.gguf", model)
    assert_same(tmp_path, model)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_gguf_gives_the_logits_of_its_expanded_weights(tmp_path: Path, kind: str) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    model = make_llama(tie_word_embeddings=False)
    path = write_gguf(tmp_path / "model.gguf", model, kind=qtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                stored = gguf.quants.quantize(parameter.numpy(), qtype)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, qtype)))
    assert_same(path, model)


def test_rope_factors_of_a_gguf_file_are_applied(tmp_path: Path) -> None:
    model = make_llama(rope_parameters=LLAMA3)
    plain = make_llama()
    write_safetensors(tmp_path / "scaled", model), write_safetensors(tmp_path / "plain", plain)
    scaled = inverse_frequencies(read_model_config(tmp_path / "scaled"))
    factors = inverse_frequencies(read_model_config(tmp_path / "plain")) / scaled
    path = write_gguf(tmp_path / "model.gguf", model, rope_factors=factors.numpy())
    assert_same(path, model)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path, make_llama())
    loaded = load(path, torch.bfloat16)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert read_model_config(path).dtype is DType.FLOAT32


def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    seen: list[float | None] = []
    path = write_safetensors(tmp_path, make_llama())
    load_model(
        path,
        dtype=torch.float32,
        device="cpu",
        progress=lambda detail, fraction: seen.append(fraction),
    )
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert seen == sorted(seen)  # type: ignore[type-var]


def test_no_parameter_wants_a_gradient_and_a_tied_head_is_one_tensor(tmp_path: Path) -> None:
    loaded = load(write_safetensors(tmp_path, make_llama(tie_word_embeddings=True)))
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.lm_head.weight is loaded.model.embedding.weight


def test_importing_and_describing_models_needs_no_torch(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_llama())
    code = (
        "import sys; from kerf_runtime.models import read_model_config, load_tokenizer; "
        f"read_model_config({str(path)!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
