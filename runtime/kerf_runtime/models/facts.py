"""Typed access to the facts of a checkpoint, with errors that name the key.  Pure, no torch."""

from __future__ import annotations

from typing import Any

from kerf_runtime.config.engine import DType
from kerf_runtime.errors import ModelError

__all__ = ["Facts"]

_DTYPES = {dtype.value: dtype for dtype in DType if dtype is not DType.AUTO}


class Facts:
    """A mapping and where it was read.

    Every reader takes null for a value that is missing, and raises ``ModelError`` for one that is missing
    without a default or of the wrong kind.
    """

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def error(self, key: str, what: str, hint: str | None = None) -> ModelError:
        """About the value of ``key``."""
        return ModelError(what, where=f"{self.where}: {key}", hint=hint)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "the value is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"expected an integer of at least {least}, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "the value is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(key, f"expected a number above 0, found {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}")
        return value

    def require(self, key: str, expected: bool, why: str) -> None:
        """Refuse a checkpoint whose flag ``key`` is given and not ``expected``."""
        if self.flag(key, default=expected) is not expected:
            raise self.error(key, why)

    def dtype(self) -> DType:
        """The data type of the stored weights, from ``dtype`` or its older name."""
        name = self.data.get("dtype") or self.data.get("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in _DTYPES:
            raise self.error(
                "dtype", f"data type {name!r} is not supported", f"Supported: {', '.join(_DTYPES)}"
            )
        return _DTYPES[name]

    def tokens(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none."""
        value = self.data.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.error(key, f"expected a token id or a list of them, found {value!r}")
        return tuple(values)
