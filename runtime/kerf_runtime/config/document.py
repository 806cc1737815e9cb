"""Reading a ModelDeployment from YAML or from an API object: its name and its validated spec."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kerf_runtime.config.base import ConfigModel, config_error
from kerf_runtime.config.deployment import (
    API_VERSION,
    KIND,
    NAME_MAX_LENGTH,
    NAME_PATTERN,
    ModelDeploymentSpec,
)
from kerf_runtime.errors import ConfigError

__all__ = ["ModelDeploymentDocument", "load_document", "parse_document"]


class ModelDeploymentDocument(ConfigModel):
    """A ModelDeployment as read from a file: its name and its spec."""

    name: str
    spec: ModelDeploymentSpec

    @property
    def served_name(self) -> str:
        """Model name in the HTTP API."""
        return self.spec.model.served_name or self.name


def parse_document(data: Any, *, where: str) -> ModelDeploymentDocument:
    """Validate one parsed YAML document.

    Raises:
        ConfigError: not a ModelDeployment, or a field is wrong; names the field.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            f"expected a mapping, found {type(data).__name__}",
            where=where,
            hint=f"A file starts with apiVersion: {API_VERSION} and kind: {KIND}",
        )
    found = (data.get("apiVersion"), data.get("kind"))
    if found != (API_VERSION, KIND):
        raise ConfigError(
            f"expected apiVersion {API_VERSION} and kind {KIND}, found {found[0]} and {found[1]}",
            where=where,
        )
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError("metadata.name is missing", where=where)
    if len(name) > NAME_MAX_LENGTH or not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"metadata.name {name!r} cannot name a Service",
            where=where,
            hint=f"Use at most {NAME_MAX_LENGTH} lower-case letters, digits and dashes, a letter first",
        )
    try:
        spec = ModelDeploymentSpec.model_validate(data.get("spec"))
    except ValidationError as error:
        raise config_error(error, where=f"{where}: spec") from None
    return ModelDeploymentDocument(name=name, spec=spec)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice!r} is given twice", node.start_mark
            )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def load_document(path: Path) -> ModelDeploymentDocument:
    """The one ModelDeployment of a YAML file; other kinds in the same file are skipped.

    Raises:
        ConfigError: unreadable, invalid, or not exactly one ModelDeployment.
    """
    where = str(path)
    try:
        documents = [
            d for d in yaml.load_all(path.read_text(), Loader=_UniqueKeys) if d is not None
        ]
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=where) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: bytes that are no text, or values such as the date 2026-13-01.
        raise ConfigError(f"not valid YAML: {error}", where=where) from None
    ours = [d for d in documents if not isinstance(d, dict) or d.get("kind") == KIND]
    if len(ours) != 1:
        kinds = [d.get("kind") for d in documents if isinstance(d, dict)]
        raise ConfigError(
            f"expected exactly one {KIND}, found {len(ours)} (kinds in the file: {kinds})",
            where=where,
        )
    return parse_document(ours[0], where=where)
