"""The ModelDeployment that a command works on: a file, or the environment, with ``--set`` on top.

The options of ``--set`` are the fields of the configuration models; there is no second list of them.
"""

from __future__ import annotations

import difflib
import json
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

from kerf_runtime.config import (
    API_VERSION,
    KIND,
    ConfigModel,
    ModelDeploymentDocument,
    ModelDeploymentSpec,
    config_error,
    load_document,
    parse_document,
)
from kerf_runtime.errors import ConfigError

__all__ = [
    "DEPLOYMENT_VARIABLE",
    "apply_overrides",
    "option_paths",
    "raw_document",
    "read_document",
]

DEPLOYMENT_VARIABLE = "KERF_DEPLOYMENT"
"""Environment variable with the document as JSON; the operator sets it in pods and Jobs."""


def read_document(
    file: Path | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> ModelDeploymentDocument:
    """The document of ``file`` or of the environment, with overrides.

    Raises:
        ConfigError: neither is given, or something in it is wrong.
    """
    if file is not None:
        document = load_document(file)
    elif DEPLOYMENT_VARIABLE in environ:
        try:
            data = json.loads(environ[DEPLOYMENT_VARIABLE])
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not valid JSON: {error}", where=DEPLOYMENT_VARIABLE) from None
        document = parse_document(data, where=DEPLOYMENT_VARIABLE)
    else:
        raise ConfigError(
            "no ModelDeployment was given",
            hint=f"Pass -f FILE (see examples/), or its JSON in {DEPLOYMENT_VARIABLE}",
        )
    return apply_overrides(document, overrides)


def apply_overrides(
    document: ModelDeploymentDocument, overrides: Sequence[str]
) -> ModelDeploymentDocument:
    """The document with ``path=value`` texts applied; values are YAML, ``null`` removes a field.

    Raises:
        ConfigError: not ``path=value``, no such field, or a value the field refuses.
    """
    if not overrides:
        return document
    data = document.spec.to_document()
    for override in overrides:
        path, separator, text = override.partition("=")
        where = f"--set {override}"
        if not separator:
            raise ConfigError("expected FIELD=VALUE", where=where, hint="compilation.level=0")
        keys = _resolve(path.strip(), where=where)
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the value is not valid YAML: {error}", where=where) from None
        _put(data, keys, value)
    try:
        spec = ModelDeploymentSpec.model_validate(data)
    except ValidationError as error:
        raise config_error(error, where="--set") from None
    return ModelDeploymentDocument(name=document.name, spec=spec)


def raw_document(document: ModelDeploymentDocument) -> dict[str, Any]:
    """The document as read from YAML, for the engine process."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": document.name},
        "spec": document.spec.to_document(),
    }


def option_paths(model: type[ConfigModel] = ModelDeploymentSpec, prefix: str = "") -> Iterator[str]:
    """Every path that ``--set`` accepts, as written in documents."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        nested = _nested_model(field.annotation)
        if nested is None:
            yield path
        else:
            yield from option_paths(nested, f"{path}.")


def _put(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set a nested field, or remove it if ``value`` is None; removing creates nothing on the way."""
    for key in keys[:-1]:
        if value is None and key not in data:
            return
        data = data.setdefault(key, {})
    if value is None:
        data.pop(keys[-1], None)
    else:
        data[keys[-1]] = value


def _resolve(path: str, *, where: str) -> list[str]:
    """The document keys of a path, which may be written in snake_case too."""
    model: type[ConfigModel] | None = ModelDeploymentSpec
    keys: list[str] = []
    parts = path.removeprefix("spec.").split(".")
    for index, part in enumerate(parts):
        assert model is not None  # left below before it can be None
        found = next(
            (
                (field.alias or name, field)
                for name, field in model.model_fields.items()
                if part in (name, field.alias)
            ),
            None,
        )
        if found is None:
            raise _unknown(path, where=where)
        keys.append(found[0])
        model = _nested_model(found[1].annotation)
        rest = parts[index + 1 :]
        if model is None and rest:
            if not _is_mapping(found[1].annotation):
                raise _unknown(path, where=where)
            return [*keys, ".".join(rest)]
    return keys


def _unknown(path: str, *, where: str) -> ConfigError:
    near = difflib.get_close_matches(path.removeprefix("spec."), list(option_paths()), n=3)
    return ConfigError(
        f"there is no field {path!r}",
        where=where,
        hint=f"Did you mean {' or '.join(near)}?" if near else "See docs/configuration.md",
    )


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union, or the type itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _nested_model(annotation: Any) -> type[ConfigModel] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, ConfigModel):
            return member
    return None


def _is_mapping(annotation: Any) -> bool:
    return any(get_origin(member) is dict for member in _members(annotation))
