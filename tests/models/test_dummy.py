"""Random weights: of a checkpoint only its configuration is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.engine.engines import document, generate, started
from tests.models.checkpoints import make_llama
from transformers import OPTConfig

from kerf_runtime.config import cache_key, compile_document, declared_factors, parse_document
from kerf_runtime.config.deployment import LoadFormat
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.errors import ModelError
from kerf_runtime.models import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a configuration."""
    path = tmp_path_factory.mktemp("dummy")
    config = make_llama().config.to_dict()
    (path / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"], "dtype": "float32"})
    )
    return path


def test_the_same_model_comes_out_every_time_and_gives_numbers(folder: Path) -> None:
    options = {"dtype": torch.bfloat16, "device": "cpu", "load_format": LoadFormat.DUMMY}
    first, second = (load_model(folder, **options).model for _ in range(2))  # type: ignore[arg-type]
    for (name, mine), (_, theirs) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
        assert mine.dtype is torch.bfloat16
        assert mine.device.type == "cpu"
    norm = first.get_parameter("norm.weight")
    assert torch.equal(norm, torch.ones_like(norm))


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_an_engine_serves_it(folder: Path, quantization: str | None) -> None:
    made = document(compilation={"level": 0, "cudagraphMode": "FULL_DECODE_ONLY"})
    made["spec"]["model"]["loadFormat"] = "dummy"
    if quantization is not None:
        made["spec"]["engine"]["quantization"] = quantization
    core = started(EngineArgs(made, folder, None))
    [answer] = generate(core, [[1, 2, 3]])
    assert len(answer) == 16


def test_without_it_the_weights_are_missed(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*.safetensors file"):
        load_model(folder, dtype=torch.float32, device="cpu")


def test_another_family(tmp_path: Path) -> None:
    config = OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=320
    )
    text = {**config.to_dict(), "architectures": ["OPTForCausalLM"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    loaded = load_model(tmp_path, dtype=torch.float32, device="cpu", load_format=LoadFormat.DUMMY)
    assert all(torch.isfinite(p).all() for p in loaded.model.parameters())


def test_dummy_weights_have_a_key_of_their_own_and_their_job_knows() -> None:
    keys, documents = set(), []
    for load_format in ("auto", "dummy"):
        made = document()
        made["spec"]["model"]["loadFormat"] = load_format
        spec = parse_document(made, where="test").spec
        keys.add(cache_key(declared_factors(spec, image="local")))
        documents.append(compile_document(spec)["model"])
    assert len(keys) == 2
    assert "loadFormat" not in documents[0]
    assert documents[1]["loadFormat"] == "dummy"
