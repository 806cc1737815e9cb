"""FP8 checkpoints and weights quantised on load: the logits of a model whose linears round as FP8 does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import (
    make_llama,
    our_logits,
    reference_logits,
    smollm2_path,
    write_gguf,
    write_safetensors,
)
from tests.models.fp8_tolerance import TEXT, difference, within_tolerance
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from kerf_runtime.compilation.factors import parameter_fingerprint
from kerf_runtime.errors import ModelError
from kerf_runtime.layers.linear import Fp8Linear
from kerf_runtime.models import load_model, load_tokenizer, model_config_digest, read_model_config
from kerf_runtime.models.config import Fp8Scheme

IDS = [(7 * i * i + 3) % 320 for i in range(90)]
FP8 = torch.float8_e4m3fn
INPUT_SCALE = 0.05


def fp8_config(scheme: str = "dynamic", **changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": scheme, **changes}


def compressed(
    *, dynamic: bool = True, strategy: str = "channel", group: Any = None, **changes: Any
) -> dict[str, Any]:
    inputs = {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": strategy},
                "input_activations": {"num_bits": 8, "type": "float", **inputs},
                **(group or {}),
            }
        },
        **changes,
    }


def round_to_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(FP8).float() * scale


def weight_scale_of(weight: Tensor, strategy: str) -> Tensor:
    if strategy == "channel":
        return weight.abs().amax(1, keepdim=True) / 448
    return weight.abs().max() / 448


def linears(model: LlamaForCausalLM) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "_proj" in n}


def quantize_reference(model: LlamaForCausalLM, *, strategy: str, static: bool) -> None:
    """Make transformers' float32 model round weights and inputs as FP8 does."""

    def round_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        scale = INPUT_SCALE if static else args[0].abs().amax(-1, keepdim=True) / 448
        return (round_to_fp8(args[0], scale),)

    for module in linears(model).values():
        module.weight.data = round_to_fp8(
            module.weight.data, weight_scale_of(module.weight.data, strategy)
        )
        module.register_forward_pre_hook(round_input)


def write_fp8(
    folder: Path,
    model: LlamaForCausalLM,
    config: dict[str, Any],
    *,
    strategy: str = "tensor",
    static: bool = False,
    edit: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
) -> Path:
    """A checkpoint with FP8 weights; its quantisation is ``config``."""
    write_safetensors(folder, model)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in linears(model):
        weight = tensors[f"{name}.weight"]
        scale = weight_scale_of(weight, strategy)
        tensors[f"{name}.weight"] = (weight / scale).clamp(-448, 448).to(FP8)
        tensors[f"{name}.weight_scale"] = scale.clone()
        if static:
            tensors[f"{name}.input_scale"] = torch.tensor(INPUT_SCALE)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def load(path: Path, **options: Any) -> Any:
    return load_model(path, **{"dtype": torch.float32, "device": "cpu", **options})


@pytest.mark.parametrize(
    ("config", "strategy", "static"),
    [
        pytest.param(fp8_config("dynamic"), "tensor", False, id="fp8, dynamic"),
        pytest.param(fp8_config("static"), "tensor", True, id="fp8, static"),
        pytest.param(compressed(), "channel", False, id="compressed-tensors, per token"),
        pytest.param(
            compressed(dynamic=False, strategy="tensor"),
            "tensor",
            True,
            id="compressed-tensors, static",
        ),
    ],
)
@pytest.mark.parametrize("biases", [False, True])
def test_an_fp8_checkpoint_gives_the_logits_of_a_model_that_rounds_as_fp8_does(
    tmp_path: Path, config: dict[str, Any], strategy: str, static: bool, biases: bool
) -> None:
    model = make_llama(attention_bias=biases, mlp_bias=biases)
    path = write_fp8(tmp_path, model, config, strategy=strategy, static=static)
    loaded = load(path)
    assert loaded.config.quantization == Fp8Scheme(static=static, stored=True)
    plain = reference_logits(model, IDS)
    quantize_reference(model, strategy=strategy, static=static)
    expected, found = reference_logits(model, IDS), our_logits(loaded, IDS)
    # A value that falls on the other side of an FP8 boundary moves by 1/8 of itself: compare in the mean.
    error = difference(found, expected).relative_error
    assert error < 0.02
    assert difference(found, plain).relative_error > 2 * error


def test_parts_of_a_fused_projection_keep_their_own_weight_scales_and_share_the_largest_input_scale(
    tmp_path: Path,
) -> None:
    prefix = "model.layers.0.self_attn"

    def differ(tensors: dict[str, Tensor]) -> None:
        for factor, part in enumerate(("q_proj", "k_proj", "v_proj"), start=1):
            tensors[f"{prefix}.{part}.weight_scale"] = torch.tensor(0.5 * factor)
            tensors[f"{prefix}.{part}.input_scale"] = torch.tensor([0.1 * factor])

    path = write_fp8(tmp_path, make_llama(), fp8_config("static"), static=True, edit=differ)
    layer = load(path).model.layers[0].attention.qkv_proj
    assert layer.weight_scale.shape == (128, 1)
    assert layer.weight_scale[:, 0].tolist() == [0.5] * 64 + [1.0] * 32 + [1.5] * 32
    torch.testing.assert_close(layer.input_scale.data, torch.tensor([0.3]))


