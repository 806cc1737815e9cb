"""Cold compile of a model: trace, split, compile every distinct piece, plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kerf_runtime.compilation.artifact import CompiledArtifact
from kerf_runtime.compilation.fingerprint import fingerprint_piece
from kerf_runtime.compilation.inductor import (
    check_torch_version,
    compile_piece,
    inductor_session,
    validate_options,
)
from kerf_runtime.compilation.plan import StitchPlan, build_plan
from kerf_runtime.compilation.split import Piece, resolve_splitting_ops, split_graph
from kerf_runtime.compilation.trace import count_guard_evaluations, trace_forward
from kerf_runtime.errors import ConfigError

__all__ = ["CompiledModel", "Progress", "compile_model"]

Progress = Callable[[str, str, float | None], None]
"""Called with a phase name, a detail for people and the fraction done, if known."""

_EXAMPLE_TOKENS = 32


@dataclass(frozen=True)
class CompiledModel:
    """Everything that is stored: the plan, the pieces by fingerprint, the traced modules, timings."""

    plan: StitchPlan
    artifacts: dict[str, CompiledArtifact]
    sources: tuple[str, ...]
    timings: dict[str, float]


def compile_model(
    model: nn.Module,
    *,
    splitting_ops: tuple[str, ...],
    inductor_options: dict[str, Any],
    device: torch.device,
    progress: Progress,
) -> CompiledModel:
    """Trace ``model.forward(input_ids, positions)`` once and compile every distinct piece.

    Raises:
        GraphBreakError: the forward is not one graph.
        CompileError: a piece cannot be compiled for a symbolic number of tokens.
        ConfigError: an unknown Inductor option, or a splitting op that is unknown or never called.
    """
    check_torch_version()
    ops = resolve_splitting_ops(splitting_ops)
    validate_options(inductor_options)
    timings: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        timings[phase] = now - clock
        clock = now

    progress("trace", "one Dynamo trace", None)
    arguments = _example_arguments(device)
    traced = trace_forward(model, arguments)
    count_guard_evaluations()
    lap("trace")
    progress("split", "cutting at " + (", ".join(splitting_ops) or "nothing"), None)
    split = split_graph(traced.module, ops)
    if ops and not any(piece.is_splitting for piece in split.pieces):
        raise ConfigError(
            f"the forward of {type(model).__name__} calls none of {', '.join(splitting_ops)}",
            where="compilation.splittingOps",
            hint="Name operators as the model calls them (torch.ops.namespace.name), or an empty list",
        )
    fingerprints = {piece.name: fingerprint_piece(piece.module) for piece in split.compilable}
    plan = build_plan(traced, split, fingerprints, tuple(arguments))
    lap("split")

    distinct: dict[str, Piece] = {}
    for piece in split.compilable:
        distinct.setdefault(fingerprints[piece.name], piece)
    artifacts = {}
    with inductor_session():
        for index, (fingerprint, piece) in enumerate(distinct.items()):
            detail = f"piece {index + 1} of {len(distinct)}"
            progress("compile", detail, index / len(distinct))
            artifacts[fingerprint] = compile_piece(
                piece.module, _example_values(piece), inductor_options
            )
    lap("inductor")
    return CompiledModel(plan, artifacts, traced.sources, timings)


def _example_arguments(device: torch.device) -> dict[str, Tensor]:
    ids = torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64, device=device)
    return {"input_ids": ids, "positions": torch.zeros_like(ids)}


def _example_values(piece: Piece) -> list[Any]:
    return [n.meta["example_value"] for n in piece.module.graph.nodes if n.op == "placeholder"]
