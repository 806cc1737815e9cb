"""What tracing and compiling assumed about the number of tokens must hold for every number.

Dynamo and Inductor note each assumption about a symbolic size as a guard.  Kerf evaluates no guard at
run time, so one that holds for the example batch only would silently give wrong results for others:
it is refused here, with the line of the model that needs it.
"""

from __future__ import annotations

import math
from typing import Any

import sympy

from kerf_runtime.compilation import internals
from kerf_runtime.config.compilation import MAX_SIZE
from kerf_runtime.errors import CompileError

__all__ = ["check_assumptions"]

_TOKENS = (
    *range(2, 130),
    *(2**power + offset for power in range(8, 16) for offset in (-1, 0, 1)),
    1000,
    MAX_SIZE - 1,
    MAX_SIZE,
)
"""Numbers of tokens for which every assumption is evaluated, up to the largest step there can be.

One token is covered by the numerical gate: torch never assumes it for a dynamic size.
"""
_REACH = (2**31 - 1, 2**31)
_UNBACKED = (internals.SymT.UNBACKED_INT, internals.SymT.UNBACKED_FLOAT)


def check_assumptions(shape_env: Any, *, where: str) -> None:
    """Refuse a trace or a compilation that does not hold for every number of tokens.

    Args:
        shape_env: torch's shape environment; its only free sizes are numbers of tokens, all equal.
        where: what was traced or compiled.

    Raises:
        CompileError: the number of tokens was specialised, restricted or branched on, or a size or a
            number depends on the values of a tensor.
    """
    for guard in shape_env.guards:
        broken = _first_broken(guard.expr)
        if broken is not None and _is_reach(guard.expr):
            raise CompileError(
                f"the compiled code counts elements with 32 bits, which {broken} tokens are too many for: {guard.expr}",
                where=where,
                hint="That is not the model's fault: please report it, and run it with compilation.level 0 until then",
            )
        if broken is not None:
            raise CompileError(
                f"it depends on the number of tokens: {guard.expr} does not hold for {broken} tokens",
                where=f"{where}: {guard.sloc.maybe_user_loc or guard.sloc}",
                hint="Compiled code must be right for every batch: do not branch on the number of tokens, "
                "and do not divide or fix it in a view",
            )
    values = [str(s) for s in shape_env.var_to_range if internals.symbol_is_type(s, _UNBACKED)]
    if values:
        raise CompileError(
            "a size or a number depends on the values of a tensor",
            where=where,
            hint="Remove .item(), boolean masks and nonzero from the forward: they wait for the device",
        )


def _is_reach(expression: Any) -> bool:
    """Whether it says that a number of elements is no larger than an index of 32 bits can be."""
    sides = getattr(expression, "args", ())
    return isinstance(expression, sympy.Rel) and any(side in _REACH for side in sides)


def _first_broken(expression: Any) -> int | None:
    """The first number of tokens for which ``expression`` is false."""
    tokens = sympy.Symbol("tokens", integer=True, positive=True)
    one = expression.xreplace(dict.fromkeys(expression.free_symbols, tokens))
    if one in (sympy.true, sympy.false):
        return None if one else _TOKENS[0]
    # As Python code: sympy needs a millisecond for each substitution.
    code = compile(internals.PythonPrinter().doprint(one), "<assumption>", "eval")
    return next((n for n in _TOKENS if not eval(code, {"math": math, "tokens": n})), None)
