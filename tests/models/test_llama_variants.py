"""Qwen2, Qwen3 and Mistral: Llamas with options, each with the answers of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.engine.engines import engine_args, generate, greedy_reference, started
from tests.models.checkpoints import (
    TINY,
    make_random,
    our_logits,
    reference_logits,
    write_gguf,
    write_safetensors,
)
from tests.models.parity import IDS, assert_parity, expected_pieces, load, pieces
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kerf_runtime.errors import ModelError
from kerf_runtime.models import read_model_config, supported_architectures


def make_qwen2(**changes: Any) -> Qwen2ForCausalLM:
    return make_random(Qwen2ForCausalLM, Qwen2Config(**{**TINY, **changes}))


def make_qwen3(**changes: Any) -> Qwen3ForCausalLM:
    return make_random(Qwen3ForCausalLM, Qwen3Config(**{**TINY, "head_dim": 32, **changes}))


def make_mistral(**changes: Any) -> MistralForCausalLM:
    sizes = {**TINY, "sliding_window": None}
    return make_random(MistralForCausalLM, MistralConfig(**{**sizes, **changes}))


def edit(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("make", "variant"),
    [
        pytest.param(make_qwen2, {}, id="Qwen2"),
        pytest.param(make_qwen2, {"tie_word_embeddings": True}, id="Qwen2 with a tied head"),
        pytest.param(make_qwen3, {}, id="Qwen3"),
        pytest.param(make_qwen3, {"tie_word_embeddings": True}, id="Qwen3 with a tied head"),
        pytest.param(make_qwen3, {"attention_bias": True}, id="Qwen3 with biases"),
        pytest.param(make_qwen3, {"rms_norm_eps": 1e-2}, id="Qwen3 with another epsilon"),
        pytest.param(make_mistral, {}, id="Mistral"),
        pytest.param(make_mistral, {"head_dim": 32}, id="Mistral with wide heads"),
    ],
)
def test_safetensors_give_the_answers_of_transformers(
    tmp_path: Path, make: Any, variant: dict[str, Any]
) -> None:
    model = make(**variant)
    assert_parity(write_safetensors(tmp_path, model), model)


@pytest.mark.parametrize(
    ("make", "name"), [(make_qwen2, "qwen2"), (make_qwen3, "qwen3"), (make_mistral, "llama")]
)
def test_gguf_gives_the_answers_of_transformers(tmp_path: Path, make: Any, name: str) -> None:
    model = make()
    assert_parity(write_gguf(tmp_path / "model.gguf", model, architecture=name), model)


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("make", [make_qwen2, make_qwen3, make_mistral])
def test_every_layer_is_the_same_program(tmp_path: Path, make: Any, layers: int) -> None:
    path = write_safetensors(tmp_path, make(num_hidden_layers=layers))
    assert pieces(path) == expected_pieces(layers)


def test_qwen2_has_biases_where_its_class_has_them_whatever_the_file_says(tmp_path: Path) -> None:
    folder = edit(write_safetensors(tmp_path, make_qwen2()), attention_bias=False, mlp_bias=True)
    config: Any = read_model_config(folder)
    biases = (config.attention_bias, config.attention_output_bias, config.mlp_bias)
    assert biases == (True, False, False)
    stored = load_file(folder / "model.safetensors")
    assert sum(name.endswith("bias") for name in stored) == 3 * config.num_layers
    load(folder)


def test_qwen3_without_a_head_size_has_heads_of_128(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path, make_qwen3(head_dim=128))
    edit(folder, head_dim=None)
    assert read_model_config(folder).head_dim == 128


def test_all_variants_are_among_the_supported_architectures() -> None:
    names = {"MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"}
    assert names <= set(supported_architectures())


def window_of(tmp_path: Path, make: Any, **changes: Any) -> int | None:
    return read_model_config(edit(write_safetensors(tmp_path, make()), **changes)).sliding_window


@pytest.mark.parametrize(
    ("make", "changes", "window"),
    [
        (make_mistral, {"sliding_window": None}, None),
        (make_mistral, {"sliding_window": 40}, 40),
        (make_qwen2, {"use_sliding_window": False, "sliding_window": 40}, None),
        (make_qwen2, {"use_sliding_window": True, "sliding_window": None}, None),
        (make_qwen2, {"use_sliding_window": True, "sliding_window": 40, "layer_types": None, "max_window_layers": 2}, 40),
        (make_qwen2, {"use_sliding_window": True, "sliding_window": 40, "layer_types": None, "max_window_layers": 3}, None),
        (make_qwen3, {"use_sliding_window": True, "sliding_window": 40, "layer_types": ["full_attention"] * 3}, None),
        (make_qwen3, {"use_sliding_window": True, "sliding_window": 40, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, 40),
    ],
)  # fmt: skip
def test_the_sliding_window_is_read_as_its_class_means_it(
    tmp_path: Path, make: Any, changes: dict[str, Any], window: int | None
) -> None:
    assert window_of(tmp_path, make, **changes) == window


def test_a_mistral_without_the_key_has_the_window_of_its_class(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path, make_mistral())
    data = json.loads((folder / "config.json").read_text())
    data.pop("sliding_window", None)
    (folder / "config.json").write_text(json.dumps(data))
    assert read_model_config(folder).sliding_window == MistralConfig().sliding_window


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"layer_types": None, "max_window_layers": 0}, {0: 40, 1: 40, 2: 40}),
        ({"layer_types": None, "max_window_layers": 2}, {2: 40}),
        (
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            {0: 40, 2: 40},
        ),
    ],
)
def test_layers_slide_where_the_file_says_so_and_sequences_can_leave_the_window(
    tmp_path: Path, changes: dict[str, Any], windows: dict[int, int]
) -> None:
    folder = write_safetensors(tmp_path, make_qwen2())
    config = read_model_config(edit(folder, use_sliding_window=True, sliding_window=40, **changes))
    assert config.windows(41) == windows
    assert config.windows(None) == windows
    assert config.windows(40) == {}


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["full_attention", "chunked_attention", "full_attention"], "chunked_attention"),
        (["sliding_attention"], "1 kinds of layers for 3 layers"),
    ],
)
def test_other_kinds_of_layers_are_refused(tmp_path: Path, kinds: list[str], message: str) -> None:
    folder = write_safetensors(tmp_path, make_qwen2())
    edit(folder, use_sliding_window=True, sliding_window=40, layer_types=kinds)
    with pytest.raises(ModelError, match=message):
        read_model_config(folder)


@pytest.mark.parametrize("window", [1, 16, 33])
def test_mistral_beyond_its_window_answers_as_transformers_does(
    tmp_path: Path, window: int
) -> None:
    model = make_mistral(sliding_window=window)
    path = write_safetensors(tmp_path, model)
    assert_parity(path, model)
    wide = make_mistral()
    assert (our_logits(load(path), IDS) - reference_logits(wide, IDS)).abs().max() > 1e-2


@pytest.mark.parametrize("first", [0, 1])
def test_qwen_slides_from_a_layer_on_as_in_transformers(tmp_path: Path, first: int) -> None:
    kinds = ["full_attention"] * first + ["sliding_attention"] * (3 - first)
    model = make_qwen2(
        use_sliding_window=True, sliding_window=24, max_window_layers=first, layer_types=kinds
    )
    path = write_safetensors(tmp_path, model)
    assert len(load(path).windows) == 3 - first
    assert_parity(path, model)


def test_a_window_wider_than_the_model_is_long_never_matters(tmp_path: Path) -> None:
    load(write_safetensors(tmp_path, make_mistral(sliding_window=4096)))


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_an_engine_with_a_window_answers_as_transformers_does(tmp_path: Path, mode: str) -> None:
    model = make_mistral(sliding_window=24)
    folder = write_safetensors(tmp_path, model)
    limits = {"maxNumBatchedTokens": 20, "blockSize": 8}
    core = started(engine_args(folder, mode=mode, engine=limits))
    prompts = [IDS[:20], IDS[:60], IDS[20:50], [*IDS[:40], 9]]
    for _ in range(2):
        assert generate(core, prompts) == greedy_reference(model, prompts, 16)
    assert core.stats()["prefix_cache_hits"] > 0
