"""Random straight-line programs over a few tensors [T, 4], as forwards that Dynamo can trace.

A program is a list of ``(name, first, second)``: the name of a step and which of the values so far it
takes.  Values are two arguments, a buffer's broadcast, and what steps give; steps write in place, into
outputs and through views, and alias one another freely.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kerf_runtime.compilation.decorator import support_torch_compile

library = torch.library.Library("kerf_programs", "DEF")
library.define("fill(Tensor x, Tensor(a!) output, float scale) -> ()")
library.define("accumulate(Tensor(a!) x, Tensor y) -> ()")
library.define("shift(Tensor x, int by) -> Tensor")
library.define("both(Tensor x, Tensor y) -> (Tensor, Tensor)")


def _fill(x: Tensor, output: Tensor, scale: float) -> None:
    output.copy_(x * scale)


def _accumulate(x: Tensor, y: Tensor) -> None:
    x.add_(y.clone())


library.impl("fill", _fill, "CPU")
library.impl("accumulate", _accumulate, "CPU")
library.impl("shift", lambda x, by: torch.roll(x, by, 0), "CPU")
library.impl("both", lambda x, y: (x + y, x - y), "CPU")
library.impl("fill", lambda x, output, scale: None, "Meta")
library.impl("accumulate", lambda x, y: None, "Meta")
library.impl("shift", lambda x, by: torch.empty_like(x), "Meta")
library.impl("both", lambda x, y: (torch.empty_like(x), torch.empty_like(x)), "Meta")

own, aten = torch.ops.kerf_programs, torch.ops.aten

SPLITTING = (
    "kerf_programs::fill",
    "kerf_programs::accumulate",
    "kerf_programs::shift",
    "kerf_programs::both",
    "aten::add_.Tensor",
    "aten::mul.Tensor",
)


def _out_variant(x: Tensor, y: Tensor) -> list[Tensor]:
    output = torch.empty_like(x)
    return [torch.add(x, y, out=output), output]


def _into(x: Tensor, y: Tensor) -> list[Tensor]:
    output = torch.empty_like(x)
    own.fill(y, output, 0.5)
    return [output]


def _into_halves(x: Tensor, y: Tensor) -> list[Tensor]:
    """Two splitting calls fill one tensor through two views, as a KV cache is filled."""
    output = torch.empty_like(x)
    own.fill(x[:, :2], output[:, :2], 2.0)
    own.fill(y[:, 2:], output[:, 2:], 0.5)
    return [output]


def _written(_: object) -> list[Tensor]:
    """The step is a write; it gives no new value."""
    return []


STEPS: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    # new values
    "add": lambda x, y: [x + y],
    "multiply by the packet": lambda x, y: [aten.mul.Tensor(x, y)],
    "relu": lambda x, y: [torch.relu(x)],
    "rows": lambda x, y: [x * x.shape[0]],
    "clone": lambda x, y: [y.clone()],
    "shift": lambda x, y: [own.shift(x, 1)],
    "both": lambda x, y: list(own.both(x, y)),
    "second of both": lambda x, y: [own.both(x, y)[1]],
    # aliases
    "view": lambda x, y: [x.view(x.shape[0], 4)],
    "transposed twice": lambda x, y: [x.t().t()],
    "slice of everything": lambda x, y: [x[:, :]],
    "detached": lambda x, y: [x.detach()],
    # writes
    "add in place": lambda x, y: [x.add_(y)],
    "multiply in place": lambda x, y: _written(x.mul_(0.5)),
    "augmented": lambda x, y: _written(x.__iadd__(y)),
    "copy": lambda x, y: _written(x.copy_(y)),
    "add in place by overload": lambda x, y: _written(aten.add_.Tensor(x, y)),
    "zero": lambda x, y: _written(x.zero_()),
    "accumulate": lambda x, y: _written(own.accumulate(x, y)),
    # writes through views
    "columns": lambda x, y: _written(x[:, 1:3].mul_(y[:, :2].clone())),
    "transposed row": lambda x, y: _written(x.t()[1].add_(1.0)),
    "flat": lambda x, y: _written(x.view(-1).sub_(0.25)),
    "first row": lambda x, y: _written(x[0].copy_(y[-1].clone())),
    "item": lambda x, y: _written(x.__setitem__((slice(None), 0), y[:, 3].clone())),
    "chunk": lambda x, y: _written(x.chunk(2, dim=1)[1].neg_()),
    "fill a view": lambda x, y: _written(own.fill(y[:, :2].clone(), x[:, 2:], 3.0)),
    "accumulate into a transposed view": lambda x, y: _written(own.accumulate(x.t(), y.t())),
    # outputs
    "out": _out_variant,
    "out into a value": lambda x, y: [torch.mul(x, y, out=x)],
    "fill": _into,
    "fill halves": _into_halves,
    "fill a value": lambda x, y: _written(own.fill(x, y, 0.5)),
}


@support_torch_compile
class Program(nn.Module):
    """The program ``steps``; gives value ``result``, or the sum of all values if it is None."""

    def __init__(self, steps: list[tuple[str, int, int]], result: int | None) -> None:
        super().__init__()
        self.steps, self.result = tuple(steps), result
        self.register_buffer("row", torch.tensor([0.5, -1.0, 2.0, 0.125]))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        values = [a, b, a * self.row]
        for name, first, second in self.steps:
            x, y = values[first % len(values)], values[second % len(values)]
            values += STEPS[name](x, y)
            self.total.add_(x[0])
        if self.result is not None:
            return values[self.result % len(values)]
        result = values[0]
        for value in values[1:]:
            result = result + value
        return result
