"""From a path to the architecture facts of the checkpoint there.  No torch, no weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kerf_runtime.config.key import digest
from kerf_runtime.models.checkpoint import find_checkpoint, read_json
from kerf_runtime.models.config import ModelConfig
from kerf_runtime.models.gguf_file import read_gguf
from kerf_runtime.models.registry import config_of_gguf, family_of_class

__all__ = ["model_config_digest", "read_model_config"]


def read_model_config(path: Path) -> ModelConfig:
    """Architecture facts from ``config.json`` or the GGUF metadata.

    Raises:
        ModelError: no checkpoint at ``path``, unreadable, or something we cannot run.
    """
    checkpoint = find_checkpoint(Path(path))
    if checkpoint.gguf is not None:
        return config_of_gguf(read_gguf(checkpoint.gguf))
    where = checkpoint.path / "config.json"
    data = read_json(where)
    generation = read_json(checkpoint.path / "generation_config.json", required=False)
    return family_of_class(data, where=str(where)).config_from_json(data, generation, str(where))


def model_config_digest(path: Path) -> str:
    """sha256 (64 hex digits) of the architecture facts: equal digests compile to equal code.

    Token ids are left out: they change answers, never code.

    Raises:
        ModelError: as ``read_model_config``.
    """
    facts = asdict(read_model_config(path))
    del facts["eos_token_ids"], facts["bos_token_id"]
    facts["dtype"] = str(facts["dtype"])
    return digest(facts)
