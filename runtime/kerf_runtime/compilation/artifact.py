"""A compiled model as files: the pieces and the stitching plan, written and loaded.

    rank_0/graph/plan.json                     the stitching plan
    rank_0/graph/forward.py                    the stitched forward, for people
    rank_0/graph/computation_graph.py          the split graph, for people
    rank_0/pieces/<fingerprint>/piece.json     back end, static sizes, where the number of tokens is
    rank_0/pieces/<fingerprint>/general/...    files of the back end, for any number of tokens
    rank_0/pieces/<fingerprint>/size_<n>/...   the same for exactly n tokens

The same loading code runs after a cold compile (from the staging folder) and on a warm start (from a
read-only mount), so what is validated is what is served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kerf_runtime.compilation.backends import CompiledArtifact, backend_named
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.piecewise import PiecewiseBackend, TokenInput
from kerf_runtime.compilation.plan import StitchPlan, stitch, stitched_source
from kerf_runtime.compilation.stored import UNREADABLE
from kerf_runtime.config.compilation import CompilerBackendName
from kerf_runtime.config.key import canonical_json
from kerf_runtime.errors import CompileError

__all__ = ["CompiledPiece", "LoadedArtifact", "load_artifact", "write_artifact"]

COMPUTATION_GRAPH = "computation_graph.py"
TRANSFORMED_CODE = "transformed_code.py"
"""Names in a dump: the split graph, and what runs in its place."""

_GRAPH = Path("rank_0/graph")
_PIECES = Path("rank_0/pieces")


@dataclass(frozen=True)
class CompiledPiece:
    """One distinct piece, compiled.

    Attributes:
        backend: name of the back end.
        general: for any number of tokens.
        static: number of tokens -> artifact for exactly that many.
        tokens: where the piece sees the number of tokens.
    """

    backend: str
    general: CompiledArtifact
    static: Mapping[int, CompiledArtifact]
    tokens: TokenInput | None

    def describe(self) -> dict[str, Any]:
        """The content of ``piece.json``."""
        tokens = None if self.tokens is None else [self.tokens.index, self.tokens.dim]
        return {"backend": self.backend, "sizes": sorted(self.static), "tokens": tokens}


class LoadedArtifact:
    """The pieces of a compiled model, and the forward that calls them.

    ``forward`` is rebuilt when pieces are wrapped, and is one straight line of calls without guards.
    ``sources`` is the generated Python code by file name, for people who debug.
    """

    def __init__(
        self,
        plan: StitchPlan,
        pieces: Mapping[str, PiecewiseBackend],
        state: Mapping[str, Tensor],
        sources: Mapping[str, str],
    ) -> None:
        self.plan = plan
        self.sources = sources
        self._state = state
        self._calls: dict[int, Callable[..., object]] = {
            index: pieces[step.target]
            for index, step in enumerate(plan.steps)
            if step.kind == "piece"
        }
        self.forward = stitch(plan, self._calls, state)

    def wrap_pieces(self, wrap: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
        """Replace every piece call by ``wrap(piece call)`` and stitch again."""
        self._calls = {index: wrap(call) for index, call in self._calls.items()}
        self.forward = stitch(self.plan, self._calls, self._state)

    def forward_through(
        self, wrap: Callable[[str, Callable[..., object]], Callable[..., object]]
    ) -> Callable[..., Tensor]:
        """Another forward, in which ``wrap(fingerprint, piece call)`` stands for every piece call."""
        calls = {
            index: wrap(self.plan.steps[index].target, call) for index, call in self._calls.items()
        }
        return stitch(self.plan, calls, self._state)


def write_artifact(
    folder: Path, plan: StitchPlan, pieces: Mapping[str, CompiledPiece], graph_source: str
) -> None:
    """Write plan, pieces and the readable split graph below ``folder``."""
    graph = folder / _GRAPH
    graph.mkdir(parents=True)
    (graph / "plan.json").write_text(canonical_json(plan.to_json()) + "\n")
    (graph / "forward.py").write_text(stitched_source(plan))
    (graph / COMPUTATION_GRAPH).write_text(graph_source)
    for fingerprint, piece in pieces.items():
        place = folder / _PIECES / fingerprint
        place.mkdir(parents=True)
        (place / "piece.json").write_text(canonical_json(piece.describe()) + "\n")
        for size, artifact in [(None, piece.general), *piece.static.items()]:
            shape = place / _shape_folder(size)
            shape.mkdir()
            for name, content in artifact.files.items():
                (shape / name).write_bytes(content)
            compilation_counter.artifacts_saved += 1


def load_artifact(folder: Path, model: nn.Module) -> LoadedArtifact:
    """Load plan and pieces from ``folder`` (verified by the caller) and bind the model's parameters.

    Raises:
        CompileError: something in the artifact is not understood.
    """
    try:
        plan = StitchPlan.from_json(json.loads((folder / _GRAPH / "plan.json").read_text()))
    except UNREADABLE as error:
        raise CompileError(
            f"the stitching plan cannot be read: {error}", where=str(folder)
        ) from error
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    inputs = {step.target: len(step.inputs) for step in plan.steps if step.kind == "piece"}
    pieces, sources = {}, {TRANSFORMED_CODE: stitched_source(plan)}
    graph = folder / _GRAPH / COMPUTATION_GRAPH
    if graph.is_file():
        sources[COMPUTATION_GRAPH] = _text(graph)
    for fingerprint in plan.piece_fingerprints:
        place = folder / _PIECES / fingerprint
        pieces[fingerprint] = _load_piece(
            place, fingerprint, inputs[fingerprint], recordable=on_cpu
        )
        sources.update(_generated_code(place, fingerprint))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return LoadedArtifact(plan, pieces, state, sources)


def _shape_folder(size: int | None) -> str:
    return "general" if size is None else f"size_{size}"


def _load_piece(
    place: Path, fingerprint: str, num_inputs: int, *, recordable: bool
) -> PiecewiseBackend:
    try:
        data = json.loads((place / "piece.json").read_text())
        backend = backend_named(CompilerBackendName(data["backend"]))
        sizes = [int(size) for size in data["sizes"]]
        tokens = None
        if data["tokens"] is not None:
            index, dim = data["tokens"]
            tokens = TokenInput(int(index), None if dim is None else int(dim))
    except UNREADABLE as error:
        raise CompileError(f"a piece cannot be read: {error}", where=str(place)) from error
    calls = {}
    for size in (None, *sizes):
        shape = _shape_folder(size)
        calls[size] = backend.load(
            place / shape, num_inputs=num_inputs, identity=f"{fingerprint}_{shape}"
        )
        compilation_counter.artifacts_loaded += 1
    general = calls.pop(None)
    static = {size: call for size, call in calls.items() if size is not None}
    return PiecewiseBackend(
        general, fingerprint, static=static, tokens=tokens, recordable=recordable
    )


def _generated_code(place: Path, fingerprint: str) -> dict[str, str]:
    """The Python code of a piece by the name it has in a dump."""
    return {
        f"piece_{fingerprint}_{path.parent.name}.py": _text(path)
        for path in sorted(place.glob("*/*.py"))
    }


def _text(path: Path) -> str:
    """What people read beside the artifact; it is never run, so no byte of it is a reason to refuse."""
    return path.read_text(errors="replace")
