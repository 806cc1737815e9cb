"""Whether a kernel may index with 32 bits: decided for the largest step there can be.

Inductor decides for the number of tokens it was shown, and notes a guard for the others.  Nobody evaluates
it: what a kernel for any number of tokens touches must be within reach for every number of them.  Where it is,
the kernel keeps its 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kerf_runtime.compilation import internals
from kerf_runtime.config.compilation import MAX_SIZE

__all__ = ["index_for_every_step", "most"]


def most(expression: Any) -> Any:
    """The largest value of a size or an index over all steps: a number of sympy, which may be infinite.

    Args:
        expression: a sympy expression, whose symbols all stand for a number of tokens; or a number.
    """
    import sympy

    expression = sympy.sympify(expression)
    steps: dict[sympy.Symbol, Any] = dict.fromkeys(
        expression.free_symbols, internals.ValueRanges(1, MAX_SIZE)
    )
    return internals.bound_sympy(expression, steps).upper


@contextmanager
def index_for_every_step() -> Iterator[None]:
    """Around a compilation for any number of tokens: 32 bits where they are enough for ``MAX_SIZE``, else 64."""
    import torch

    reach = torch.iinfo(torch.int32).max
    modules = (internals.simd, internals.triton_utils)
    example = modules[0].expr_fits_within_32bit

    def fits(expression: Any) -> bool:
        return bool(most(expression) <= reach and example(expression))

    for module in modules:
        module.expr_fits_within_32bit = fits
    try:
        yield
    finally:
        for module in modules:
            module.expr_fits_within_32bit = example
