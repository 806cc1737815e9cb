"""Forwards that write state, take optional arguments, or call code from other modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.compilation.inlined import Shift, double, halve, plus_one
from tests.compilation.models import Awkward
from torch import Tensor, nn

from kerf_runtime.compilation.decorator import IntermediateTensors, support_torch_compile


class Counter(nn.Module):
    """A layer with a buffer that is written in the way ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("count", torch.zeros(4))
        self.calls = 0
        self.last = torch.zeros(())
        self.seen: dict[str, int] = {}
        self.norm = nn.BatchNorm1d(4)
        self.limit = nn.Hardtanh(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.count.add_(1)
        if self.how == "copy":
            self.count.copy_(x[0])
        if self.how == "view":
            self.count.view(2, 2)[0].t().mul_(2)
        if self.how == "out":
            torch.add(self.count, 1, out=self.count)
        if self.how == "item":
            self.count[0] = 2
        if self.how == "custom operator":
            torch.ops.kerf.attention(*[self.count.view(1, 1, 4)] * 4, "layer")
        if self.how == "operator":
            torch.ops.aten.add_.Tensor(self.count, 1)
        if self.how == "inplace flag":
            F.relu(self.count, inplace=True)
        if self.how == "inplace layer":
            self.limit(self.count)
        if self.how == "batch norm":
            F.batch_norm(x, self.count, self.norm.running_var, training=True)
        if self.how == "assigned buffer":
            self.count = self.count + 1
        if self.how == "attribute":
            self.calls += 1
        if self.how == "tensor attribute":
            self.last = x + 1
        if self.how == "dictionary":
            self.seen["tokens"] = 3
        if self.how == "to a copy":
            self.count.clone().add_(1)
        if self.how == "to a result":
            x.mul_(self.count)
        return x * self.count


@support_torch_compile
class Stateful(Awkward):
    """``Counter`` as layer 1 of two."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counter("nothing"), Counter(how)])

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.rows(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


@support_torch_compile
class Optionals(Awkward):
    """An argument between the others and one at the end that may be None."""

    def forward(
        self, input_ids: Tensor, extra: Tensor | None, bias: Tensor | None = None
    ) -> Tensor:
        x = self.rows(input_ids)
        if extra is not None:
            x = x + extra.unsqueeze(1)
        return x if bias is None else x + bias.unsqueeze(1)


@support_torch_compile
class TakesIntermediates(Awkward):
    def forward(self, previous: IntermediateTensors) -> Tensor:
        return previous["hidden"] * self.scale + previous["residual"]


@support_torch_compile(dynamic_arg_dims={"table": (0, -1)})
class TwoDynamicDims(nn.Module):
    def forward(self, table: Tensor) -> Tensor:
        return table * 2 + table.shape[1]


@support_torch_compile
class CallsOtherModules(Awkward):
    """Calls a function, a decorated one, a partial one and a layer that live elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.shift(halve(decorated(double(self.rows(input_ids)))))


@plus_one
def decorated(x: Tensor) -> Tensor:
    return x * 3


class InDouble(nn.Module):
    """A layer computed in another data type than the rest of the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.double()).to(x.dtype)


@support_torch_compile
class ReturnsNothing(nn.Module):
    """There is nothing in it to trace."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> None:
        return None
