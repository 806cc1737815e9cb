"""Base of the configuration models, and the mapping from validation errors to readable ones.

Documents use camelCase (Kubernetes convention), Python code uses snake_case; unknown fields are
refused.  This package imports no torch: the operator, the CRD generator and the command line all
derive from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

from kerf_runtime.errors import ConfigError

__all__ = [
    "QUANTITY_PATTERN",
    "ConfigModel",
    "Quantity",
    "canonical_json",
    "config_error",
    "digest",
    "parse_quantity",
    "text_only",
]

_QUANTITY = re.compile(r"^(?P<number>\d+(?:\.\d+)?)(?P<suffix>Ki|Mi|Gi|Ti|k|M|G|T)?$", re.ASCII)
_SUFFIX = {
    None: 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


QUANTITY_PATTERN = r"\d+(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?"
"""What the API server accepts as a quantity of bytes."""


class ConfigModel(BaseModel):
    """A frozen part of a configuration document that refuses unknown fields."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )

    def to_document(self) -> dict[str, Any]:
        """The camelCase document of what was set, ready for YAML or JSON."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    """sha256 of the canonical JSON of ``value``, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def parse_quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity such as ``512Mi``, ``2Gi`` or ``1000000``.

    Raises:
        ValueError: the text is not a quantity; the message shows an example.
    """
    match = _QUANTITY.match(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a quantity of bytes; write for example 512Mi or 2Gi "
            f"(units: {', '.join(filter(None, _SUFFIX))})"
        )
    return int(Fraction(match["number"]) * _SUFFIX[match["suffix"]])


def text_only(value: object) -> object:
    """Numbers in YAML are refused as the API server refuses them, with what to write instead."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f'a quantity is text: write "{value}", or for example 512Mi')
    return value


def _check_quantity(text: str) -> str:
    parse_quantity(text)
    return text


Quantity = Annotated[
    str,
    BeforeValidator(text_only),
    AfterValidator(_check_quantity),
    WithJsonSchema({"type": "string", "pattern": f"^{QUANTITY_PATTERN}$", "maxLength": 32}),
]
"""A Kubernetes quantity of bytes, kept as written; the schema shows the same rule to the API server."""


def config_error(error: ValidationError, *, where: str) -> ConfigError:
    """A ``ConfigError`` that names every offending field with its path, value and reason."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "(document)"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown field"
        elif item["type"] != "missing" and not isinstance(item["input"], (dict, list)):
            message = f"{message} (got {item['input']!r})"
        lines.append(f"{path}: {message}")
    return ConfigError(
        "invalid configuration: " + "; ".join(lines),
        where=where,
        hint="See docs/configuration.md for every field, its unit and its default",
    )
