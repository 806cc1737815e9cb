"""Which layers run as Kerf's custom operators and which as plain ATen.  Pure.

A custom operator is one kernel that Inductor cannot look into; the plain form is several ATen operators
that Inductor fuses with their neighbours.  So the default is none when Inductor compiles and all
otherwise.  ``kerf_runtime.layers`` asks this policy once, when a model is built; the cache key holds the
result.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from kerf_runtime.errors import ConfigError

__all__ = ["CUSTOM_OP_NAMES", "CustomOpChoice", "canonical_choices", "resolve_custom_ops"]

CUSTOM_OP_NAMES: tuple[str, ...] = (
    "fused_add_rms_norm",
    "quant_fp8",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
)
"""Every layer that has a custom operator, sorted."""

_ALL, _NONE = "all", "none"
_WHERE = "compilation.customOps"
_CHOICES = (_ALL, _NONE, *(sign + name for name in CUSTOM_OP_NAMES for sign in "+-"))


def resolve_custom_ops(requested: Sequence[str] | None, *, inductor: bool) -> frozenset[str]:
    """The names of the layers that run as custom operators.

    Args:
        requested: ``all`` or ``none`` as the base, ``+name`` and ``-name`` on top, in any order; None and
            an empty list leave the default.
        inductor: whether Inductor compiles the model, which decides the base if none is given.

    Raises:
        ConfigError: an unknown name (with the nearest known one), or two entries that contradict each
            other (both are named).
    """
    entries = tuple(requested or ())
    for entry in entries:
        _check_known(entry)
    if _ALL in entries and _NONE in entries:
        raise _contradiction(_ALL, _NONE)
    for name in CUSTOM_OP_NAMES:
        if f"+{name}" in entries and f"-{name}" in entries:
            raise _contradiction(f"+{name}", f"-{name}")
    everything = _ALL in entries or (_NONE not in entries and not inductor)
    enabled = set(CUSTOM_OP_NAMES if everything else ())
    enabled |= {entry[1:] for entry in entries if entry.startswith("+")}
    enabled -= {entry[1:] for entry in entries if entry.startswith("-")}
    return frozenset(enabled)


def canonical_choices(enabled: frozenset[str]) -> list[str]:
    """The one way to write ``enabled`` down that does not depend on any default."""
    return [_NONE, *(f"+{name}" for name in sorted(enabled))]


def _check_known(entry: str) -> None:
    if entry in _CHOICES:
        return
    near = difflib.get_close_matches(entry, _CHOICES, n=3, cutoff=0.5)
    if entry in CUSTOM_OP_NAMES:
        near = [f"+{entry}", f"-{entry}"]
    raise ConfigError(
        f"{entry!r} is no choice of custom operators",
        where=_WHERE,
        hint=(f"Did you mean {' or '.join(near)}? " if near else "")
        + f"Write all, none, +name or -name with a name of {', '.join(CUSTOM_OP_NAMES)}",
    )


def _contradiction(first: str, second: str) -> ConfigError:
    return ConfigError(
        f"{first} and {second} contradict each other", where=_WHERE, hint="Keep one of them"
    )


def _known_choice(entry: str) -> str:
    try:
        _check_known(entry)
    except ConfigError as error:
        raise ValueError(f"{error.what}. {error.hint}") from None
    return entry


CustomOpChoice = Annotated[
    str,
    AfterValidator(_known_choice),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": rf"^({_ALL}|{_NONE}|[+-]({'|'.join(CUSTOM_OP_NAMES)}))$",
            "maxLength": 64,
        }
    ),
]
"""One entry of ``customOps``; the schema shows the same rule to the API server."""
