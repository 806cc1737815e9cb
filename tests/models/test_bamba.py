"""Bamba answers as transformers does; what its mixer or attention would do wrongly is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.checkpoints import make_bamba, our_logits, write_safetensors
from tests.models.parity import IDS, assert_parity, load, pieces

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.errors import ModelError
from kerf_runtime.models import read_model_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("bamba"), make_bamba())


def edited(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of the configuration, without weights."""
    data = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**data, **changes}))
    return to


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "attn_layer_indices": [0, 3],
            "mamba_n_groups": 1,
            "mamba_d_conv": 2,
            "tie_word_embeddings": True,
        },
        {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_expand": 1,
        },
    ],
    ids=["plain", "one group", "biases"],
)
def test_logits_and_greedy_answers_are_those_of_transformers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = make_bamba(**options)
    assert_parity(write_safetensors(tmp_path, model), model)


def test_projections_around_the_mixer_can_be_quantised_while_they_are_loaded(
    tmp_path: Path,
) -> None:
    path = write_safetensors(tmp_path, make_bamba(mamba_n_heads=16))
    expected, found = our_logits(load(path), IDS), our_logits(load(path, quantization="fp8"), IDS)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.2


def test_attention_and_mixers_are_cut_out_and_equal_pieces_are_one_program(folder: Path) -> None:
    with compilation_counter.expect(pieces_seen=9, capturable_pieces_seen=5):
        # In front, between two mixers, between mixer and attention and back, behind.
        assert pieces(folder) == (9, 5)


def test_the_configuration_tells_layers_and_states_apart(folder: Path) -> None:
    config = read_model_config(folder)
    assert config.num_attention_layers == 1
    shape = config.state_shape
    assert shape is not None
    assert shape.layers == 3
    # A width of 128, and B and C of 16 columns for 2 groups; 3 inputs before the token's own.
    assert (shape.taps, shape.channels) == (3, 128 + 2 * 2 * 16)
    assert (shape.heads, shape.head_dim, shape.columns) == (8, 16, 16)
    assert shape.bytes_per_sequence(2) == 3 * (3 * 192 * 2 + 8 * 16 * 16 * 4)


def test_the_names_of_layers_are_those_of_their_kind(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.attention_layers == ("layers.2.attention",)
    assert loaded.mixer_layers == ("layers.0.mixer", "layers.1.mixer", "layers.3.mixer")
    assert len(IDS) > 64  # more than one chunk of the mixer


@pytest.mark.parametrize(
    ("changes", "key", "what"),
    [
        ({"time_step_limit": [0.01, 0.1]}, "time_step_limit", "Supported: 0 and infinity"),
        ({"attn_layer_indices": None}, "attn_layer_indices", "0 of 4 layers have attention"),
        ({"attn_layer_indices": [0, 1, 2, 3]}, "attn_layer_indices", "4 of 4 layers"),
        ({"attn_layer_indices": [4]}, "attn_layer_indices", "layer 4 is named"),
        ({"mamba_d_head": 8}, "mamba_d_head", "8 heads of 8 do not make"),
        ({"mamba_n_groups": 3}, "mamba_n_groups", "8 heads cannot share 3"),
        ({"mamba_d_conv": 1}, "mamba_d_conv", "at least 2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "4 heads cannot share 3"),
        ({"hidden_act": "relu"}, "hidden_act", "'relu' is not supported"),
        (
            {"partial_rotary_factor": 1.0, "rope_parameters": None},
            "partial_rotary_factor",
            "1.0 of",
        ),
        ({"head_dim": 6}, "head_dim", "3 dimensions of a head"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    changes: dict[str, Any], key: str, what: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read_model_config(edited(folder, tmp_path, **changes))
    assert str(caught.value.where).endswith(f"config.json: {key}")
    assert what in str(caught.value)


@pytest.mark.parametrize("limit", [None, [0.0, float("inf")]])
def test_steps_without_a_limit_may_be_spelled_in_other_ways(
    limit: Any, folder: Path, tmp_path: Path
) -> None:
    assert read_model_config(edited(folder, tmp_path, time_step_limit=limit)) == read_model_config(
        folder
    )
