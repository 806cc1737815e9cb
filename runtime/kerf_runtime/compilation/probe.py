"""Runs the programs of pieces without a compiler: beside the compiled pieces, or in their place.

Small differences of rounding grow on their way through a deep model, so the end of it tells little about where
they come from.  A piece by itself is short: with the inputs that it has in the eager model, its compiled form
must give nearly the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from kerf_runtime.compilation.artifact import LoadedArtifact

__all__ = ["PieceError", "PieceProbe", "difference"]

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Functions and methods that give memory as it is."""

_MOST_ELEMENTS = 2**26
"""Of tensors that are compared at once: there are about eight copies of them in float32."""


def difference(expected: Tensor, actual: Tensor) -> tuple[float, float]:
    """The largest difference, and the largest relative to the largest value of its row.

    Not a number on one side, or an infinity, is no small difference; on both sides it is none.

    Args:
        expected: [..., N], of any data type.
        actual: likewise.
    """
    if not expected.numel():
        return 0.0, 0.0
    if expected.dim() > 1 and len(expected) > 1 and expected.numel() > _MOST_ELEMENTS:
        rows = max(1, _MOST_ELEMENTS * len(expected) // expected.numel())
        parts = zip(expected.split(rows), actual.split(rows), strict=True)
        absolute, relative = zip(*(difference(one, two) for one, two in parts), strict=True)
        return max(absolute), max(relative)
    expected, actual = expected.float(), actual.float()
    same = expected.isclose(actual, rtol=0, atol=0, equal_nan=True)
    apart = (expected - actual).abs().masked_fill(same, 0)
    apart = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
    scale = expected.abs() if expected.dim() == 0 else expected.abs().amax(dim=-1, keepdim=True)
    scale = scale.nan_to_num(nan=1.0).clamp_min(1e-6)
    return float(apart.max()), float(
        (apart / scale).nan_to_num(nan=torch.inf, posinf=torch.inf).max()
    )


@dataclass(frozen=True)
class PieceError:
    """How far a compiled piece is from its program on the same inputs.

    Attributes:
        piece: its fingerprint.
        error: relative to the largest value of the row.
        limit: what is accepted of this result.
    """

    piece: str
    error: float
    limit: float

    @property
    def share(self) -> float:
        """Of the limit; above 1 it is not accepted."""
        return self.error / self.limit


class PieceProbe:
    """Two forwards of a model that consist of its programs.

    Args:
        artifact: the compiled model; it is not changed.
        programs: what was compiled, by fingerprint.
        limit: accepted difference of a result, relative to the largest value of the row.
        roundings: or so many times what it changes when every input moves by up to one unit in the last place; 0 to
            accept no more than ``limit``.  Where large values cancel out that is far more.

    Attributes:
        compared: the eager model, in which every compiled piece runs beside its program.
        rounded: the eager model, in which every result of a program moves by up to one unit in the last place.
        worst: what came nearest to its limit, or went furthest beyond, in ``compared`` so far.
    """

    def __init__(
        self,
        artifact: LoadedArtifact,
        programs: Mapping[str, fx.GraphModule],
        *,
        limit: float,
        roundings: float,
    ) -> None:
        self._programs = programs
        self._unwritten = {name: _unwritten(program) for name, program in programs.items()}
        self._limit = limit
        self._roundings = roundings
        self._generator: torch.Generator | None = None
        self.worst = PieceError("none", 0.0, limit)
        self.compared = artifact.forward_through(self._compare)
        self.rounded = artifact.forward_through(self._round)

    def _compare(self, fingerprint: str, piece: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
        program = self._programs[fingerprint]

        def run(*inputs: Any) -> Sequence[Any]:
            # Any of them may write to its inputs, though never to a parameter.
            own = _copies(inputs)
            moved = self._inputs_moved(inputs)
            results = _results(program, own)
            seen, compiled = [*results, *own], [*piece(*inputs), *inputs]
            near = seen if moved is None else [*_results(program, moved), *moved]
            for index, (wanted, got, other) in enumerate(zip(seen, compiled, near, strict=True)):
                if isinstance(wanted, Tensor) and index not in self._unwritten[fingerprint]:
                    unit = 0.0 if moved is None else difference(wanted, other)[1]
                    self._note(fingerprint, difference(wanted, got)[1], self._roundings * unit)
            for mine, theirs in zip(own, inputs, strict=True):
                if mine is not theirs:
                    theirs.copy_(mine)
            return results

        return run

    def _inputs_moved(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Copies that are up to one unit in the last place away; None if nobody asks what rounding does."""
        if not self._roundings:
            return None
        return [self._moved(x) if _is_written(x) else x for x in _copies(inputs)]

    def _note(self, piece: str, error: float, rounding: float) -> None:
        # An infinity that rounding makes is no measure of it.
        limit = max(self._limit, rounding if math.isfinite(rounding) else 0.0)
        found = PieceError(piece, error, limit)
        if found.share > self.worst.share:
            self.worst = found

    def _round(self, fingerprint: str, _: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
        program = self._programs[fingerprint]
        return lambda *inputs: [self._moved(value) for value in _results(program, inputs)]

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
            return value
        if self._generator is None:
            self._generator = torch.Generator(value.device).manual_seed(0)
        chance = torch.rand(value.shape, generator=self._generator, device=value.device) * 2 - 1
        moved = value.float() * (1 + torch.finfo(value.dtype).eps * chance)
        return moved.to(value.dtype)


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [x.clone() if _is_written(x) else x for x in inputs]


def _unwritten(program: fx.GraphModule) -> frozenset[int]:
    """Which results are memory that a splitting op will fill: there is nothing in it to be compared."""
    returned = program.graph.output_node().args[0]
    nodes = returned if isinstance(returned, (tuple, list)) else (returned,)
    return frozenset(
        index
        for index, node in enumerate(nodes)
        if isinstance(node, fx.Node)
        and node.op in ("call_function", "call_method")
        and getattr(node.target, "__name__", str(node.target)) in _ALLOCATIONS
        and all(user.op == "output" for user in node.users)
    )


def _results(program: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """As pieces give them: a sequence, of one result too."""
    results = program(*inputs)
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _is_written(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
