"""A compiled model as files: the pieces and the stitching plan, written and loaded.

    rank_0/graph/plan.json          the stitching plan
    rank_0/graph/forward.py         the stitched forward, for people
    rank_0/pieces/<fingerprint>/wrapper.py, kernel_<i>.so

The same loading code runs after a cold compile (from the staging folder) and on a warm start (from a
read-only mount), so what is validated is what is served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.loader import load_wrapper
from kerf_runtime.compilation.piecewise import CompiledPiece
from kerf_runtime.compilation.plan import StitchPlan, stitch, stitched_source
from kerf_runtime.config.key import canonical_json
from kerf_runtime.errors import CompileError

__all__ = ["CompiledArtifact", "LoadedArtifact", "load_artifact", "write_artifact"]

_GRAPH = Path("rank_0/graph")
_PIECES = Path("rank_0/pieces")


@dataclass(frozen=True)
class CompiledArtifact:
    """A compiled piece: relocatable, loadable by ``loader.load_wrapper`` in another process."""

    wrapper: str
    libraries: tuple[bytes, ...]
    num_inputs: int


class LoadedArtifact:
    """The pieces of a compiled model, and the forward that calls them.

    ``forward`` is rebuilt when pieces are wrapped, and is one straight line of calls without guards.
    ``sources`` is the generated Python code by file name, for people who debug.
    """

    def __init__(
        self,
        plan: StitchPlan,
        pieces: Mapping[str, CompiledPiece],
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


def write_artifact(
    folder: Path, plan: StitchPlan, artifacts: Mapping[str, CompiledArtifact]
) -> None:
    """Write plan and pieces below ``folder``."""
    graph = folder / _GRAPH
    graph.mkdir(parents=True)
    (graph / "plan.json").write_text(canonical_json(plan.to_json()) + "\n")
    (graph / "forward.py").write_text(stitched_source(plan))
    for fingerprint, artifact in artifacts.items():
        piece = folder / _PIECES / fingerprint
        piece.mkdir(parents=True)
        (piece / "wrapper.py").write_text(artifact.wrapper)
        for index, library in enumerate(artifact.libraries):
            (piece / f"kernel_{index}.so").write_bytes(library)
        compilation_counter.artifacts_saved += 1


def load_artifact(folder: Path, model: nn.Module) -> LoadedArtifact:
    """Load plan and pieces from ``folder`` (verified by the caller) and bind the model's parameters.

    Raises:
        CompileError: something in the artifact is not understood.
    """
    try:
        plan = StitchPlan.from_json(json.loads((folder / _GRAPH / "plan.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CompileError(
            f"the stitching plan cannot be read: {error}", where=str(folder)
        ) from error
    inputs = {step.target: len(step.inputs) for step in plan.steps if step.kind == "piece"}
    pieces, sources = {}, {"forward.py": stitched_source(plan)}
    for fingerprint in plan.piece_fingerprints:
        piece = folder / _PIECES / fingerprint
        try:
            wrapper = (piece / "wrapper.py").read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CompileError(f"a piece cannot be read: {error}", where=str(piece)) from error
        libraries = sorted(
            piece.glob("kernel_*.so"), key=lambda p: int(p.stem.removeprefix("kernel_"))
        )
        call = load_wrapper(
            wrapper, libraries, num_inputs=inputs[fingerprint], identity=fingerprint
        )
        pieces[fingerprint] = CompiledPiece(call, fingerprint)
        sources[f"piece_{fingerprint}.py"] = wrapper
        compilation_counter.artifacts_loaded += 1
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return LoadedArtifact(plan, pieces, state, sources)
