"""The eager back end: a piece is run operator by operator, as it was traced.  For debugging.

The artifact is the piece's Python source, so a warm start traces nothing here either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from kerf_runtime.compilation import internals
from kerf_runtime.compilation.backends.interface import (
    CompiledArtifact,
    CompileRequest,
    PieceCall,
)
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.program import load_source, piece_source
from kerf_runtime.errors import CompileError, ConfigError

__all__ = ["EagerBackend"]

_FILE = "graph.py"


class EagerBackend:
    """Runs pieces as they were traced; compiles nothing."""

    name = "eager"

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse other versions of torch, whose traces nobody looked at, and options: there are none."""
        internals.check_torch_version()
        if options:
            raise ConfigError(
                f"the eager back end has no options: {', '.join(sorted(options))}",
                where="compilation.inductorConfig",
                hint="Remove inductorConfig, or set compilation.backend to inductor",
            )

    def prepare_worker(self, device: torch.device, threads: int) -> None:
        """Nothing to set up."""

    def session(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def compile(self, request: CompileRequest) -> CompiledArtifact:
        """Keep the source of the piece.

        Raises:
            CompileError: the piece calls something that its source cannot name.
        """
        compile_gate.check("the compilation of a piece")
        compilation_counter.backend_compilations += 1
        if request.tokens is not None:
            compilation_counter.static_compilations += 1
        source = piece_source(request.module)
        return CompiledArtifact({_FILE: source.encode()}, len(request.example_values))

    def load(self, folder: Path, *, num_inputs: int, identity: str) -> PieceCall:
        try:
            source = (folder / _FILE).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CompileError(f"a piece cannot be read: {error}", where=str(folder)) from error
        forward, arguments = load_source(source, identity)
        if arguments != num_inputs:
            raise CompileError(
                f"the piece has {arguments} inputs instead of {num_inputs}", where=str(folder)
            )

        def call(inputs: list[Any]) -> Any:
            taken = tuple(inputs)
            inputs.clear()
            outputs = forward(None, *taken)
            return outputs if isinstance(outputs, (tuple, list)) else (outputs,)

        return call
