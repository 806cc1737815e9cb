"""Reads how a safetensors checkpoint is quantised, from ``quantization_config``.  Pure, no torch.

Two spellings of the same thing are read: ``fp8`` and ``compressed-tensors`` (format ``float-quantized``),
both with FP8 weights (``weight``), their scales (``weight_scale``: one per tensor or one per output
channel) and, where inputs have a fixed scale, that too (``input_scale``).  Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kerf_runtime.errors import ModelError
from kerf_runtime.models.config import Fp8Scheme

__all__ = ["SUPPORTED_QUANTIZATION", "scheme_from_json"]

SUPPORTED_QUANTIZATION = (
    "fp8 (activation_scheme static or dynamic, one scale per tensor or channel) and "
    "compressed-tensors (format float-quantized, 8-bit float weights and inputs)"
)

_UNQUANTIZED = ("lm_head", "model.embed_tokens", "model.norm")
"""Modules that stay in the model's data type whatever the checkpoint says about the rest."""


def scheme_from_json(data: Mapping[str, Any], where: str) -> Fp8Scheme | None:
    """The scheme of a ``config.json``; None if it is not quantised.

    Raises:
        ModelError: a method, a format or a detail of it that is not supported; names what is.
    """
    config = data.get("quantization_config")
    if not config:
        return None
    reader = _Reader(f"{where}: quantization_config")
    config = reader.mapping(config, "")
    method = config.get("quant_method")
    if method == "fp8":
        return _from_fp8(config, reader)
    if method == "compressed-tensors":
        return _from_compressed_tensors(config, reader)
    raise reader.error("quant_method", f"quantisation {method!r} is not supported")


class _Reader:
    """Errors that name the key and what is supported."""

    def __init__(self, where: str) -> None:
        self.where = where

    def error(self, key: str, what: str) -> ModelError:
        return ModelError(
            what,
            where=f"{self.where}.{key}" if key else self.where,
            hint=f"Supported: {SUPPORTED_QUANTIZATION}",
        )

    def mapping(self, value: Any, key: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.error(key, f"expected an object, found {value!r}")
        return value

    def require(self, config: Mapping[str, Any], key: str, prefix: str, *allowed: Any) -> Any:
        value = config.get(key)
        if not any(value == one and type(value) is type(one) for one in allowed):
            names = " or ".join(repr(one) for one in allowed)
            raise self.error(f"{prefix}{key}", f"expected {names}, found {value!r}")
        return value

    def unquantized(self, names: Any, key: str) -> None:
        """Refuse a checkpoint that leaves some linear layers unquantised."""
        if not isinstance(names, list | None):
            raise self.error(key, f"expected a list of modules, found {names!r}")
        others = sorted(str(name) for name in names or () if name not in _UNQUANTIZED)
        if others:
            raise self.error(
                key, f"{len(others)} linear layers are not quantised, such as {others[0]}"
            )


def _from_fp8(config: Mapping[str, Any], reader: _Reader) -> Fp8Scheme:
    if config.get("weight_block_size") is not None:
        raise reader.error("weight_block_size", "one scale per block of a weight is not supported")
    scheme = reader.require(config, "activation_scheme", "", "static", "dynamic")
    for key in ("ignored_layers", "modules_to_not_convert"):
        reader.unquantized(config.get(key), key)
    return Fp8Scheme(static=scheme == "static", stored=True)


def _from_compressed_tensors(config: Mapping[str, Any], reader: _Reader) -> Fp8Scheme:
    reader.require(config, "format", "", "float-quantized")
    if config.get("kv_cache_scheme") is not None:
        raise reader.error("kv_cache_scheme", "a quantised KV cache is not supported")
    reader.unquantized(config.get("ignore"), "ignore")
    groups = reader.mapping(config.get("config_groups"), "config_groups")
    if len(groups) != 1:
        raise reader.error("config_groups", f"expected one group of layers, found {len(groups)}")
    name, group = next(iter(groups.items()))
    key = f"config_groups.{name}"
    group = reader.mapping(group, key)
    reader.require(group, "targets", f"{key}.", ["Linear"])
    parts = {}
    for part in ("weights", "input_activations"):
        parts[part] = reader.mapping(group.get(part), f"{key}.{part}")
        reader.require(parts[part], "num_bits", f"{key}.{part}.", 8)
        reader.require(parts[part], "type", f"{key}.{part}.", "float")
    reader.require(parts["weights"], "strategy", f"{key}.weights.", "tensor", "channel")
    inputs = parts["input_activations"]
    dynamic = reader.require(inputs, "dynamic", f"{key}.input_activations.", True, False)
    # A dynamic scale per tensor is served per token, which is finer.
    strategies = ("token", "tensor") if dynamic else ("tensor",)
    reader.require(inputs, "strategy", f"{key}.input_activations.", *strategies)
    return Fp8Scheme(static=not dynamic, stored=True)
