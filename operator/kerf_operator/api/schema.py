"""From a pydantic model to a structural OpenAPI v3 schema that an API server accepts.  Pure.

Structural means: no ``$ref``, a type at every node, unions only where Kubernetes has a word for them.
``Optional`` fields lose their ``null`` (a field is absent or has its type), also inside defaults, and ``cel_rules`` of a model become
``x-kubernetes-validations`` of its node: pairs of rule and message, or triples with an expression that
puts the offending value into the message.
"""

from __future__ import annotations

from typing import Any

from kerf_runtime.config import ConfigModel

__all__ = ["structural_schema"]

_DROPPED = ("title", "discriminator", "examples")


def structural_schema(model: type[ConfigModel]) -> dict[str, Any]:
    """The structural schema of ``model``, in camelCase, references resolved.

    Raises:
        TypeError: the model uses a union that Kubernetes cannot express.
    """
    document = model.model_json_schema(by_alias=True)
    definitions = document.pop("$defs", {})
    return _node(document | {"x-model": model.__name__}, definitions, _models())


def _models() -> dict[str, type[ConfigModel]]:
    """Every configuration model by class name, which is also its name under ``$defs``."""
    found: dict[str, type[ConfigModel]] = {}
    waiting = [ConfigModel]
    while waiting:
        for child in waiting.pop().__subclasses__():
            found[child.__name__] = child
            waiting.append(child)
    return found


def _resolve(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Follow ``$ref`` and drop ``null`` from unions; what stands beside a reference wins over it."""
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[1]
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _resolve({**definitions[name], "x-model": name, **beside}, definitions)
    for union in ("anyOf", "oneOf"):
        if union in node:
            options = [option for option in node[union] if option.get("type") != "null"]
            beside = {key: value for key, value in node.items() if key != union}
            if len(options) == 1:
                return _resolve({**options[0], **beside}, definitions)
            if all(
                option.get("type") in ("boolean", "integer", "number", "string")
                for option in options
            ):
                return {**beside, "x-kubernetes-preserve-unknown-fields": True}
            raise TypeError(f"a CRD cannot express this union: {options}")
    return node


def _node(
    raw: dict[str, Any], definitions: dict[str, Any], models: dict[str, type[ConfigModel]]
) -> dict[str, Any]:
    node = _resolve(raw, definitions)
    result = {
        key: value for key, value in node.items() if key not in _DROPPED and value is not None
    }
    name = result.pop("x-model", None)
    if result.pop("const", None) is not None:
        raise TypeError(f"a CRD cannot express const: {node}")
    if "properties" in node:
        result["properties"] = {
            key: _node(value, definitions, models) for key, value in node["properties"].items()
        }
        # Unknown fields are pruned or refused by the API server; the keyword is not allowed here.
        result.pop("additionalProperties", None)
        if "default" in result:
            # In full: the API server checks rules of the node against the default as written.
            result["default"] = _without_nulls(result["default"])
    elif result.get("type") == "object":
        values = node.get("additionalProperties", True)
        if values is True:
            result.pop("additionalProperties", None)
            result["x-kubernetes-preserve-unknown-fields"] = True
        else:
            result["additionalProperties"] = _node(values, definitions, models)
    for bound in ("Minimum", "Maximum"):
        # JSON Schema has the limit here, Kubernetes only whether minimum or maximum is itself excluded.
        limit = result.get(f"exclusive{bound}")
        if limit is not None:
            result |= {bound.lower(): limit, f"exclusive{bound}": True}
    if result.get("x-kubernetes-int-or-string"):
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "items" in node:
        result["items"] = _node(node["items"], definitions, models)
    if "description" in result:
        result["description"] = " ".join(result["description"].split())
    rules = getattr(models.get(name or ""), "cel_rules", ())
    if rules:
        result["x-kubernetes-validations"] = [
            dict(zip(("rule", "message", "messageExpression"), rule, strict=False))
            for rule in rules
        ]
    return result


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
