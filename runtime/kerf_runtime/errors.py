"""The exception hierarchy of the runtime and its command line.

    KerfError                      exit 1, HTTP 500   something of ours went wrong
    ├── ConfigError                exit 2, HTTP 400   a document, option or environment variable
    ├── RequestError               exit 2, HTTP 400   an HTTP request that cannot be served as asked
    ├── ModelError                 exit 3             weights, tokenizer or architecture
    │   └── SourceError                               the place of the weights refuses, or has no such model
    ├── CompileError               exit 4             tracing, splitting or compiling a model
    │   ├── GraphBreakError                           the forward did not trace into one graph
    │   └── NumericalGateError                        compiled output left the tolerance
    ├── CacheError                 exit 5             the compile cache: missing, stale, corrupt, full
    ├── CaptureError               exit 6             recording or replaying a static graph
    │   └── CaptureMemoryError                        the device had no memory for it
    ├── EngineError                exit 7, HTTP 500   the engine process
    ├── OverloadedError            exit 7, HTTP 429   the queue is full
    └── DownloadError              exit 8             network, server or disk: another try may do

Every error says what happened, where, and what to do about it.  The exit codes are documented in
``docs/cli.md`` and tested; 0 is success and 130 is an interrupt.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CacheError",
    "CaptureError",
    "CaptureMemoryError",
    "CompileError",
    "ConfigError",
    "DownloadError",
    "EngineError",
    "GraphBreakError",
    "KerfError",
    "ModelError",
    "NumericalGateError",
    "OverloadedError",
    "RequestError",
    "SourceError",
]


class KerfError(Exception):
    """Base of every error that Kerf raises on purpose.

    Args:
        what: what happened, one sentence without a trailing period.
        where: the file, field, option or object concerned, if one can be named.
        hint: what the reader can do about it.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.hint))


def _rebuild(cls: type[KerfError], what: str, where: str | None, hint: str | None) -> KerfError:
    """Unpickle an error that crossed a process border."""
    return cls(what, where=where, hint=hint)


class ConfigError(KerfError):
    """A document, command-line option or environment variable is wrong."""

    exit_code = 2
    http_status = 400


class RequestError(KerfError):
    """A request that cannot be served as it was asked; ``where`` is the offending parameter."""

    exit_code = 2
    http_status = 400


class ModelError(KerfError):
    """The model folder, its weights, its tokenizer or its architecture cannot be used."""

    exit_code = 3


class SourceError(ModelError):
    """The hub or the bucket does not have the model, or does not let us read it; another try will not do."""


class CompileError(KerfError):
    """A model could not be traced, split or compiled."""

    exit_code = 4


class GraphBreakError(CompileError):
    """The forward did not trace into exactly one graph."""


class NumericalGateError(CompileError):
    """Compiled output differs from eager output by more than the tolerance; nothing is published."""


class CacheError(KerfError):
    """The compile cache cannot be read or written as asked."""

    exit_code = 5


class CaptureError(KerfError):
    """A static graph could not be captured or replayed."""

    exit_code = 6


class CaptureMemoryError(CaptureError):
    """Memory of the device ran out while a static graph was warmed up or captured."""


class EngineError(KerfError):
    """The engine process failed or went away."""

    exit_code = 7


class OverloadedError(EngineError):
    """The waiting queue is full; the client should retry later."""

    http_status = 429


class DownloadError(KerfError):
    """Weights could not be downloaded now: no network, a failing server, a full disk; another try may do."""

    exit_code = 8
