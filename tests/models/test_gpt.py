"""OPT and GPT-2 give the answers of transformers, and what would be computed wrongly is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.engines import engine_args, generate, greedy_reference, started
from tests.models.checkpoints import (
    make_llama,
    make_random,
    our_logits,
    write_gguf,
    write_safetensors,
)
from tests.models.parity import IDS, assert_parity, expected_pieces, load, pieces
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from kerf_runtime.errors import ModelError
from kerf_runtime.layers.linear import Fp8Linear
from kerf_runtime.layers.quantization import quantize_rows
from kerf_runtime.models import read_model_config, supported_architectures

OPT: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
GPT2: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 320,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_opt(**changes: Any) -> OPTForCausalLM:
    return make_random(OPTForCausalLM, OPTConfig(**{**OPT, **changes}))


def make_gpt2(**changes: Any) -> GPT2LMHeadModel:
    return make_random(GPT2LMHeadModel, GPT2Config(**{**GPT2, **changes}))


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder


VARIANTS = [
    pytest.param(make_opt, {}, id="OPT"),
    pytest.param(make_opt, {"do_layer_norm_before": False}, id="OPT with norms behind"),
    pytest.param(make_opt, {"word_embed_proj_dim": 32}, id="OPT with a narrow embedding"),
    pytest.param(
        make_opt,
        {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
        id="OPT as its 350M: narrow embedding, norms behind",
    ),
    pytest.param(make_opt, {"tie_word_embeddings": False}, id="OPT with its own head"),
    pytest.param(make_opt, {"activation_function": "gelu"}, id="OPT with gelu"),
    pytest.param(make_gpt2, {}, id="GPT-2"),
    pytest.param(make_gpt2, {"n_inner": 80}, id="GPT-2 with another inner size"),
    pytest.param(make_gpt2, {"activation_function": "relu"}, id="GPT-2 with relu"),
    pytest.param(make_gpt2, {"activation_function": "gelu_pytorch_tanh"}, id="GPT-2 with tanh"),
    pytest.param(make_gpt2, {"layer_norm_epsilon": 1e-2}, id="GPT-2 with another epsilon"),
    pytest.param(make_gpt2, {"tie_word_embeddings": False}, id="GPT-2 with its own head"),
]


@pytest.mark.parametrize(("make", "variant"), VARIANTS)
def test_safetensors_give_the_answers_of_transformers(
    tmp_path: Path, make: Any, variant: dict[str, Any]
) -> None:
    model = make(**variant)
    assert_parity(write_safetensors(tmp_path, model), model)


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize(
    ("make", "size", "variant"),
    [
        pytest.param(make_opt, "num_hidden_layers", {}, id="OPT"),
        pytest.param(
            make_opt,
            "num_hidden_layers",
            {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
            id="OPT-350M",
        ),
        pytest.param(make_gpt2, "n_layer", {}, id="GPT-2"),
    ],
)
def test_every_layer_is_the_same_program(
    tmp_path: Path, make: Any, size: str, variant: dict[str, Any], layers: int
) -> None:
    path = write_safetensors(tmp_path, make(**{size: layers, **variant}))
    assert pieces(path) == expected_pieces(layers)


@pytest.mark.parametrize(("make", "base"), [(make_opt, "model."), (make_gpt2, "transformer.")])
def test_names_without_the_head_s_prefix_are_read_too(tmp_path: Path, make: Any, base: str) -> None:
    model = make()

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            assert name.startswith(base)
            tensors[name.removeprefix(base)] = tensors.pop(name)

    assert_parity(edit_weights(write_safetensors(tmp_path, model), shorten), model)


@pytest.mark.parametrize("base", ["transformer.", ""])
def test_the_causal_masks_of_older_gpt2_files_are_ignored(tmp_path: Path, base: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[base + name.removeprefix("transformer.")] = tensors.pop(name)
        tensors[f"{base}h.2.attn.bias"] = torch.ones(1, 1, 4, 4)
        tensors[f"{base}h.0.attn.masked_bias"] = torch.tensor(-1e4)

    load(edit_weights(write_safetensors(tmp_path, make_gpt2()), change))


def test_a_tied_head_is_one_tensor_even_if_it_is_stored_twice(tmp_path: Path) -> None:
    model = make_opt()
    path = edit_weights(
        write_safetensors(tmp_path, model), lambda t: t.update({"lm_head.weight": torch.zeros(3)})
    )
    loaded: Any = load(path)
    assert loaded.model.lm_head.weight is loaded.model.embedding.weight


@pytest.mark.parametrize("make", [make_opt, make_gpt2])
def test_a_sequence_may_be_as_long_as_the_table_of_positions(tmp_path: Path, make: Any) -> None:
    key = "max_position_embeddings" if make is make_opt else "n_positions"
    model = make(**{key: len(IDS)})
    assert_parity(write_safetensors(tmp_path, model), model)


@pytest.mark.parametrize("make", [make_opt, make_gpt2])
def test_the_engine_answers_as_transformers_with_chunked_prefill(tmp_path: Path, make: Any) -> None:
    model = make()
    core = started(engine_args(write_safetensors(tmp_path, model)))
    prompts = [IDS[:1], IDS[:70], IDS[5:40]]
    expected = greedy_reference(model, prompts, 16)
    assert generate(core, prompts) == expected
    assert generate(core, prompts, together=False) == expected


@pytest.mark.parametrize("make", [make_opt, make_gpt2])
def test_weights_are_quantised_on_load_with_one_scale_per_output(tmp_path: Path, make: Any) -> None:
    model = make()
    loaded = load(write_safetensors(tmp_path, model), quantization="fp8")
    layers: Any = [m for m in loaded.model.modules() if isinstance(m, Fp8Linear)]
    assert len(layers) == 4 * loaded.config.num_layers
    stored = model.state_dict()
    name = (
        "model.decoder.layers.0.fc1.weight"
        if make is make_opt
        else "transformer.h.0.mlp.c_fc.weight"
    )
    weight = stored[name] if make is make_opt else stored[name].t()
    up: Any = loaded.model.get_submodule("layers.0.mlp.up_proj")
    restored = up.weight.float() * up.weight_scale
    # e4m3 rounds to 3 bits of mantissa.
    assert ((restored - weight).abs() <= weight.abs() / 16 + up.weight_scale / 256).all()


def test_an_opt_that_is_stored_in_fp8_is_the_one_that_is_quantised_on_load(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path, make_opt())
    expected = our_logits(load(folder, quantization="fp8"), IDS)

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".layers." in n and tensors[n].ndim == 2]:
            tensors[name], tensors[f"{name}_scale"] = quantize_rows(tensors[name])

    edit_weights(folder, quantize)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert torch.equal(
        our_logits(load(edit_config(folder, quantization_config=method)), IDS), expected
    )


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (make_opt, {"activation_function": "silu"}, "activation 'silu' is not supported. Supported: relu, gelu"),
        (make_opt, {"enable_bias": False}, "enable_bias: linear layers without biases"),
        (make_opt, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine: norms without weights"),
        (make_opt, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm: a model without its last norm"),
        (make_opt, {"do_layer_norm_before": "yes"}, "expected true or false, found 'yes'"),
        (make_opt, {"num_attention_heads": 5}, "num_attention_heads: 5 heads cannot share a hidden size of 64"),
        (make_opt, {"ffn_dim": None}, "ffn_dim: the value is missing"),
        (make_opt, {"dtype": "int8"}, "data type 'int8' is not supported"),
        (make_opt, {"quantization_config": {"quant_method": "gptq"}}, "quantisation 'gptq' is not supported"),
        (make_gpt2, {"scale_attn_weights": False}, "scale_attn_weights: attention that is not scaled"),
        (make_gpt2, {"scale_attn_by_inverse_layer_idx": True}, "attention scaled by layer"),
        (make_gpt2, {"add_cross_attention": True}, "cross-attention is not supported"),
        (make_gpt2, {"quantization_config": {"quant_method": "fp8"}}, "quantised checkpoints of this architecture"),
        (make_gpt2, {"activation_function": "tanh"}, "activation 'tanh' is not supported"),
        (make_gpt2, {"n_head": 7}, "n_head: 7 heads cannot share"),
        (make_gpt2, {"n_positions": 0}, "n_positions: expected an integer of at least 1, found 0"),
    ],
)  # fmt: skip
def test_a_configuration_that_would_run_wrongly_is_refused(
    tmp_path: Path, make: Any, change: dict[str, Any], message: str
) -> None:
    folder = edit_config(write_safetensors(tmp_path, make()), **change)
    with pytest.raises(ModelError, match=message):
        read_model_config(folder)


def test_a_matrix_that_is_not_transposed_in_the_file_is_refused_with_both_shapes(
    tmp_path: Path,
) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    folder = edit_weights(
        write_safetensors(tmp_path, make_gpt2()),
        lambda t: t.update({name: t[name].t().contiguous()}),
    )
    with pytest.raises(
        ModelError, match=r"c_fc\.weight has shape \[256, 64\], expected \[64, 256\]"
    ):
        load(folder)


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    name = "model.decoder.layers.1.self_attn.k_proj.bias"
    folder = edit_weights(write_safetensors(tmp_path, make_opt()), lambda t: t.pop(name))
    with pytest.raises(
        ModelError, match=r"1 of \d+ tensors are missing: .*1\.self_attn\.k_proj\.bias"
    ):
        load(folder)


def write_gpt2_gguf(path: Path, model: GPT2LMHeadModel) -> Path:
    """As a GGUF file: matrices [outputs, inputs], names of that format."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    names = {
        "wte": "token_embd",
        "wpe": "position_embd",
        "ln_f": "output_norm",
        "lm_head": "output",
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.removeprefix("transformer.").rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        layer = ""
        if stem.startswith("h."):
            _, index, stem = stem.split(".", 2)
            layer = f"blk.{index}."
        turned = ".c_" in stem and leaf == "weight"
        values = (tensor.t() if turned else tensor).contiguous().numpy()
        writer.add_tensor(f"{layer}{names[stem]}.{leaf}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({}, id="tied head"),
        pytest.param({"tie_word_embeddings": False}, id="separate head"),
        pytest.param({"n_inner": 80, "layer_norm_epsilon": 1e-3}, id="other sizes"),
    ],
)
def test_a_gguf_gpt2_gives_the_answers_of_transformers(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    model = make_gpt2(**variant)
    assert_parity(write_gpt2_gguf(tmp_path / "model.gguf", model), model)


def test_a_gguf_opt_is_refused_with_what_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_llama(), architecture="opt")
    with pytest.raises(
        ModelError, match=r"opt is not supported.*Supported: llama, qwen2, qwen3, gpt2"
    ):
        read_model_config(path)


def test_both_are_among_the_supported_architectures() -> None:
    assert {"OPTForCausalLM", "GPT2LMHeadModel"} <= set(supported_architectures())
