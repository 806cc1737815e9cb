"""What a server takes from its environment rather than from the document: its key and its patience.

A key in a file is how Kubernetes mounts secrets: it is in no process listing and in no crash report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from kerf_runtime.engine.silence import STALL_SECONDS
from kerf_runtime.errors import ConfigError

__all__ = ["api_key", "request_seconds", "stall_seconds"]


def api_key(environ: Mapping[str, str]) -> str | None:
    """The key from ``KERF_API_KEY_FILE`` or ``KERF_API_KEY``; None if neither is set.

    Raises:
        ConfigError: both are set, the file cannot be read, or no client could send the key.
    """
    key, path = environ.get("KERF_API_KEY") or None, environ.get("KERF_API_KEY_FILE") or None
    where = "KERF_API_KEY"
    if path is not None:
        if key is not None:
            raise ConfigError(
                "both KERF_API_KEY and KERF_API_KEY_FILE are set", hint="Set one of them"
            )
        where = f"KERF_API_KEY_FILE={path}"
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"the API key cannot be read: {reason}", where=where) from None
        if not key:
            # Serving without a key because a secret is empty would open what was meant to be shut.
            raise ConfigError("the file is empty", where=where, hint="Put the key in it")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "the API key has characters that an HTTP header cannot carry",
            where=where,
            hint="Use printable ASCII characters",
        )
    return key


def request_seconds(environ: Mapping[str, str]) -> float | None:
    """Seconds that a request may take, from ``KERF_REQUEST_SECONDS``; None if it is not set.

    Raises:
        ConfigError: it is no positive number.
    """
    return _seconds(environ, "KERF_REQUEST_SECONDS")


def stall_seconds(environ: Mapping[str, str]) -> float:
    """Seconds that one step may take before the engine has failed, from ``KERF_STALL_SECONDS``.

    Raises:
        ConfigError: it is no positive number.
    """
    return _seconds(environ, "KERF_STALL_SECONDS") or STALL_SECONDS


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name) or None
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{text!r} is no positive number of seconds", where=name)
    return seconds
