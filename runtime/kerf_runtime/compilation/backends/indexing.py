"""Whether a kernel may index with 32 bits: decided for the largest step there can be.

Inductor decides for the number of tokens it was shown, and notes a guard for the others.  Nobody evaluates
it: what a kernel for any number of tokens touches must be within reach for every number of them.  Where it is,
the kernel keeps its 32 bits.  Part of the private-API surface towards Inductor; tested with the torch versions
in ``loader.SUPPORTED_TORCH``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kerf_runtime.config.compilation import MAX_SIZE

__all__ = ["index_for_every_step", "most"]


def most(expression: Any) -> Any:
    """The largest value of a size or an index over all steps: a number of sympy, which may be infinite.

    Args:
        expression: a sympy expression, whose symbols all stand for a number of tokens; or a number.
    """
    import sympy
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    expression = sympy.sympify(expression)
    steps: dict[sympy.Symbol, Any] = dict.fromkeys(
        expression.free_symbols, ValueRanges(1, MAX_SIZE)
    )
    return bound_sympy(expression, steps).upper


@contextmanager
def index_for_every_step() -> Iterator[None]:
    """Around a compilation for any number of tokens: 32 bits where they are enough for ``MAX_SIZE``, else 64."""
    import torch
    from torch._inductor.codegen import simd, triton_utils

    reach = torch.iinfo(torch.int32).max
    modules: tuple[Any, ...] = (simd, triton_utils)
    example = simd.expr_fits_within_32bit

    def fits(expression: Any) -> bool:
        return bool(most(expression) <= reach and example(expression))

    for module in modules:
        module.expr_fits_within_32bit = fits
    try:
        yield
    finally:
        for module in modules:
            module.expr_fits_within_32bit = example
