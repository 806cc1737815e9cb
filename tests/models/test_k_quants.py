"""Q4_K and Q6_K of GGUF files are expanded to exactly what was stored, and models of them compute."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models.checkpoints import make_llama, our_logits, reference_logits, write_gguf
from tests.models.k_quants import Q4KCodes, Q6KCodes, expanded, quantize

from kerf_runtime.models import load_model
from kerf_runtime.models.checkpoint import find_checkpoint
from kerf_runtime.models.sources import open_source

KINDS = {"Q4_K": gguf.GGMLQuantizationType.Q4_K, "Q6_K": gguf.GGMLQuantizationType.Q6_K}
IDS = [(7 * i * i + 3) % 320 for i in range(60)]


def read_back(folder: Path, data: np.ndarray, kind: str) -> np.ndarray:
    """One tensor of ``data``, written to a GGUF file and read by us."""
    path = folder / "tensor.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_source(find_checkpoint(path)) as source:
        return source.read("t").numpy()


def random_codes(kind: str, blocks: int, seed: int) -> Q4KCodes | Q6KCodes:
    random = np.random.default_rng(seed)
    d = random.normal(size=blocks).astype(np.float16)
    if kind == "Q6_K":
        scales = random.integers(-128, 128, (blocks, 16))
        return Q6KCodes(d, scales, random.integers(0, 64, (blocks, 16, 16)))
    return Q4KCodes(
        d,
        random.normal(size=blocks).astype(np.float16),
        random.integers(0, 64, (blocks, 8)),
        random.integers(0, 64, (blocks, 8)),
        random.integers(0, 16, (blocks, 8, 32)),
    )


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), columns=st.integers(1, 3))
def test_every_code_scale_and_minimum_is_read_as_it_was_stored(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, rows: int, columns: int
) -> None:
    codes = random_codes(kind, rows * columns, seed)
    found = read_back(tmp_path_factory.mktemp("k"), codes.pack().reshape(rows, -1), kind)
    assert found.shape == (rows, columns * 256)
    np.testing.assert_array_equal(found, codes.values().reshape(found.shape))


@pytest.mark.parametrize(("kind", "error"), [("Q4_K", 0.1), ("Q6_K", 0.03)])
def test_what_is_stored_is_close_to_what_was_meant(kind: str, error: float) -> None:
    values = np.random.default_rng(0).normal(size=(16, 512)).astype(np.float32)
    found = expanded(values, KINDS[kind])
    assert np.abs(found - values).mean() / np.abs(values).mean() < error


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_the_logits_of_its_expanded_weights(tmp_path: Path, kind: str) -> None:
    model = make_llama(hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    path = write_gguf(tmp_path / "model.gguf", model, kind=KINDS[kind], quantize=quantize)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(expanded(parameter.numpy(), KINDS[kind])))
    loaded = load_model(path, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(
        our_logits(loaded, IDS), reference_logits(model, IDS), atol=1e-3, rtol=1e-3
    )
