"""Structural fingerprints: pieces that are the same program compile once.

Two pieces have equal fingerprints when they call the same operators on the same wiring with equal
constants, and their inputs agree in shape (symbols included), stride, dtype and device.  Names do not
count: in a Llama the pieces between attention calls differ only in which parameters they are given.
"""

from __future__ import annotations

import hashlib
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from kerf_runtime.config.key import canonical_json
from kerf_runtime.errors import CompileError

__all__ = ["fingerprint_piece"]


def fingerprint_piece(module: fx.GraphModule) -> str:
    """24 hex digits that identify the program of a piece."""
    symbols: dict[str, str] = {}
    numbers: dict[fx.Node, int] = {}
    lines: list[Any] = []
    for number, node in enumerate(module.graph.nodes):
        numbers[node] = number
        if node.op == "placeholder":
            lines.append(["placeholder", _describe_value(node.meta["example_value"], symbols)])
        elif node.op == "get_attr":
            raise CompileError(
                f"the piece holds the constant {node.target!r}",
                hint="Register constants of the model as buffers, so that they are inputs of the graph",
            )
        else:
            args = _describe_argument([node.args, node.kwargs], numbers, symbols)
            lines.append([node.op, _describe_target(node.target), args])
    return hashlib.sha256(canonical_json(lines).encode()).hexdigest()[:24]


def _describe_target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def _describe_value(value: Any, symbols: dict[str, str]) -> Any:
    if isinstance(value, Tensor):
        return {
            "shape": [_describe_size(size, symbols) for size in value.shape],
            "stride": [_describe_size(size, symbols) for size in value.stride()],
            "dtype": str(value.dtype),
            "device": value.device.type,
        }
    if isinstance(value, (int, torch.SymInt)):
        return _describe_size(value, symbols)
    raise CompileError(f"a piece has an input of type {type(value).__name__}")


def _describe_size(size: Any, symbols: dict[str, str]) -> Any:
    """An int as it is; a symbolic size with its symbols renamed in order of appearance."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(str(symbol), f"n{len(symbols)}")
    return str(
        expression.xreplace({s: sympy.Symbol(symbols[str(s)]) for s in expression.free_symbols})
    )


def _describe_argument(value: Any, numbers: dict[fx.Node, int], symbols: dict[str, str]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_describe_argument(item, numbers, symbols) for item in value]
    if isinstance(value, dict):
        return {str(k): _describe_argument(v, numbers, symbols) for k, v in value.items()}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return {"slice": [_describe_argument(part, numbers, symbols) for part in parts]}
    if isinstance(value, torch.SymInt):
        return _describe_size(value, symbols)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if value is Ellipsis:
        return "..."
    raise CompileError(f"a piece has a constant argument of type {type(value).__name__}: {value!r}")
