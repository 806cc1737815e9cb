"""Errors that cross the border between the engine process and the HTTP process.  No torch."""

from __future__ import annotations

import signal
import traceback

from kerf_runtime import errors
from kerf_runtime.engine.messages import Failed
from kerf_runtime.errors import EngineError, KerfError

__all__ = ["describe_death", "describe_failure", "describe_silence", "error_of"]


def describe_failure(error: Exception) -> Failed:
    """An exception as a message; one that is not ours names the line it came from."""
    if isinstance(error, KerfError):
        return Failed(type(error).__name__, error.what, error.where, error.hint)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    return Failed(
        EngineError.__name__,
        f"unexpected {type(error).__name__}: {error}",
        where,
        "The stack is in the log of the engine process",
    )


def describe_death(exit_code: int | None) -> Failed:
    """The death of the engine process, if it left no message of its own."""
    if exit_code is not None and exit_code < 0:
        how = f"was killed by {signal.Signals(-exit_code).name}"
    else:
        how = f"exited with code {exit_code}"
    killed = exit_code == -signal.SIGKILL
    return Failed(
        EngineError.__name__,
        f"the engine process {how}",
        None,
        "If nobody killed it, it ran out of memory: raise the memory limit or lower "
        "engine.kvCacheMemory"
        if killed
        else "Its last words are in the log",
    )


def describe_silence(seconds: float) -> Failed:
    """A step that does not end: the loop has said nothing for so long that nobody waits any longer."""
    return Failed(
        EngineError.__name__,
        f"the engine has been stuck in one step for {seconds:.0f} seconds",
        None,
        "Its log says what came before; if steps may take as long here, raise KERF_STALL_SECONDS",
    )


def error_of(failed: Failed) -> KerfError:
    """The exception that ``failed`` stands for."""
    kind = getattr(errors, failed.kind, EngineError)
    if not (isinstance(kind, type) and issubclass(kind, KerfError)):
        kind = EngineError
    return kind(failed.what, where=failed.where, hint=failed.hint)
