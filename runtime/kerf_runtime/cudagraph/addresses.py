"""Where weights, metadata and caches lay when graphs were recorded: a replay reads the same addresses for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn

from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import ForwardContext

__all__ = ["NamedTensors", "WeightAddresses", "context_addresses", "moved", "named_tensors"]

_METADATA = ("query_start", "seq_lens", "block_table", "slot_mapping", "state_slots")

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gives the model's parameters and buffers as they are now."""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer with its name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def context_addresses(context: ForwardContext) -> dict[str, int]:
    """Addresses of what a whole forward reads beside its inputs and weights, by name."""
    found: dict[str, Tensor | None] = {}
    if context.attention is not None:
        found.update((name, getattr(context.attention, name)) for name in _METADATA)
    for layer, (keys, values) in context.kv_caches.items():
        found |= {f"keys of {layer}": keys, f"values of {layer}": values}
    for layer, (inputs, state) in context.states.items():
        found |= {f"inputs of {layer}": inputs, f"state of {layer}": state}
    return {name: tensor.data_ptr() for name, tensor in found.items() if tensor is not None}


def moved(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """The names, at most three, of what is not where it was; empty if everything is."""
    names = sorted(name for name in before if now.get(name) != before[name])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


class WeightAddresses:
    """Compares where weights are with where they were.

    Args:
        tensors: of the model, whenever it is asked.
        every: steps of which one compares; 0 if none does.
    """

    def __init__(self, tensors: NamedTensors, *, every: int = 0) -> None:
        self.tensors = tensors
        self._every = every
        self._steps = 0
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
        if found := moved(self._before, now):
            raise CaptureError(
                f"weights moved since the graphs were captured: {found}",
                hint="Copy new values into the tensors that exist, or capture again",
            )

    def step(self) -> None:
        """Count a step; compare if it is its turn.

        Raises:
            CaptureError: as ``check``.
        """
        if not self._every:
            return
        if self._steps % self._every == 0:
            self.check()
        self._steps += 1
