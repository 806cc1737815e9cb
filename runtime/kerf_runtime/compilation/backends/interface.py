"""What the piecewise compiler asks of a compiler, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx

from kerf_runtime.config.passes import PassConfig

__all__ = ["CompileRequest", "CompiledArtifact", "CompilerBackend", "PieceCall"]

PieceCall = Callable[[list[Any]], Sequence[Any]]
"""A loaded piece: takes the list of its inputs, empties it, returns its outputs."""


@dataclass(frozen=True)
class CompiledArtifact:
    """One compiled piece.

    Attributes:
        files: relocatable, by name; loadable by the back end that made them.
        num_inputs: of the piece.
        kernel_seconds: of the compilation, in which compilers of kernels (Triton's, C++'s) were waited for.
    """

    files: Mapping[str, bytes]
    num_inputs: int
    kernel_seconds: float = 0.0


@dataclass(frozen=True)
class CompileRequest:
    """One piece to compile.

    Attributes:
        module: the piece; not changed.
        example_values: fake tensors and sizes, one per placeholder.
        tokens: the number of tokens that all sizes in ``example_values`` were fixed to, or None for the
            general shape.
        options: the back end's own options.
        passes: passes over the piece's graph, where the back end has them.
        modules: what another process must import before it compiles: they register the operators.
        dump: folder that gets the graph before and after each pass; made if it does not exist.
    """

    module: fx.GraphModule
    example_values: Sequence[Any]
    tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    passes: PassConfig = field(default_factory=PassConfig.off)
    dump: Path | None = None
    modules: tuple[str, ...] = ()


class CompilerBackend(Protocol):
    """One compiler.  ``compile`` is called inside ``session``."""

    @property
    def name(self) -> str:
        """As in ``compilation.backend``."""
        ...

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse an environment or options that cannot work, before any time is spent.

        Raises:
            CompileError: the environment.
            ConfigError: an option.
        """
        ...

    def prepare_worker(self, device: torch.device, threads: int) -> None:
        """Set up a process that only compiles, for ``device``, with ``threads`` processes of its own.

        Does what the first compilation of a process does once, so that it is not waited for later.
        """
        ...

    def session(self) -> AbstractContextManager[None]:
        """What must be set up around compilations."""
        ...

    def compile(self, request: CompileRequest) -> CompiledArtifact:
        """Compile one piece.

        Raises:
            CompileError: the piece cannot be compiled as asked.
        """
        ...

    def load(self, folder: Path, *, num_inputs: int, identity: str) -> PieceCall:
        """The callable of an artifact whose files are in ``folder`` (verified by the caller).

        Args:
            folder: where the files are; may be read-only.
            num_inputs: how many inputs the piece has; anything else is refused.
            identity: unique name of the artifact in this process.

        Raises:
            CompileError: something in the artifact is not understood.
        """
        ...
