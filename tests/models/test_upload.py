"""Weights are read in parts by several threads: every byte lands where it belongs, and nothing is lost silently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import make_llama, write_safetensors
from tests.models.stored import PART_BYTES, TENSORS, stored_tensors

from kerf_runtime.errors import ModelError
from kerf_runtime.models import load_model, parameters, upload
from kerf_runtime.models.sources import SafetensorsSource
from kerf_runtime.models.upload import StoredTensor, Upload


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_PART_BYTES", PART_BYTES)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Any]:
    with stored_tensors(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("threads", [1, 5])
def test_every_part_lands_where_it_belongs(source: Any, threads: int) -> None:
    filled = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with Upload("cpu", threads=threads) as moving:
        for name, target in filled.items():
            moving.start(target, source.stored(name))
        moving.finish(lambda: None)
        assert moving.pending_bytes == 0
    for name, tensor in TENSORS.items():
        assert torch.equal(filled[name].float(), tensor.float()), name


def test_a_fetched_tensor_is_complete(source: Any) -> None:
    with Upload("cpu") as moving:
        for name, tensor in TENSORS.items():
            fetched = moving.fetch(source.stored(name))
            assert fetched.dtype is tensor.dtype
            assert torch.equal(fetched.float(), tensor.float())


def test_rows_of_a_larger_parameter_are_filled_alone(source: Any) -> None:
    fused = torch.zeros(400, 17)
    with Upload("cpu") as moving:
        moving.start(fused[40:361], source.stored("large"))
    assert torch.equal(fused[40:361], TENSORS["large"])
    assert not fused[:40].any()
    assert not fused[361:].any()


def test_what_is_on_its_way_is_told(source: Any) -> None:
    told: list[int] = []
    with Upload("cpu") as moving:
        moving.start(torch.empty(321, 17), source.stored("large"))
        moving.finish(lambda: told.append(moving.pending_bytes))
    assert told[-1] == 0


def test_a_file_that_became_shorter_is_an_error(source: Any) -> None:
    stored = source.stored("large")
    with stored.path.open("r+b") as file:
        file.truncate(stored.offset + 5000)
    with Upload("cpu") as moving, pytest.raises(ModelError, match="middle of a tensor") as failed:
        moving.fetch(stored)
    assert str(stored.path) in str(failed.value)
    with pytest.raises(ModelError, match="middle of a tensor"), Upload("cpu") as moving:
        moving.start(torch.empty(321, 17), stored)  # nobody waits but the end


def test_a_file_that_went_away_is_an_error(tmp_path: Path) -> None:
    stored = StoredTensor(tmp_path / "gone", 0, torch.float32, (4,))
    with pytest.raises(ModelError, match="No such file"), Upload("cpu") as moving:
        moving.fetch(stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_model_is_the_same_as_read_tensor_by_tensor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    quantization: str | None,
) -> None:
    folder = write_safetensors(tmp_path, make_llama())
    fractions: list[float] = []
    threaded = load_model(
        folder,
        dtype=dtype,
        device="cpu",
        quantization=quantization,
        progress=lambda _, fraction: fractions.append(fraction or 0.0),
    )
    monkeypatch.setattr(SafetensorsSource, "stored", lambda *_: None)
    plain = load_model(folder, dtype=dtype, device="cpu", quantization=quantization)
    state = plain.model.state_dict()
    assert state.keys() == threaded.model.state_dict().keys()
    for name, value in threaded.model.state_dict().items():
        assert value.dtype is state[name].dtype
        assert torch.equal(value.float(), state[name].float()), name
    assert fractions[-1] == 1.0
    assert all(0 <= fraction <= 1 for fraction in fractions)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
def test_weights_that_are_no_floats_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_safetensors(tmp_path, make_llama())
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, file)
    with pytest.raises(ModelError, match=rf"{name} is stored as {str(dtype)[6:]}"):
        load_model(folder, dtype=torch.float32, device="cpu")


def test_a_file_that_may_not_be_read_is_told_so(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path, make_llama())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "gone")
    with pytest.raises(ModelError, match="cannot be read: No such file") as failed:
        load_model(folder, dtype=torch.float32, device="cpu")
    assert "truncated" not in str(failed.value)


def test_a_parameter_without_memory_for_it_is_told_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ModelError, match=r"head\.weight needs 2\.0 GiB of memory, which cpu does"):
        parameters._allocate("head.weight", (2**20, 2**9), torch.float32, torch.device("cpu"))
