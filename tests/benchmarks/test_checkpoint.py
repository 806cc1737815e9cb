"""Checkpoints for benchmarks: what a real one has, in shards, and a tokenizer that leaves no token without text."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.checkpoint import shard_plan, stored_tensors, write_checkpoint

from kerf_runtime.config.deployment import LoadFormat
from kerf_runtime.models import load_tokenizer
from kerf_runtime.models.loader import load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a checkpoint, and its bytes as its maker counted them."""
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint("tiny", folder, device=CPU)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4, 4, 4, 4], ["a", "b", "c", "d"]),
        ([1, 1, 1, 1, 1, 1, 1, 1], ["ab", "cd", "ef", "gh"]),
        ([8, 1, 1, 1, 1, 4], ["a", "bcde", "f"]),
        ([1, 1], ["a", "b"]),
    ],
    ids=["even", "many", "uneven", "fewer than shards"],
)
def test_shards_hold_all_tensors_in_order_and_about_the_same_number_of_bytes(sizes, expected):
    named = dict(zip("abcdefgh", sizes, strict=False))
    assert ["".join(part) for part in shard_plan(named, 4)] == expected


def test_the_engine_loads_the_weights_that_were_written(tiny):
    folder, size = tiny
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) == size
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    read = load_model(folder, dtype=torch.float32, device=CPU).model.state_dict()
    made = load_model(folder, dtype=torch.float32, device=CPU, load_format=LoadFormat.DUMMY)
    assert read.keys() == made.model.state_dict().keys()
    for name, value in made.model.state_dict().items():
        assert torch.equal(read[name], value), name


def test_an_opt_is_stored_under_the_names_of_its_checkpoints(tmp_path):
    config = {
        "architectures": ["OPTForCausalLM"],
        **{"num_hidden_layers": 1, "hidden_size": 8, "ffn_dim": 16, "num_attention_heads": 2},
        **{"vocab_size": 16, "max_position_embeddings": 32, "dtype": "float16", "eos_token_id": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = stored_tensors(tmp_path, device=CPU, dtype=torch.float16)
    assert tensors["decoder.layers.0.self_attn.q_proj.weight"].shape == (8, 8)
    assert tensors["decoder.embed_positions.weight"].shape == (34, 8)


def test_every_token_is_a_text_of_its_own_and_texts_become_tokens(tiny):
    tokenizer = load_tokenizer(tiny[0])
    assert tokenizer.vocab_size == 320
    texts = [tokenizer.decode([token]) for token in range(320)]
    assert all(text.isascii() and text for text in texts)
    assert len(set(texts)) == 320
    assert tokenizer.decode(tokenizer.encode("two words")) == "two words"
