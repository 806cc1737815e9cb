"""Writes docs/configuration.md from the configuration models: every field, its type, default and meaning.

``python hack/configuration_docs.py`` writes the file, ``--check`` fails if it is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from kerf_runtime.config import ConfigModel, ModelDeploymentSpec
from kerf_runtime.reasons import CacheReason, ConfigReason, DispatchReason
from resolution_docs import resolution_section

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_INTRODUCTION = """# Configuration

<!-- Written by hack/configuration_docs.py from kerf_runtime.config; do not edit. -->

Every field of `spec` of a ModelDeployment. The same document is read by `kerf run -f`, `kerf compile -f` and
`kerf serve -f`; `--set path=value` overrides one field. Unknown fields are errors. Fields that only concern the
cluster (replicas, claims, Services, images) are ignored without one.

Whether a field is part of the **cache key**, so that changing it compiles again: `model.source`, `engine.dtype`,
`engine.quantization`, the runtime image and, of `compilation`, `level`, `backend`, `customOps`, `compileSizes`,
`passes`, `splittingOps` and `inductorConfig` are; nothing else is. What counts is what is in force: leaving a
default out and naming it is the same key, and so is a pass that is switched off by the splitting ops. Two fields stand
there as the document has them: the dtype (`auto` and the type that it means for the model are two keys) and splitting ops
(with `kerf::attention` the mixer of a hybrid model is meant too, and which model it is is in the key). Capture sizes
are part of the key only while `compileSizes` names `cudagraph_capture_sizes`. Only level 3 has a key at all: levels
1 and 2 compile in every pod.

"""


def _model_in(annotation: Any) -> type[ConfigModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return " or ".join(_type_name(a) for a in get_args(annotation) if a is not NoneType)
    if origin is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if origin is dict:
        return "map"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " / ".join(f"`{member.value}`" for member in annotation)
    return {str: "string", int: "integer", float: "number", bool: "boolean"}.get(
        annotation, getattr(annotation, "__name__", str(annotation))
    )


def _rows(model: type[ConfigModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        nested = _model_in(field.annotation)
        required = "**required.** " if field.default is PydanticUndefined else ""
        kind = "object" if nested else _type_name(field.annotation)
        yield path, kind, required + (field.description or "")
        if nested:
            yield from _rows(nested, path + ".")


def text() -> str:
    """The whole page."""
    lines = ["| field | type | meaning |", "|---|---|---|"]
    lines += [
        f"| `{path}` | {kind} | {meaning} |" for path, kind, meaning in _rows(ModelDeploymentSpec)
    ]
    lines += ["", resolution_section()]
    lines += ["## Reason codes", ""]
    lines += [
        "Written the same way in the log, in metric labels, in `/debug/graphs` and in the status."
    ]
    for title, codes in (
        ("Why the effective configuration differs from the requested one", ConfigReason),
        ("Verdict of a compile-cache lookup", CacheReason),
        ("Why a step ran as it did", DispatchReason),
    ):
        lines += ["", f"{title}: " + ", ".join(f"`{code.value}`" for code in codes) + "."]
    return _INTRODUCTION + "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or compare it with ``--check``."""
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != text():
            print(
                f"{TARGET} is out of date; run: python hack/configuration_docs.py", file=sys.stderr
            )
            return 1
        return 0
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
