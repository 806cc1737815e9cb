"""One computation in two forms, and the policy that chooses between them.

The native form is ATen, which Inductor sees through and fuses; the custom form is an operator of
``kerf_runtime.ops`` with a kernel of its own.  The choice is made once, before anything is traced: it
binds ``forward`` of the instance, so that neither a call nor a trace meets a branch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import nn

__all__ = ["CustomOp", "apply_policy"]


class CustomOp(nn.Module, ABC):
    """Base of the layers that the policy ``customOps`` governs; they hold no parameters.

    Subclasses give ``name`` (the word of the policy), ``forward_native`` and ``forward_custom``, both
    with the same arguments and results.

    Attributes:
        custom: which form is bound.
    """

    name: ClassVar[str]
    custom: bool

    def __init__(self) -> None:
        super().__init__()
        self.choose(custom=False)

    def choose(self, *, custom: bool) -> None:
        """Bind ``forward`` to one of the forms."""
        self.custom = custom
        self.forward = self.forward_custom if custom else self.forward_native

    @abstractmethod
    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The ATen form."""

    @abstractmethod
    def forward_custom(self, *args: Any, **kwargs: Any) -> Any:
        """The custom operator."""

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        return "custom" if self.custom else "native"


def apply_policy(model: nn.Module, enabled: frozenset[str]) -> dict[str, int]:
    """Choose the form of every ``CustomOp`` in ``model``; before it is traced or captured.

    Args:
        model: changed in place.
        enabled: names of the operators that run in their custom form, as
            ``kerf_runtime.config.custom_ops`` resolved them; all others run native.

    Returns:
        How many layers of each name run in their custom form, for the names that the model has.
    """
    counts: dict[str, int] = {}
    for layer in model.modules():
        if isinstance(layer, CustomOp):
            layer.choose(custom=layer.name in enabled)
            counts[layer.name] = counts.get(layer.name, 0) + layer.custom
    return counts
