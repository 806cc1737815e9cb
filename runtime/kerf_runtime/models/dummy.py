"""Random weights in the place of a checkpoint's, for benchmarks: speed does not depend on their values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kerf_runtime.errors import ModelError
from kerf_runtime.ops.fp8 import FP8

__all__ = ["NoTensors", "fill_at_random"]

_DEVIATION = 0.02


class NoTensors:
    """A source for models whose weights come from nowhere."""

    is_gguf = False

    def __init__(self, where: str) -> None:
        self.where = where

    def names(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of no tensor.

        Raises:
            ModelError: always.
        """
        raise self._missing(name)

    def read(self, name: str) -> Tensor:
        """No tensor.

        Raises:
            ModelError: always.
        """
        raise self._missing(name)

    def file(self, name: str) -> str:
        """Of no tensor.

        Raises:
            ModelError: always.
        """
        raise self._missing(name)

    def stored(self, name: str) -> None:
        """Of no tensor.

        Raises:
            ModelError: always.
        """
        raise self._missing(name)

    def _missing(self, name: str) -> ModelError:
        return ModelError(
            f"{name} is needed and is read from a checkpoint only",
            where=self.where,
            hint="Load this model with loadFormat auto",
        )

    def __enter__(self) -> NoTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to close."""


def fill_at_random(
    model: nn.Module, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> None:
    """Give every parameter of a model on the meta device its memory, and values that activations survive.

    Matrices are small and normal, norms and scales one, biases zero; the same seed gives the same model.

    Args:
        model: changed in place.
        dtype: of all parameters but FP8 weights and their float32 scales.
        device: where they go.
        seed: of the random numbers.
    """
    chance = torch.Generator(device).manual_seed(seed)
    for name, meta in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        value: Tensor
        if leaf.endswith("scale"):
            value = torch.ones(meta.shape, dtype=meta.dtype, device=device)
        elif meta.ndim == 1:
            filled = 0.0 if leaf == "bias" else 1.0
            value = torch.full(meta.shape, filled, dtype=dtype, device=device)
        else:
            value = torch.empty(meta.shape, dtype=dtype, device=device)
            value.normal_(std=_DEVIATION, generator=chance)
            value = value.to(FP8) if meta.dtype is FP8 else value
        module = model.get_submodule(owner)
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
