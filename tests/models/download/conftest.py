"""A hub, and downloads from it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.models.download.hub_server import Hub, Repository, running_hub

from kerf_runtime.config.source import ModelSource
from kerf_runtime.models.download import Downloaded, Progress, Retry, download

REPO = "org/model"
QUICK = Retry(attempts=3, seconds=0.01)
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}" * 500,
    "model.safetensors": bytes(range(256)) * 12_000,
    "README.md": b"# A model",
    "pytorch_model.bin": b"the same weights in another format",
}
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}

Pull = Callable[..., Downloaded]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of this machine, and names that do not exist are known not to at once."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    look_up = socket.getaddrinfo

    def without_invalid(host: Any, *arguments: Any, **more: Any) -> Any:
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", without_invalid)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as found:
        found.repositories[REPO] = Repository(dict(FILES), lfs=frozenset({"model.safetensors"}))
        yield found


@pytest.fixture
def pull(hub: Hub, tmp_path: Path) -> Pull:
    """``pull(repo=..., path=...)`` downloads below ``tmp_path / "models"``; ``token`` is HF_TOKEN."""

    def pull(
        *,
        token: str | None = None,
        environ: dict[str, str] | None = None,
        retry: Retry = QUICK,
        progress: Progress = lambda transfer: None,
        **source: Any,
    ) -> Downloaded:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), **(environ or {})}
        if token is not None:
            variables["HF_TOKEN"] = token
        wanted = ModelSource.model_validate({"huggingFace": {"repo": REPO, **source}})
        return download(
            wanted, tmp_path / "models", environ=variables, retry=retry, progress=progress
        )

    return pull


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder but for our own list."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
