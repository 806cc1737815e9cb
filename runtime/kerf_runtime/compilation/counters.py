"""Process-wide counters of what the compiler and the static graphs did.

Tests assert on them with ``expect``; ``/debug/graphs`` and the metrics report them.  No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

from kerf_runtime.errors import CompileError

__all__ = [
    "PASS_COUNTERS",
    "CompilationCounter",
    "CompileGate",
    "compilation_counter",
    "compile_gate",
]


@dataclass
class CompilationCounter:
    """Counts since the process started; every field only grows."""

    dynamo_traces: int = 0
    graphs_seen: int = 0
    pieces_seen: int = 0
    capturable_pieces_seen: int = 0
    backend_compilations: int = 0
    inductor_compilations: int = 0
    static_compilations: int = 0
    untuned_compilations: int = 0
    artifacts_saved: int = 0
    artifacts_loaded: int = 0
    graphs_captured: int = 0
    trial_captures: int = 0
    graph_replays: int = 0
    guards_evaluated: int = 0
    compilations_after_startup: int = 0
    captures_after_startup: int = 0
    matrix_add_matches: int = 0
    noop_matches: int = 0
    norm_quant_matches: int = 0
    activation_quant_matches: int = 0
    attention_quant_matches: int = 0
    functionalization_matches: int = 0

    def snapshot(self) -> dict[str, int]:
        """The counts as a plain dictionary."""
        return asdict(self)

    def add(self, deltas: Mapping[str, int]) -> None:
        """Add what another process counted on behalf of this one."""
        for name, delta in deltas.items():
            setattr(self, name, getattr(self, name) + delta)

    @contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """Assert that the block changes each named counter by exactly the given amount.

        Raises:
            AssertionError: a counter changed otherwise; shows expected and actual changes.
            TypeError: no such counter.
        """
        unknown = deltas.keys() - {field.name for field in fields(self)}
        if unknown:
            raise TypeError(f"no such counter: {', '.join(sorted(unknown))}")
        before = self.snapshot()
        yield
        after = self.snapshot()
        actual = {name: after[name] - before[name] for name in deltas}
        if actual != deltas:
            raise AssertionError(f"expected counter changes {deltas}, got {actual}")


PASS_COUNTERS = {
    "unfuse_matrix_adds": "matrix_add_matches",
    "noop_elimination": "noop_matches",
    "norm_quant_fusion": "norm_quant_matches",
    "activation_quant_fusion": "activation_quant_matches",
    "attention_quant_fusion": "attention_quant_matches",
    "fix_functionalization": "functionalization_matches",
}
"""Name of a pass -> the counter of its matches."""

compilation_counter = CompilationCounter()
"""The counters of this process."""


@dataclass
class CompileGate:
    """Whether this process may still trace and compile; the engine's process closes it when it serves."""

    open: bool = True

    def check(self, what: str) -> None:
        """Refuse and count a compilation after start-up: it would stall every request.

        Raises:
            CompileError: the gate is closed.
        """
        if not self.open:
            compilation_counter.compilations_after_startup += 1
            raise CompileError(
                f"{what} was attempted after start-up",
                hint="This is a bug: everything is compiled before serving",
            )


compile_gate = CompileGate()
"""The gate of this process."""
