"""Noop elimination: reshapes, slices, expands and permutes that change nothing, and chains of reshapes.

They cost little by themselves, but they stand between the nodes that the fusion passes look for.
A change is only made when it is known to be right for every number of tokens: sizes are compared as
integers, as -1, or as the same symbolic size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from kerf_runtime.compilation.passes.nodes import known_equal, value

__all__ = ["eliminate_noops"]

_aten = torch.ops.aten
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})
_UNBOUNDED = 2**63 - 1
"""The end of a slice that has none, as PyTorch writes it."""


def eliminate_noops(graph: fx.Graph) -> int:
    """Rewrite ``graph`` in place.

    Returns:
        How many nodes were skipped or removed.
    """
    matches = 0
    for node in list(graph.nodes):
        if node.target in _RESHAPES:
            matches += _skip_reshapes_before(node)
        changes_nothing = _CHANGES_NOTHING.get(node.target)
        if changes_nothing is None or not changes_nothing(node):
            continue
        base = node.args[0]
        if not _would_merge_results(node, base):
            node.replace_all_uses_with(base)
            graph.erase_node(node)
            matches += 1
    return matches


def _skip_reshapes_before(node: fx.Node) -> int:
    """Let ``node`` reshape what the reshape before it reshaped."""
    skipped = 0
    base = node.args[0]
    while isinstance(base, fx.Node) and base.target in _RESHAPES:
        source = base.args[0]
        node.update_arg(0, source)
        if not base.users:
            node.graph.erase_node(base)
        base = source
        skipped += 1
    return skipped


def _would_merge_results(node: fx.Node, base: fx.Node) -> bool:
    """Whether removing ``node`` returns an input, or one tensor twice: callers tell them apart."""
    output = node.graph.output_node()
    return node in output.all_input_nodes and (
        base.op in ("placeholder", "get_attr") or base in output.all_input_nodes
    )


def _shape_of(node: Any) -> Any:
    tensor = value(node)
    return tensor.shape if isinstance(tensor, Tensor) else None


def _keeps_shape(node: fx.Node) -> bool:
    """A reshape to the shape that is there: every size equal, at most one of them written as -1."""
    shape, wanted = _shape_of(node.args[0]), node.args[1]
    if shape is None or not isinstance(wanted, (list, tuple)) or len(shape) != len(wanted):
        return False
    free = sum(size == -1 for size in wanted if isinstance(size, int))
    return free <= 1 and _sizes_kept(wanted, shape)


def _keeps_expansion(node: fx.Node) -> bool:
    """An expand to the shape that is there; -1 keeps a size, however often it is written."""
    shape, wanted = _shape_of(node.args[0]), node.args[1]
    if shape is None or not isinstance(wanted, (list, tuple)) or len(shape) != len(wanted):
        return False
    return _sizes_kept(wanted, shape)


def _sizes_kept(wanted: Any, shape: Any) -> bool:
    return all(
        (isinstance(new, int) and new == -1) or known_equal(new, old)
        for new, old in zip(wanted, shape, strict=True)
    )


def _keeps_order(node: fx.Node) -> bool:
    dims = node.args[1]
    if not isinstance(dims, (list, tuple)):
        return False
    return all(dim in (place, place - len(dims)) for place, dim in enumerate(dims))


def _takes_everything(node: fx.Node) -> bool:
    """A slice from the first to the last element in steps of one."""
    dim, start, end, step = (*node.args[1:], *(None,) * 4)[:4]
    shape, dim = _shape_of(node.args[0]), 0 if dim is None else dim
    if shape is None or not isinstance(dim, int) or step not in (None, 1):
        return False
    if start is not None and not known_equal(start, 0):
        return False
    if end is None or known_equal(end, shape[dim]):
        return True
    return isinstance(end, int) and _is_at_least(end, shape[dim])


def _is_at_least(end: int, size: Any) -> bool:
    return end == _UNBOUNDED or (isinstance(size, int) and end >= size)


_CHANGES_NOTHING: dict[Any, Callable[[fx.Node], bool]] = {
    **dict.fromkeys(_RESHAPES, _keeps_shape),
    _aten.expand.default: _keeps_expansion,
    _aten.permute.default: _keeps_order,
    _aten.slice.Tensor: _takes_everything,
}
