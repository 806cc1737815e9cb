"""The exception hierarchy of the operator.

KerfError (kerf_runtime.errors)
└── OperatorError                exit 1    something of ours or of the cluster's went wrong
    ├── SettingsError            exit 2    an option or environment variable
    ├── ClusterError             exit 8    the API server cannot be reached or lacks our CRDs
    └── ApiError                           one request that the API server answered with an error
"""

from __future__ import annotations

from typing import ClassVar

from kerf_runtime.errors import KerfError

__all__ = ["ApiError", "ClusterError", "OperatorError", "SettingsError"]


class OperatorError(KerfError):
    """Base of the operator's errors."""


class SettingsError(OperatorError):
    """A flag or environment variable of the operator is wrong."""

    exit_code: ClassVar[int] = 2


class ClusterError(OperatorError):
    """The cluster cannot be used: unreachable, not authenticated, or our CRDs are missing."""

    exit_code: ClassVar[int] = 8


class ApiError(OperatorError):
    """One request that the API server refused.

    Attributes:
        code: HTTP status; 0 when no answer came.
        reason: the API server's reason, for example ``NotFound``, ``AlreadyExists``, ``Forbidden``.
        message: the API server's own sentence.
    """

    def __init__(self, *, verb: str, target: str, code: int, reason: str, message: str) -> None:
        self.verb = verb
        self.code = code
        self.reason = reason
        self.message = message
        super().__init__(f"{verb} failed with {code} {reason}: {message}", where=target)

    def __reduce__(self) -> tuple[object, ...]:
        values = (self.verb, self.where or "", self.code, self.reason, self.message)
        return (_rebuild, values)

    @property
    def not_found(self) -> bool:
        """The object does not exist."""
        return self.code == 404

    @property
    def already_exists(self) -> bool:
        """An object of that name exists already."""
        return self.code == 409 and self.reason == "AlreadyExists"

    @property
    def conflict(self) -> bool:
        """The object changed meanwhile, or a precondition did not hold."""
        return self.code == 409 and self.reason != "AlreadyExists"

    @property
    def transient(self) -> bool:
        """Waiting may help: no answer, too many requests, or the server's own trouble."""
        return self.code == 0 or self.code == 429 or self.code >= 500


def _rebuild(verb: str, target: str, code: int, reason: str, message: str) -> ApiError:
    return ApiError(verb=verb, target=target, code=code, reason=reason, message=message)
