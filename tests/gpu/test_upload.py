"""Weights reach a GPU through pinned buffers: every byte where it belongs, and nothing is left after an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.models.checkpoints import make_llama, write_safetensors
from tests.models.stored import PART_BYTES, TENSORS, stored_tensors

from kerf_runtime.errors import ModelError
from kerf_runtime.models import load_model, upload
from kerf_runtime.models.sources import SafetensorsSource
from kerf_runtime.models.upload import Upload

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_PART_BYTES", PART_BYTES)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Any]:
    with stored_tensors(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("threads", [1, 5])
def test_every_part_lands_where_it_belongs(source: Any, threads: int) -> None:
    filled = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in TENSORS.items()}
    with Upload("cuda", threads=threads) as moving:
        for name, target in filled.items():
            moving.start(target, source.stored(name))
    for name, tensor in TENSORS.items():
        assert torch.equal(filled[name].cpu().float(), tensor.float()), name


def test_what_still_uses_the_memory_ends_before_it_is_written(source: Any) -> None:
    target = torch.zeros_like(TENSORS["large"], device="cuda")
    torch.cuda._sleep(200_000_000)
    copied = target + 0
    with Upload("cuda") as moving:
        moving.start(target, source.stored("large"))
    assert not copied.any()
    assert torch.equal(target.cpu(), TENSORS["large"])


def test_a_file_that_became_shorter_is_an_error_that_leaves_no_pinned_memory(source: Any) -> None:
    stored = source.stored("large")
    with stored.path.open("r+b") as file:
        file.truncate(stored.offset + 5000)
    moving = Upload("cuda")
    with pytest.raises(ModelError, match="middle of a tensor"), moving:
        moving.start(torch.empty_like(TENSORS["large"], device="cuda"), stored)
    # Registered twice at one address is an error of the driver, so this tells that it was given back.
    assert moving._pinned is not None
    memory = moving._pinned._memory
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0
    assert int(runtime.cudaHostUnregister(memory.data_ptr())) == 0


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_model_is_the_same_as_read_tensor_by_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    folder = write_safetensors(tmp_path, make_llama())
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    threaded = load_model(folder, quantization=quantization, **options).model.state_dict()
    monkeypatch.setattr(SafetensorsSource, "stored", lambda *_: None)
    plain = load_model(folder, quantization=quantization, **options).model.state_dict()
    assert plain.keys() == threaded.keys()
    for name, value in threaded.items():
        assert value.dtype is plain[name].dtype
        assert torch.equal(value.float(), plain[name].float()), name
