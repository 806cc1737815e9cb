"""The eager back end: a piece is run operator by operator, as it was traced.  For debugging.

The artifact is the piece's Python source, so a warm start traces nothing here either.
"""

from __future__ import annotations

import ast
import contextlib
import math
import operator
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from kerf_runtime.compilation.backends.interface import (
    CompiledArtifact,
    CompileRequest,
    PieceCall,
)
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.errors import CompileError, ConfigError

__all__ = ["EagerBackend"]

_FILE = "graph.py"
_NAMES: dict[str, Any] = {
    "torch": torch,
    "device": torch.device,
    "inf": math.inf,
    "nan": math.nan,
    "operator": operator,
    "NoneType": NoneType,
}
_BUILTINS = {"slice", "getattr", "int", "float", "bool", "len", "max", "min"}


class EagerBackend:
    """Runs pieces as they were traced; compiles nothing."""

    name = "eager"

    def check(self, options: Mapping[str, Any]) -> None:
        """There are no options."""
        if options:
            raise ConfigError(
                f"the eager back end has no options: {', '.join(sorted(options))}",
                where="compilation.inductorConfig",
                hint="Remove inductorConfig, or set compilation.backend to inductor",
            )

    def session(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def compile(self, request: CompileRequest) -> CompiledArtifact:
        """Keep the source of the piece.

        Raises:
            CompileError: the piece calls something that its source cannot name.
        """
        compile_gate.check("the compilation of a piece")
        compilation_counter.backend_compilations += 1
        if request.tokens is not None:
            compilation_counter.static_compilations += 1
        source = request.module.graph.python_code("self").src
        _parse(source)
        return CompiledArtifact({_FILE: source.encode()}, len(request.example_values))

    def load(self, folder: Path, *, num_inputs: int, identity: str) -> PieceCall:
        try:
            source = (folder / _FILE).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CompileError(f"a piece cannot be read: {error}", where=str(folder)) from error
        tree, arguments = _parse(source)
        if arguments != num_inputs:
            raise CompileError(
                f"the piece has {arguments} inputs instead of {num_inputs}", where=str(folder)
            )
        namespace = dict(_NAMES)
        exec(compile(tree, f"<kerf piece {identity}>", "exec"), namespace)
        forward = namespace["forward"]

        def call(inputs: list[Any]) -> Any:
            taken = tuple(inputs)
            inputs.clear()
            outputs = forward(None, *taken)
            return outputs if isinstance(outputs, (tuple, list)) else (outputs,)

        return call


def _parse(source: str) -> tuple[ast.Module, int]:
    """The one function of the source, checked to use known names only, and its number of inputs."""
    try:
        tree = ast.parse(source.strip())
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
                f"a piece calls {node.id!r}, which its source cannot name",
                hint="Use operators of torch in the forward, or set compilation.backend to inductor",
            )
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Lambda, ast.Global)):
            raise CompileError(f"a piece contains {ast.unparse(node)!r}")
    return tree, len(arguments) - 1
