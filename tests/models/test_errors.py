"""What is said about checkpoints that cannot be used: what, where, and what to do."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import make_llama, write_gguf, write_safetensors

from kerf_runtime.errors import ModelError
from kerf_runtime.models import load_model, model_config_digest, read_model_config


def load(path: Path) -> Any:
    return load_model(path, dtype=torch.float32, device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "model", make_llama())


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", make_llama())


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_missing_folder_shows_what_is_there_instead(tmp_path: Path) -> None:
    (tmp_path / "other-model").mkdir()
    with pytest.raises(ModelError, match="does not exist") as caught:
        read_model_config(tmp_path / "model" / "deeper")
    assert "other-model" in str(caught.value)


def test_a_folder_without_a_checkpoint_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"it holds notes\.txt.*config\.json"):
        read_model_config(tmp_path)


def test_a_folder_with_two_gguf_files_lists_them(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        read_model_config(tmp_path)


def test_a_shard_of_a_model_is_called_one(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m-00001-of-00003.gguf",
        make_llama(num_hidden_layers=1),
        extra={"split.count": 3, "split.no": 0},
    )
    with pytest.raises(ModelError, match=r"one of 3 shards of a model\. .*merge them"):
        read_model_config(path)


def test_a_model_in_one_shard_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_llama(), extra={"split.count": 1})
    assert read_model_config(path).num_layers == 3


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "merge them into one"),
        (["m-Q4_0.gguf", "m-Q8_0-00001-of-00001.gguf"], "Give the path of one of them"),
    ],
)
def test_a_folder_of_shards_says_to_merge_them(tmp_path: Path, names: list[str], hint: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=f"2 GGUF files: {names[0]}.*{hint}"):
        read_model_config(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        read_model_config(tmp_path / "model.bin")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_truncated_gguf_file_is_named_as_such_before_anything_is_loaded(
    gguf_file: Path, share: float
) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match="truncated") as caught:
        read_model_config(gguf_file)
    assert "compare its size" in str(caught.value)


def test_a_gguf_file_cut_anywhere_in_its_header_is_called_truncated(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_llama(num_hidden_layers=1))
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, 3000, 37):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match="truncated"):
            read_model_config(cut)


def test_a_file_that_is_no_gguf_shows_how_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<!DOCTYPE html><html>not found</html>")
    with pytest.raises(ModelError, match=r"it starts with b'<!DO'"):
        read_model_config(path)


def test_another_gguf_version_is_named(gguf_file: Path) -> None:
    data = bytearray(gguf_file.read_bytes())
    data[4:8] = struct.pack("<I", 9)
    gguf_file.write_bytes(data)
    with pytest.raises(ModelError, match="GGUF version 9"):
        read_model_config(gguf_file)


def test_an_unsupported_gguf_architecture_lists_the_supported_ones(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes().replace(b"llama", b"bloom", 1))
    with pytest.raises(ModelError, match=r"architecture bloom is not supported.*Supported: llama"):
        read_model_config(gguf_file)


def test_an_unsupported_class_lists_the_supported_ones(folder: Path) -> None:
    edit_config(folder, architectures=["BloomForCausalLM"])
    with pytest.raises(ModelError, match=r"BloomForCausalLM is not supported.*LlamaForCausalLM"):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON: .* at line 1"),
        ("[" * 10000, "not valid JSON: .*recursion"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not valid JSON: .*digits"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "no architecture is named"),
        ('{"architectures": ["LlamaForCausalLM"]}', "num_attention_heads: the value is missing"),
        ("\udcff", "not UTF-8"),
    ],
    ids=lambda value: value[:40],
)
def test_a_bad_config_file_is_explained(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=message) as caught:
        read_model_config(folder)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"vocab_size": "many"}, "vocab_size: expected an integer of at least 1, found 'many'"),
        ({"num_hidden_layers": 0}, "found 0"),
        ({"num_hidden_layers": True}, "found True"),
        ({"rms_norm_eps": -1}, "expected a number above 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported. Supported: default, linear, llama3"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor: the value is missing"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embedding is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantisation 'gptq' is not supported"),
        ({"dtype": "float8"}, "data type 'float8' is not supported"),
        ({"eos_token_id": "x"}, "expected a token id"),
        ({"head_dim": 15}, "head size 15 is odd"),
    ],
)  # fmt: skip
def test_a_configuration_that_would_run_wrongly_is_refused(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit_config(folder, **change)
    with pytest.raises(ModelError, match=message):
        read_model_config(folder)


def test_missing_tensors_are_counted_and_named(folder: Path) -> None:
    edit_weights(folder, lambda t: [t.pop(n) for n in list(t) if "layers.1.mlp" in n] and None)
    with pytest.raises(
        ModelError, match=r"3 of 30 tensors are missing: model\.layers\.1\.mlp\.down_proj"
    ):
        load(folder)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_weights(folder, lambda t: t.update({name: torch.zeros(16, 64)}))
    with pytest.raises(
        ModelError, match=r"k_proj\.weight has shape \[16, 64\], expected \[32, 64\]"
    ):
        load(folder)


def test_tensors_that_would_be_left_out_are_refused(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    edit_weights(folder, lambda t: t.update({name: torch.zeros(16)}))
    with pytest.raises(ModelError, match=r"1 tensors are unknown.*q_norm"):
        load(folder)


def test_stored_rotary_frequencies_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda t: t.update({name: torch.zeros(8)}))
    load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path, make_llama(), max_shard_size="100KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match=r"1 of \d+ weight files are missing: model-00002"):
        load(folder)


def test_a_tensor_that_does_not_fit_is_looked_for_in_its_shard(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path, make_llama(), max_shard_size="100KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.down_proj.weight"
    shard = folder / index["weight_map"][name]
    save_file({**load_file(shard), name: torch.zeros(3)}, shard)
    with pytest.raises(ModelError, match=r"down_proj\.weight has shape") as caught:
        load(folder)
    assert str(shard) in str(caught.value)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/hostname"])
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_safetensors(tmp_path / "model", make_llama(), max_shard_size="100KB")
    (tmp_path / "elsewhere.safetensors").write_bytes(b"x")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map[next(iter(weight_map))] = name
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=f"leads out of its folder: {name}"):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_weights_that_nobody_writes_are_not_waited_for(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / name)
    if name.endswith(".gguf"):
        with pytest.raises(ModelError, match="neither a file nor a folder"):
            read_model_config(folder / name)
    else:
        with pytest.raises(ModelError, match="not in a regular file"):
            load(folder)


def test_a_truncated_safetensors_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ModelError, match=r"model\.safetensors: the safetensors file cannot be read"
    ):
        load(folder)


def test_a_folder_without_weights_says_which_format_is_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load(folder)


def test_the_digest_depends_on_the_architecture_and_not_on_place_format_or_tokens(
    folder: Path, tmp_path: Path
) -> None:
    digest = model_config_digest(folder)
    assert len(digest) == 64
    assert model_config_digest(write_safetensors(tmp_path / "copy", make_llama(seed=5))) == digest
    edit_config(folder, eos_token_id=[5, 6])
    assert model_config_digest(folder) == digest
    edit_config(folder, rms_norm_eps=1e-3)
    assert model_config_digest(folder) != digest
