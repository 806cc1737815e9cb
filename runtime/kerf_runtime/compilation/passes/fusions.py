"""Norm-quant and activation-quant fusion: an operator and the FP8 quantisation of its result, as one.

Both parts are found in either form, the custom operator or the ATen operators of its native function,
in every combination.  The result that is quantised must be used by nothing else.

Not found: a native norm without addition of a value that was converted from float32 just before, because
Inductor drops the pair of conversions; and tensors of other than two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from kerf_runtime.compilation.passes.nodes import known_equal, value
from kerf_runtime.compilation.passes.pattern import Example, Pattern, find_match
from kerf_runtime.compilation.passes.replace import replace_match
from kerf_runtime.ops.activation import silu_and_mul_native
from kerf_runtime.ops.fp8 import FP8
from kerf_runtime.ops.norm import fused_add_rms_norm_native, rms_norm_native
from kerf_runtime.ops.quant import (
    dynamic_per_token_fp8_quant_native,
    static_scaled_fp8_quant_native,
)

__all__ = ["fuse_activation_quant", "fuse_norm_quant", "static_quant_patterns"]

_aten, _kerf = torch.ops.aten, torch.ops.kerf
_MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Form:
    """One way to write a part of a pattern.

    Attributes:
        function: computes the part.
        marker: an operator that the part cannot be without: patterns that cannot match are not traced.
    """

    function: Callable[..., Any]
    marker: Any


_RMS_NORM = (
    _Form(_kerf.rms_norm, _kerf.rms_norm.default),
    _Form(rms_norm_native, _aten.rsqrt.default),
)
_FUSED_ADD = (
    _Form(_kerf.fused_add_rms_norm, _kerf.fused_add_rms_norm.default),
    _Form(fused_add_rms_norm_native, _aten.rsqrt.default),
)
_SILU_AND_MUL = (
    _Form(_kerf.silu_and_mul, _kerf.silu_and_mul.default),
    _Form(silu_and_mul_native, _aten.exp.default),
)
_STATIC = (
    _Form(_kerf.static_scaled_fp8_quant, _kerf.static_scaled_fp8_quant.default),
    _Form(static_scaled_fp8_quant_native, torch.ops.prims.convert_element_type.default),
)
_DYNAMIC = (
    _Form(_kerf.dynamic_per_token_fp8_quant, _kerf.dynamic_per_token_fp8_quant.default),
    _Form(dynamic_per_token_fp8_quant_native, _aten.amax.default),
)


def _norm_static(norm: Callable[..., Any], quant: Callable[..., Any]) -> Callable[..., Any]:
    def search(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Any:
        return quant(norm(x, weight, eps), scale)

    return search


def _norm_dynamic(norm: Callable[..., Any], quant: Callable[..., Any]) -> Callable[..., Any]:
    def search(x: Tensor, weight: Tensor, eps: float) -> Any:
        return quant(norm(x, weight, eps))

    return search


def _add_norm_static(norm: Callable[..., Any], quant: Callable[..., Any]) -> Callable[..., Any]:
    def search(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Any:
        normed, total = norm(x, residual, weight, eps)
        return quant(normed, scale), total

    return search


def _add_norm_dynamic(norm: Callable[..., Any], quant: Callable[..., Any]) -> Callable[..., Any]:
    def search(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        normed, total = norm(x, residual, weight, eps)
        return *quant(normed), total

    return search


def _activation_static(act: Callable[..., Any], quant: Callable[..., Any]) -> Callable[..., Any]:
    def search(x: Tensor, scale: Tensor) -> Any:
        return quant(act(x), scale)

    return search


def _activation_dynamic(act: Callable[..., Any], quant: Callable[..., Any]) -> Callable[..., Any]:
    def search(x: Tensor) -> Any:
        return quant(act(x))

    return search


@dataclass(frozen=True)
class _Fusion:
    """What to look for, in all forms of its two parts, and the operator that does both."""

    op: torch._ops.OpOverload
    search: Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]
    forms: tuple[_Form, ...]
    quant_forms: tuple[_Form, ...]

    def patterns(
        self, targets: frozenset[Any], dtypes: Iterable[torch.dtype], device: torch.device
    ) -> Iterator[Pattern]:
        """The patterns that a graph with these operators and data types can contain."""
        for form in self.forms:
            for quant in self.quant_forms:
                if form.marker in targets and quant.marker in targets:
                    for dtype in dtypes:
                        yield _traced(self, form, quant, dtype, device)


# An addition and its norm come first: the plain norm is a part of them.
_NORM_FUSIONS = (
    _Fusion(
        _kerf.fused_add_rms_norm_static_fp8_quant.default, _add_norm_static, _FUSED_ADD, _STATIC
    ),
    _Fusion(
        _kerf.fused_add_rms_norm_dynamic_per_token_fp8_quant.default,
        _add_norm_dynamic,
        _FUSED_ADD,
        _DYNAMIC,
    ),
    _Fusion(_kerf.rms_norm_static_fp8_quant.default, _norm_static, _RMS_NORM, _STATIC),
    _Fusion(_kerf.rms_norm_dynamic_per_token_fp8_quant.default, _norm_dynamic, _RMS_NORM, _DYNAMIC),
)
_ACTIVATION_FUSIONS = (
    _Fusion(
        _kerf.silu_and_mul_static_fp8_quant.default, _activation_static, _SILU_AND_MUL, _STATIC
    ),
    _Fusion(
        _kerf.silu_and_mul_dynamic_per_token_fp8_quant.default,
        _activation_dynamic,
        _SILU_AND_MUL,
        _DYNAMIC,
    ),
)


def fuse_norm_quant(graph: fx.Graph) -> int:
    """RMSNorm, with or without the addition before it, and the quantisation after it.

    Returns:
        How many pairs became one operator.
    """
    return _fuse(graph, _NORM_FUSIONS)


def fuse_activation_quant(graph: fx.Graph) -> int:
    """SiLU-and-mul and the quantisation after it.

    Returns:
        How many pairs became one operator.
    """
    return _fuse(graph, _ACTIVATION_FUSIONS)


def _fuse(graph: fx.Graph, fusions: Iterable[_Fusion]) -> int:
    search = _Search.of(graph)
    matches = 0
    for fusion in fusions if search.has_fp8 else ():
        patterns = list(fusion.patterns(search.targets, search.dtypes, search.device))
        for node in list(graph.nodes) if patterns else ():
            # A node without users is dead, or was replaced by an earlier match.
            match = find_match(patterns, node) if node.users else None
            if match is not None:
                matches += replace_match(graph, match, fusion.op)
    return matches


def static_quant_patterns(graph: fx.Graph) -> list[Pattern]:
    """The patterns of a static quantisation alone (``x`` [T, E], ``scale`` [1]) for this graph."""
    search = _Search.of(graph)
    if not search.has_fp8:
        return []
    return [
        _traced_quant(form, dtype, search.device)
        for form in _STATIC
        if form.marker in search.targets
        for dtype in search.dtypes
    ]


@dataclass(frozen=True)
class _Search:
    """What of a graph decides which patterns are worth tracing."""

    targets: frozenset[Any]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    has_fp8: bool

    @classmethod
    def of(cls, graph: fx.Graph) -> _Search:
        tensors = [value(n) for n in graph.nodes if isinstance(value(n), Tensor)]
        borders = [
            value(n)
            for n in (*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes)
            if isinstance(value(n), Tensor)
        ]
        # Scales are float32 in every model; single values say nothing about its data type.
        found = {t.dtype for t in borders if not all(known_equal(size, 1) for size in t.shape)}
        return cls(
            frozenset(node.target for node in graph.nodes if node.op == "call_function"),
            tuple(dtype for dtype in _MODEL_DTYPES if dtype in found),
            tensors[0].device if tensors else torch.device("cpu"),
            any(tensor.dtype is FP8 for tensor in tensors),
        )


_SIZES = ((11, 34, 1e-5), (13, 38, 1e-6))
"""Tokens, width and epsilon of the two traces: they share no number, and no operator has one of them."""


def _example(names: Iterable[str], dtype: torch.dtype, sizes: tuple[int, int, float]) -> Example:
    tokens, width, eps = sizes
    tensors = {
        "x": ((tokens, width), dtype),
        "residual": ((tokens, width), dtype),
        "weight": ((width,), dtype),
        "scale": ((1,), torch.float32),
    }
    wanted = list(names)
    return Example(
        {name: tensors[name] for name in wanted if name in tensors},
        {"eps": eps} if "eps" in wanted else {},
    )


@cache
def _traced(
    fusion: _Fusion, form: _Form, quant: _Form, dtype: torch.dtype, device: torch.device
) -> Pattern:
    names = [argument.name for argument in fusion.op._schema.arguments]
    first, second = (_example(names, dtype, sizes) for sizes in _SIZES)
    return Pattern(fusion.search(form.function, quant.function), first, second, device=device)


@cache
def _traced_quant(form: _Form, dtype: torch.dtype, device: torch.device) -> Pattern:
    first, second = (_example(("x", "scale"), dtype, sizes) for sizes in _SIZES)
    return Pattern(form.function, first, second, device=device)
