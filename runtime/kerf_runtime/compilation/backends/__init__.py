"""Compiler back ends: each compiles one piece into files and loads such files in another process.

A back end's module imports its compiler inside the functions that compile, so that a warm start can
load with it and pays for no compiler.
"""

from kerf_runtime.compilation.backends.eager import EagerBackend
from kerf_runtime.compilation.backends.inductor import InductorBackend
from kerf_runtime.compilation.backends.interface import (
    CompiledArtifact,
    CompilerBackend,
    CompileRequest,
    PieceCall,
)

__all__ = [
    "CompileRequest",
    "CompiledArtifact",
    "CompilerBackend",
    "EagerBackend",
    "InductorBackend",
    "PieceCall",
    "backend_named",
]

_BACKENDS: dict[str, CompilerBackend] = {
    backend.name: backend for backend in (EagerBackend(), InductorBackend())
}


def backend_named(name: str) -> CompilerBackend:
    """The back end called ``name``.

    Raises:
        KeyError: there is none; configuration and artifacts are checked before they get here.
    """
    return _BACKENDS[name]
