"""Takes the add of a whole matrix out of a matrix product again, where Inductor put it in.

Inductor turns ``x + a @ b`` into ``addmm(x, a, b)`` when the sum is a result of the piece, which the
residual of every layer is.  PyTorch then copies ``x`` to the output before the product: a launch, a node in
every recorded graph, and the memory traffic that a fused add would have needed anyway.  As an add it joins
the norm behind it.  In half precision the sum is then also what the model's own code computes.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from kerf_runtime.compilation.passes.nodes import known_equal, value

__all__ = ["unfuse_matrix_adds"]

_aten = torch.ops.aten


def unfuse_matrix_adds(graph: fx.Graph) -> int:
    """Rewrite ``graph`` in place; the addition of a vector (a bias) stays where it is.

    Returns:
        How many products were separated from their addition.
    """
    matches = 0
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        if not _adds_a_matrix(node):
            continue
        addend, left, right = node.args
        with graph.inserting_before(node):
            product = graph.call_function(_aten.mm.default, (left, right))
            total = graph.call_function(_aten.add.Tensor, (addend, product))
        product.meta, total.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        matches += 1
    return matches


def _adds_a_matrix(node: fx.Node) -> bool:
    """Whether the addend has the shape and type of the result and nothing is scaled."""
    addend, result = value(node.args[0]), value(node)
    if node.kwargs or len(node.args) != 3:
        return False
    if not isinstance(addend, Tensor) or not isinstance(result, Tensor):
        return False
    return (
        addend.ndim == result.ndim
        and addend.dtype is result.dtype
        and all(known_equal(a, b) for a, b in zip(addend.shape, result.shape, strict=True))
    )
