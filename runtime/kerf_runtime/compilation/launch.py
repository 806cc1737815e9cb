"""Launch data of a stored Triton kernel, and the function that launches it without Triton.

A kernel that Inductor compiled is stored as a cubin and a small JSON document: the name of the function
in it, warps and shared memory, the types of its arguments, and the expressions that compute the grid
from them.  Torch's own static launcher loads and launches it, so neither Triton nor Inductor is
imported, and a launch is one call into C++.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch

from kerf_runtime.compilation import internals
from kerf_runtime.compilation.stored import UNREADABLE
from kerf_runtime.errors import CompileError

__all__ = ["KernelLaunch", "load_kernel"]

_CALLS = {"max", "min"}
_TYPES = set("OibhlIBHKfd")
"""Letters by which the launcher knows argument types; O is a pointer."""


@dataclass(frozen=True)
class KernelLaunch:
    """How to launch one kernel.

    Attributes:
        function: name of the function in the cubin.
        num_warps: warps per program.
        shared: bytes of dynamic shared memory.
        parameters: names of the arguments of ``run``, in order.
        passed: those that reach the kernel, in order.
        types: one letter per passed argument, as the launcher wants it.
        scratch: null pointers that follow them (scratch memory that the kernel does not use).
        prefix: assignments evaluated before the grid.
        grid: expressions of the three grid dimensions over ``parameters``.
    """

    function: str
    num_warps: int
    shared: int
    parameters: tuple[str, ...]
    passed: tuple[str, ...]
    types: str
    scratch: int
    prefix: tuple[str, ...]
    grid: tuple[str, str, str]

    def to_json(self) -> str:
        """The document stored beside the cubin."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> KernelLaunch:
        """The stored document, checked.

        Raises:
            one of ``stored.UNREADABLE``: it does not describe a launch.
        """
        data = json.loads(text)
        launch = cls(
            function=data["function"],
            num_warps=data["num_warps"],
            shared=data["shared"],
            parameters=tuple(data["parameters"]),
            passed=tuple(data["passed"]),
            types=data["types"],
            scratch=data["scratch"],
            prefix=tuple(data["prefix"]),
            grid=(data["grid"][0], data["grid"][1], data["grid"][2]),
        )
        launch._check()
        return launch

    def _check(self) -> None:
        if not all(isinstance(n, int) for n in (self.num_warps, self.shared, self.scratch)):
            raise ValueError("warps, shared memory and scratch are no integers")
        if not self.function.isidentifier():
            raise ValueError(f"the function is called {self.function!r}")
        if not all(name.isidentifier() and not iskeyword(name) for name in self.parameters):
            raise ValueError(f"the parameters are called {self.parameters}")
        if len(self.types) != len(self.passed) or not set(self.types) <= _TYPES:
            raise ValueError(f"{len(self.passed)} arguments have the types {self.types!r}")
        if not set(self.passed) <= set(self.parameters):
            raise ValueError("an argument of the kernel is no parameter")
        known = set(self.parameters)
        for line in self.prefix:
            name, separator, expression = line.partition(" = ")
            if not separator or not name.isidentifier():
                raise ValueError(f"{line!r} is no assignment")
            _check_expression(expression, known)
            known.add(name)
        for expression in self.grid:
            _check_expression(expression, known)

    def source(self) -> str:
        """Python source of ``run``: compute the grid, launch."""
        arguments = ", ".join([*self.passed, *["None"] * self.scratch])
        types = self.types + "O" * self.scratch
        return "\n".join(
            [
                f"def run({''.join(f'{name}, ' for name in self.parameters)}*, stream):",
                *(f"    {line}" for line in self.prefix),
                f"    launch(function, {', '.join(self.grid)}, {self.num_warps}, {self.shared}, "
                f"{types!r}, ({arguments},), stream)",
            ]
        )


def _check_expression(text: str, known: set[str]) -> None:
    """Integer arithmetic over known names; raises ValueError for anything else."""
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Name):
            if node.id not in known | _CALLS:
                raise ValueError(f"{text!r} uses {node.id!r}")
        elif isinstance(node, ast.Constant):
            if type(node.value) is not int:
                raise ValueError(f"{text!r} contains {node.value!r}")
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in _CALLS or node.keywords:
                raise ValueError(f"{text!r} calls {ast.unparse(node.func)}")
        elif not isinstance(
            node,
            (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context),
        ):
            raise ValueError(f"{text!r} is more than arithmetic")


def load_kernel(cubin: Path) -> Callable[..., None]:
    """``run(*parameters, stream=raw stream)`` of the kernel in ``cubin``, for the current device.

    Raises:
        CompileError: the launch data beside it (``.json``) cannot be understood, or the driver refuses
            the cubin.
    """
    try:
        launch = KernelLaunch.from_json(cubin.with_suffix(".json").read_text())
    except UNREADABLE as error:
        raise CompileError(
            f"the launch data of a kernel cannot be read: {error}", where=str(cubin)
        ) from error
    launcher = getattr(internals, "StaticCudaLauncher", None)
    if launcher is None or not torch.cuda.is_available():
        raise CompileError("a CUDA kernel cannot be loaded without a CUDA device", where=str(cubin))
    try:
        function, _registers, _spills = launcher._load_kernel(
            str(cubin), launch.function, launch.shared, torch.cuda.current_device()
        )
    except (RuntimeError, OverflowError) as error:
        # OverflowError: an integer that C has no room for.
        raise CompileError(f"the driver refuses the kernel: {error}", where=str(cubin)) from error
    namespace: Mapping[str, Any] = {
        "launch": launcher._launch_kernel,
        "function": function,
    }
    scope = dict(namespace)
    exec(compile(launch.source(), f"<kerf launch {launch.function}>", "exec"), scope)
    run: Callable[..., None] = scope["run"]
    return run
