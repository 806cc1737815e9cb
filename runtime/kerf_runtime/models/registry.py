"""Which architectures are implemented, and by which family.  No torch.

A family is a package with ``config`` (pure), ``model`` and ``weights``.  Adding one means a folder and
a line in ``_FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kerf_runtime.errors import ModelError
from kerf_runtime.models.config import ModelConfig
from kerf_runtime.models.gguf_file import GgufFile
from kerf_runtime.models.llama import config as llama_config

__all__ = ["Family", "family_of", "family_of_class", "family_of_gguf", "supported_architectures"]


@dataclass(frozen=True)
class Family:
    """One implementation.

    Attributes:
        classes: Hugging Face class names it serves.
        gguf_names: values of ``general.architecture`` it serves.
        package: where ``model`` and ``weights`` are, imported when weights are loaded.
    """

    classes: tuple[str, ...]
    gguf_names: tuple[str, ...]
    package: str
    config_from_json: Callable[[dict[str, Any], dict[str, Any], str], ModelConfig]
    config_from_gguf: Callable[[GgufFile], ModelConfig]


_FAMILIES = (
    Family(
        classes=llama_config.CLASSES,
        gguf_names=llama_config.GGUF_NAMES,
        package="kerf_runtime.models.llama",
        config_from_json=llama_config.config_from_json,
        config_from_gguf=llama_config.config_from_gguf,
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


def family_of_gguf(header: GgufFile) -> Family:
    """The family for the ``general.architecture`` of a GGUF file.

    Raises:
        ModelError: not supported; lists those that are.
    """
    name = header.metadata.get("general.architecture")
    for family in _FAMILIES:
        if name in family.gguf_names:
            return family
    supported = tuple(name for family in _FAMILIES for name in family.gguf_names)
    raise _unsupported(str(name), supported, f"{header.path}: general.architecture")


def family_of(config: ModelConfig) -> Family:
    """The family that made ``config``."""
    return next(family for family in _FAMILIES if config.architecture in family.classes)


def _unsupported(found: str, supported: tuple[str, ...], where: str) -> ModelError:
    return ModelError(
        f"architecture {found} is not supported",
        where=where,
        hint=f"Supported: {', '.join(supported)}",
    )
