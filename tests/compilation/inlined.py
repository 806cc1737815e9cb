"""Functions and layers that the models of ``tests.compilation.stateful`` call from another module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn


def double(x: Tensor) -> Tensor:
    return x * 2


def plus_one(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator: its wrapper is traced as well."""

    @wraps(function)
    def wrapper(*args: Any) -> Tensor:
        return function(*args) + 1

    return wrapper


def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


halve = partial(scaled, by=0.5)


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by
