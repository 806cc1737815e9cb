"""Where the weights lay when graphs were recorded: a replay reads the same addresses for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from kerf_runtime.errors import CaptureError

__all__ = ["NamedTensors", "WeightAddresses", "named_tensors"]

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gives the model's parameters and buffers as they are now."""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer with its name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class WeightAddresses:
    """Compares where weights are with where they were.

    Args:
        tensors: of the model, whenever it is asked.
    """

    def __init__(self, tensors: NamedTensors) -> None:
        self.tensors = tensors
        self._before: dict[str, int] = {}

    def remember(self) -> None:
        """Note where every weight is now."""
        self._before = {name: tensor.data_ptr() for name, tensor in self.tensors()}

    def check(self) -> None:
        """Compare.

        Raises:
            CaptureError: a weight moved; names the first three.
        """
        now = {name: tensor.data_ptr() for name, tensor in self.tensors()}
        before = self._before
        moved = sorted(name for name in before if now.get(name) != before[name])
        if moved:
            more = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
            raise CaptureError(
                f"weights moved since the graphs were captured: {', '.join(moved[:3])}{more}",
                hint="Copy new values into the tensors that exist, or capture again",
            )
