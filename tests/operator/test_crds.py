"""The generated CRDs: committed, structural, described, bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import Field

from kerf_operator.api import crd_documents, crd_yaml
from kerf_operator.api.schema import structural_schema
from kerf_runtime.config import ConfigModel

ROOT = Path(__file__).parents[2]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a schema with its path."""
    yield path, schema
    for name, child in (schema.get("properties") or {}).items():
        yield from nodes(child, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        yield from nodes(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def every_node() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for name, crd in crd_documents().items():
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for part in ("spec", "status"):
            found += [
                (f"{name}: {part}{path}", node) for path, node in nodes(schema["properties"][part])
            ]
    return found


@pytest.mark.parametrize("folder", ["crds", "charts/kerf/files/crds"])
def test_the_committed_files_are_what_the_models_say(folder: str) -> None:
    expected = {name: crd_yaml(document) for name, document in crd_documents().items()}
    found = {path.name: path.read_text() for path in (ROOT / folder).glob("*.yaml")}
    assert found == expected, "run: kerf-operator crds --write"


def test_every_field_is_described() -> None:
    bare = [
        path
        for path, node in every_node()
        if not path.endswith(("[]", "{}")) and not node.get("description")
    ]
    assert bare == []


def test_every_optional_spec_field_says_its_default() -> None:
    silent = []
    for path, node in every_node():
        if ": spec" not in path:
            continue
        for name, child in (node.get("properties") or {}).items():
            if "properties" in child or name in node.get("required", []):
                continue
            if "default" in child and "efault" not in child["description"]:
                silent.append(f"{path}.{name}")
    assert silent == []


def test_everything_that_can_grow_is_bounded() -> None:
    endless = []
    for path, node in every_node():
        kind = node.get("type")
        if kind == "array" and "maxItems" not in node:
            endless.append(path)
        if kind == "string" and not ({"maxLength", "enum", "format"} & node.keys()):
            endless.append(path)
        if "additionalProperties" in node and ": spec" in path and "maxProperties" not in node:
            endless.append(path)
    assert endless == []


def test_every_node_is_structural() -> None:
    wrong = []
    for path, node in every_node():
        if {"$ref", "allOf", "oneOf", "nullable", "title"} & node.keys():
            wrong.append(path)
        free = node.get("x-kubernetes-preserve-unknown-fields") or node.get(
            "x-kubernetes-int-or-string"
        )
        if "type" not in node and not free:
            wrong.append(path)
        if "anyOf" in node and not node.get("x-kubernetes-int-or-string"):
            wrong.append(path)
    assert wrong == []


def test_the_files_are_plain_yaml_and_small() -> None:
    for text in map(crd_yaml, crd_documents().values()):
        assert yaml.safe_load(text)["kind"] == "CustomResourceDefinition"
        assert len(text) < 200_000


def test_a_union_that_kubernetes_cannot_express_is_an_error() -> None:
    class Inner(ConfigModel):
        """Inner."""

        size: int = Field(1, description="Size.")

    class Odd(ConfigModel):
        """Odd."""

        either: Inner | int = Field(1, description="Either.")

    with pytest.raises(TypeError, match="cannot express"):
        structural_schema(Odd)


def test_optional_models_keep_their_rules_and_lose_their_null() -> None:
    class Part(ConfigModel):
        """A part."""

        cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
            ("self.size > 0", "size must be positive"),
        )
        size: int = Field(1, description="Size.")

    class Whole(ConfigModel):
        """A whole."""

        part: Part | None = Field(None, description="The part.")

    part = structural_schema(Whole)["properties"]["part"]
    assert part["type"] == "object"
    assert part["description"] == "The part."
    assert part["x-kubernetes-validations"] == [
        {"rule": "self.size > 0", "message": "size must be positive"}
    ]


def test_a_limit_that_is_excluded_itself_is_written_as_kubernetes_does() -> None:
    class Bounded(ConfigModel):
        share: float = Field(0.5, gt=0, lt=1)

    node = structural_schema(Bounded)["properties"]["share"]
    assert (node["minimum"], node["exclusiveMinimum"]) == (0, True)
    assert (node["maximum"], node["exclusiveMaximum"]) == (1, True)
