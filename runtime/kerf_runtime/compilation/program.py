"""A piece as plain data, so that another process can compile it: Python source and input layouts.

What Dynamo leaves behind (fake tensors tied to its shape environment, notes about the user's code)
cannot travel between processes.  The operators of the piece and the shape of its inputs can: the only
symbol in a shape is the number of tokens.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from kerf_runtime.compilation import internals
from kerf_runtime.errors import CompileError

__all__ = [
    "InputLayout",
    "PieceProgram",
    "describe_program",
    "load_source",
    "piece_source",
    "rebuild_program",
]

_EXAMPLE_TOKENS = 32
_NAMES: dict[str, Any] = {
    "torch": torch,
    "device": torch.device,
    "inf": math.inf,
    "nan": math.nan,
    "operator": operator,
    "NoneType": NoneType,
}
"""What the source of a piece may refer to."""
_BUILTINS = {"slice", "getattr", "int", "float", "bool", "len", "max", "min"}


@dataclass(frozen=True)
class InputLayout:
    """Shape and stride of one input as expressions over ``n``, the number of tokens.

    A size is an input without ``dtype`` whose one ``shape`` entry is its value.
    """

    shape: tuple[str, ...]
    stride: tuple[str, ...] = ()
    dtype: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class PieceProgram:
    """Source of ``forward(self, ...)`` and the layout of its inputs."""

    source: str
    inputs: tuple[InputLayout, ...]


def piece_source(module: fx.GraphModule) -> str:
    """Python source of a piece.

    Raises:
        CompileError: it refers to something that its source cannot name.
    """
    source = str(module.graph.python_code("self").src).strip() + "\n"
    parse_source(source)
    return source


def parse_source(source: str) -> tuple[ast.Module, int]:
    """The one function of a piece's source, which uses known names only, and its number of inputs.

    Raises:
        CompileError: it is something else.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CompileError(f"a piece is no Python source: {error}") from error
    function = tree.body[0] if tree.body else None
    if len(tree.body) != 1 or not isinstance(function, ast.FunctionDef):
        raise CompileError("a piece is something else than one function")
    if function.name != "forward" or function.decorator_list:
        raise CompileError(
            f"a piece is the function {function.name!r} instead of a plain 'forward'"
        )
    arguments = [arg.arg for arg in function.args.args]
    stored = {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    known = stored | set(arguments) | _NAMES.keys() | _BUILTINS
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id not in known:
            raise CompileError(
                f"a piece refers to {node.id!r}, which its source cannot name",
                hint="Use operators of torch in the forward",
            )
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Lambda, ast.Global)):
            raise CompileError(f"a piece contains {ast.unparse(node)!r}")
    return tree, len(arguments) - 1


def load_source(source: str, identity: str) -> tuple[Callable[..., Any], int]:
    """``forward(self, *inputs)`` of a piece's source, and its number of inputs.

    Raises:
        CompileError: the source is not that of a piece.
    """
    tree, arguments = parse_source(source)
    scope = dict(_NAMES)
    # Without the future imports of this module: annotations stay what the source says.
    exec(compile(tree, f"<kerf piece {identity}>", "exec", dont_inherit=True), scope)
    forward: Callable[..., Any] = scope["forward"]
    return forward, arguments


def describe_program(module: fx.GraphModule, example_values: Sequence[Any]) -> PieceProgram:
    """The program of a piece with symbolic example values."""
    return PieceProgram(piece_source(module), tuple(_layout(value) for value in example_values))


def _layout(value: Any) -> InputLayout:
    if not isinstance(value, Tensor):
        return InputLayout((_expression(value),))
    return InputLayout(
        tuple(_expression(size) for size in value.shape),
        tuple(_expression(step) for step in value.stride()),
        str(value.dtype).removeprefix("torch."),
        str(value.device),
    )


def _expression(size: Any) -> str:
    if not isinstance(size, SymInt):
        return str(int(size))
    import sympy

    expression = size.node.expr
    n = sympy.Symbol("n", integer=True, positive=True)
    return str(expression.xreplace(dict.fromkeys(expression.free_symbols, n)))


def rebuild_program(program: PieceProgram) -> tuple[fx.GraphModule, list[Any]]:
    """The module, and fake inputs with a fresh symbol for the number of tokens."""
    environment = internals.ShapeEnv()
    source = internals.ConstantSource("tokens")
    symbol = environment.create_symbol(_EXAMPLE_TOKENS, source, internals.DimDynamic.DYNAMIC)
    tokens = environment.create_symintnode(symbol, hint=_EXAMPLE_TOKENS, source=source)
    with internals.FakeTensorMode(shape_env=environment):
        values = [_example(layout, tokens) for layout in program.inputs]
    code, _ = load_source(program.source, "rebuilt")

    class Piece(torch.nn.Module):
        forward = code

    return fx.symbolic_trace(Piece()), values


def _example(layout: InputLayout, tokens: Any) -> Any:
    def value(expression: str) -> Any:
        return eval(compile(expression, "<size>", "eval"), {"__builtins__": {}}, {"n": tokens})

    if layout.dtype is None:
        return value(layout.shape[0])
    return torch.empty_strided(
        [value(size) for size in layout.shape],
        [value(step) for step in layout.stride],
        dtype=getattr(torch, layout.dtype),
        device=layout.device,
    )
