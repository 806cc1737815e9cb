"""Questions that every pass asks of a post-grad graph, answered without adding a guard.

After AOTAutograd a node carries its value as a fake tensor in ``meta["val"]``; sizes are integers or
``SymInt``.  Comparing a ``SymInt`` with ``==`` and asking for the truth would specialise the number of
tokens, so everything here only asks what is already known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kerf_runtime.compilation import internals

__all__ = [
    "auto_functionalized",
    "known_equal",
    "mutated_arguments",
    "positions",
    "root_of_views",
    "same_layout",
    "same_sizes",
    "storage",
    "value",
]

auto_functionalized: Any = torch.ops.higher_order.auto_functionalized

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.permute.default,
        _aten.alias.default,
    }
)
"""Views that keep every element, so that a whole tensor goes in and comes out."""


def value(item: Any) -> Any:
    """The value a node stands for, or ``item`` itself if it is no node."""
    return item.meta.get("val") if isinstance(item, fx.Node) else item


def known_equal(left: Any, right: Any) -> bool:
    """Whether two sizes are equal for every number of tokens, as far as is known already.

    Sizes are integers, ``SymInt``, or nodes that stand for one.
    """
    left, right = value(left), value(right)
    sizes = (int, torch.SymInt)
    if not isinstance(left, sizes) or not isinstance(right, sizes):
        return False
    return internals.statically_known_true(left == right)


def same_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two shapes are equal for every number of tokens."""
    return len(left) == len(right) and all(map(known_equal, left, right))


def same_layout(left: Any, right: Any) -> bool:
    """Whether two tensors have equal shape, data type, device and strides (where a stride matters)."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return False
    if left.dtype is not right.dtype or left.device != right.device:
        return False
    if not same_sizes(left.shape, right.shape):
        return False
    strides = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(known_equal(size, 1) or known_equal(a, b) for size, a, b in strides)


def storage(node: fx.Node) -> int | None:
    """Identity of the memory behind a node's tensor, None for anything else."""
    tensor = value(node)
    if not isinstance(tensor, Tensor) or not internals.has_storage(tensor):
        return None
    return tensor.untyped_storage()._cdata


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Place of every node in the order of execution."""
    return {node: index for index, node in enumerate(graph.nodes)}


def mutated_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the arguments that the operator writes to."""
    return tuple(
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def root_of_views(node: fx.Node, allowed_users: Iterable[fx.Node]) -> list[fx.Node] | None:
    """The chain ``[root, view, ..., node]`` of whole-tensor views that lead only to ``node``.

    Args:
        node: the end of the chain.
        allowed_users: nodes that may use ``node``; every other node of the chain has one user.

    Returns:
        The chain, or None if something else uses a part of it.
    """
    if not set(node.users) <= set(allowed_users):
        return None
    chain = [node]
    while node.target in _VIEWS:
        (node,) = node.all_input_nodes[:1]
        if len(node.users) != 1:
            return None
        chain.insert(0, node)
    return chain
