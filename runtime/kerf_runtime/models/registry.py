"""Which architectures are implemented, and by which family.  No torch.

A family reads its facts in a pure module and has a ``model`` and a ``weights`` module.  Adding one means a
folder and a line in ``_FAMILIES``; a Llama with another option is a row of ``llama.variants``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kerf_runtime.errors import ModelError
from kerf_runtime.models.bamba import config as bamba_config
from kerf_runtime.models.config import ModelConfig
from kerf_runtime.models.gguf_file import GgufFile
from kerf_runtime.models.gpt2 import config as gpt2_config
from kerf_runtime.models.llama import config as llama_config
from kerf_runtime.models.llama.variants import VARIANTS
from kerf_runtime.models.opt import config as opt_config

__all__ = ["Family", "config_of_gguf", "family_of", "family_of_class", "supported_architectures"]


@dataclass(frozen=True)
class Family:
    """One implementation.

    Attributes:
        classes: Hugging Face class names it serves.
        model: module of the forward pass, imported when weights are loaded.
        weights: module of the tables of names, likewise.
        config_from_json: facts from ``config.json``, ``generation_config.json`` and the former's path.
        gguf_name: value of ``general.architecture`` it serves, if it is read from GGUF files.
        config_from_gguf: facts from such a file.
    """

    classes: tuple[str, ...]
    model: str
    weights: str
    config_from_json: Callable[[dict[str, Any], dict[str, Any], str], ModelConfig]
    gguf_name: str | None = None
    config_from_gguf: Callable[[GgufFile], ModelConfig] | None = None


_LLAMAS = tuple(
    Family(
        classes=(variant.architecture,),
        model="kerf_runtime.models.llama.model",
        weights="kerf_runtime.models.llama.weights",
        config_from_json=partial(llama_config.config_from_json, variant),
        gguf_name=variant.gguf_name,
        config_from_gguf=partial(llama_config.config_from_gguf, variant),
    )
    for variant in VARIANTS
)
_FAMILIES = (
    *_LLAMAS,
    Family(
        classes=opt_config.CLASSES,
        model="kerf_runtime.models.gpt.model",
        weights="kerf_runtime.models.opt.weights",
        config_from_json=opt_config.config_from_json,
    ),
    Family(
        classes=gpt2_config.CLASSES,
        model="kerf_runtime.models.gpt.model",
        weights="kerf_runtime.models.gpt2.weights",
        config_from_json=gpt2_config.config_from_json,
        gguf_name=gpt2_config.GGUF_NAME,
        config_from_gguf=gpt2_config.config_from_gguf,
    ),
    Family(
        classes=bamba_config.CLASSES,
        model="kerf_runtime.models.bamba.model",
        weights="kerf_runtime.models.bamba.weights",
        config_from_json=bamba_config.config_from_json,
    ),
)


def supported_architectures() -> tuple[str, ...]:
    """Hugging Face class names that can be served."""
    return tuple(name for family in _FAMILIES for name in family.classes)


def family_of_class(data: dict[str, Any], *, where: str) -> Family:
    """The family for the ``architectures`` of a ``config.json``.

    Raises:
        ModelError: none of them is supported; lists those that are.
    """
    names = data.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("architectures must be a list of class names", where=where)
    for family in _FAMILIES:
        if any(name in family.classes for name in names):
            return family
    if not names:
        raise ModelError(
            "no architecture is named in the file",
            where=f"{where}: architectures",
            hint=f"Supported: {', '.join(supported_architectures())}",
        )
    raise _unsupported(", ".join(names), supported_architectures(), f"{where}: architectures")


def config_of_gguf(header: GgufFile) -> ModelConfig:
    """The facts of a GGUF file, read by the family of its ``general.architecture``.

    Raises:
        ModelError: not supported; lists those that are.
    """
    name = header.metadata.get("general.architecture")
    readers = {
        family.gguf_name: family.config_from_gguf
        for family in _FAMILIES
        if family.gguf_name is not None and family.config_from_gguf is not None
    }
    if name not in readers:
        raise _unsupported(str(name), tuple(readers), f"{header.path}: general.architecture")
    return readers[name](header)


def family_of(config: ModelConfig) -> Family:
    """The family that made ``config``."""
    return next(family for family in _FAMILIES if config.architecture in family.classes)


def _unsupported(found: str, supported: tuple[str, ...], where: str) -> ModelError:
    return ModelError(
        f"architecture {found} is not supported",
        where=where,
        hint=f"Supported: {', '.join(supported)}",
    )
