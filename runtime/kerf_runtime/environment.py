"""Variables that say how any part of the runtime behaves, read in one way.

Something unknown is refused with what to write instead: a switch that is silently off, because it was set to
``true``, misleads whoever looks for a fault with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kerf_runtime.errors import ConfigError

__all__ = ["LOG_LEVEL_VARIABLE", "is_on", "log_level"]

LOG_LEVEL_VARIABLE = "KERF_LOG_LEVEL"

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether the switch ``name`` is on: 1 is on; 0, nothing and unset are off.

    Raises:
        ConfigError: it is something else.
    """
    text = environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ConfigError(
            f"{text!r} is neither on nor off",
            where=name,
            hint="Write 1 for on, 0 for off, or leave it unset",
        )
    return text == "1"


def log_level(environ: Mapping[str, str]) -> str:
    """The log level of an engine process from ``KERF_LOG_LEVEL``, in any case; INFO if it is not set.

    Raises:
        ConfigError: there is no such level.
    """
    text = environ.get(LOG_LEVEL_VARIABLE) or "INFO"
    if text.upper() not in _LOG_LEVELS:
        raise ConfigError(
            f"{text!r} is no log level",
            where=LOG_LEVEL_VARIABLE,
            hint=f"Write one of {', '.join(_LOG_LEVELS)}, or leave it unset",
        )
    return text.upper()