@pytest.mark.parametrize("writer", ["safetensors", "gguf"])
def test_weights_are_quantised_on_load_per_channel(tmp_path: Path, writer: str) -> None:
    model = make_llama()
    path = (
        write_safetensors(tmp_path, model)
        if writer == "safetensors"
        else write_gguf(tmp_path / "model.gguf", model)
    )
    loaded = load(path, quantization="fp8")
    assert loaded.config.quantization == Fp8Scheme(static=False, stored=False)
    quantize_reference(model, strategy="channel", static=False)
    found, expected = our_logits(loaded, IDS), reference_logits(model, IDS)
    assert difference(found, expected).relative_error < 0.02


def test_embedding_head_and_norms_stay_in_the_models_data_type(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path, make_llama(attention_bias=True))
    loaded = load(path, quantization="fp8", dtype=torch.bfloat16)
    kinds: dict[str, set[torch.dtype]] = {}
    for name, parameter in loaded.model.named_parameters():
        kinds.setdefault(name.rpartition(".")[2], set()).add(parameter.dtype)
    assert kinds == {
        "weight": {torch.bfloat16, FP8},
        "weight_scale": {torch.float32},
        "bias": {torch.bfloat16},
    }
    assert not isinstance(loaded.model.lm_head, Fp8Linear)
    assert loaded.model.embedding.weight.dtype is torch.bfloat16
    state = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert not any(tensor.is_meta for tensor in state)
    assert loaded.model.layers[0].mlp.down_proj.unit.tolist() == [1.0]
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_an_fp8_checkpoint_is_loaded_as_it_is_when_fp8_is_asked_for(tmp_path: Path) -> None:
    path = write_fp8(tmp_path, make_llama(), fp8_config("static"), static=True)
    assert load(path, quantization="fp8").config.quantization == Fp8Scheme(True, True)


def test_another_quantisation_on_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"quantised to 'int4'.*Supported: fp8"):
        load(write_safetensors(tmp_path, make_llama()), quantization="int4")


def test_the_cache_tells_quantised_and_unquantised_models_apart(tmp_path: Path) -> None:
    model = make_llama()
    plain = write_safetensors(tmp_path / "plain", model)
    stored = write_fp8(tmp_path / "fp8", model, fp8_config())
    assert model_config_digest(plain) != model_config_digest(stored)
    prints = {
        parameter_fingerprint(load(path, quantization=how).model)
        for path, how in ((plain, None), (plain, "fp8"))
    }
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "quantisation 'gptq' is not supported"),
        (fp8_config(weight_block_size=[128, 128]), "one scale per block of a weight"),
        (fp8_config("per_token"), "expected 'static' or 'dynamic', found 'per_token'"),
        (fp8_config(ignored_layers=["model.layers.0.mlp.up_proj"]), "1 linear layers are not quantised, such as model.layers.0"),
        (compressed(format="pack-quantized"), "expected 'float-quantized', found 'pack-quantized'"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "a quantised KV cache is not supported"),
        (compressed(ignore=7), "expected a list of modules, found 7"),
        (compressed(strategy="group"), "expected 'tensor' or 'channel', found 'group'"),
        (compressed(group={"targets": ["Conv"]}), "found \\['Conv'\\]"),
        (compressed(group={"input_activations": None}), "input_activations: expected an object, found None"),
        (compressed(group={"weights": {"num_bits": 4, "type": "int"}}), "expected 8, found 4"),
        (compressed(config_groups={}), "expected one group of layers, found 0"),
        ("fp8", "expected an object, found 'fp8'"),
    ],
)  # fmt: skip
def test_a_quantisation_that_would_run_wrongly_is_refused_and_told_what_is_supported(
    tmp_path: Path, config: Any, message: str
) -> None:
    path = write_fp8(tmp_path, make_llama(num_hidden_layers=1), config)
    with pytest.raises(ModelError, match=message) as caught:
        read_model_config(path)
    assert "config.json: quantization_config" in str(caught.value)
    assert "compressed-tensors (format float-quantized" in str(caught.value)


def test_scales_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    model = make_llama(num_hidden_layers=1)
    missing = write_fp8(tmp_path / "a", model, fp8_config("static"))
    with pytest.raises(ModelError, match=r"7 of \d+ tensors are missing: .*down_proj\.input_scale"):
        load(missing)
    name = "model.layers.0.mlp.down_proj.weight_scale"
    wrong = write_fp8(
        tmp_path / "b", model, fp8_config(), edit=lambda t: t.update({name: torch.ones(2)})
    )
    with pytest.raises(
        ModelError, match=r"down_proj\.weight_scale has shape \[2\], expected \[\], "
    ):
        load(wrong)


def test_a_weight_of_another_data_type_than_the_configuration_says_is_refused(
    tmp_path: Path,
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    path = write_fp8(
        tmp_path, make_llama(), fp8_config(), edit=lambda t: t.update({name: t[name].float()})
    )
    with pytest.raises(ModelError, match=r"down_proj\.weight is stored as float32"):
        load(path)


def test_a_matrix_that_fp8_cannot_multiply_is_refused_before_the_weights_are_read(
    tmp_path: Path,
) -> None:
    path = write_safetensors(tmp_path, make_llama(intermediate_size=90))
    with pytest.raises(ModelError, match=r"180 outputs and 64 inputs.*multiples of 16"):
        load(path, quantization="fp8")


@pytest.mark.slow
def test_smollm2_in_fp8_is_within_the_stated_tolerance_of_the_unquantised_model(
    record_property: Callable[[str, object], None],
) -> None:
    path = smollm2_path()
    ids = load_tokenizer(path).encode(TEXT)
    expected = our_logits(load(path), ids)
    found = our_logits(load(path, quantization="fp8"), ids)
    for name, value in asdict(within_tolerance(found, expected)).items():
        record_property(name, value)
