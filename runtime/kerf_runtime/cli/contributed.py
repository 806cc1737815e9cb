"""Commands of ``kerf`` that other parts bring along.

The runtime imports nothing of the operator, yet people look for ``kerf render`` among the other commands.
So whatever is installed may name commands in the entry-point group ``kerf.commands``, and ``kerf`` loads one
when it is asked for.  A module that is named there imports nothing heavy at its top, as all modules of
commands, because ``kerf --help`` takes the first sentence of each.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import NoReturn

import click

from kerf_runtime.errors import ConfigError

__all__ = ["GROUP", "contributed_command", "contributed_names"]

GROUP = "kerf.commands"

_BROUGHT_BY = {"render": "operator"}
"""Our own: where the part is missing, the command says so instead of being unknown."""


def contributed_names() -> list[str]:
    """Every name that is, or with all parts would be, a command; sorted."""
    return sorted({*_BROUGHT_BY, *entry_points(group=GROUP).names})


def contributed_command(name: str) -> click.Command | None:
    """The command, or one that says what is missing; None if nothing of that name is known."""
    missing = f"no entry point {GROUP} names it"
    for entry in entry_points(group=GROUP, name=name):
        try:
            command = entry.load()
        except (ImportError, AttributeError) as error:
            missing = str(error)
            continue
        if isinstance(command, click.Command):
            return command
        missing = f"{entry.value} is no command"
    return _absent(name, missing) if name in contributed_names() else None


def _absent(name: str, missing: str) -> click.Command:
    part = _BROUGHT_BY.get(name)
    if part is None:
        what = f"the part that brings this command cannot be loaded ({missing})"
        hint = "Install it again, or remove it"
    else:
        what = f"the {part} part of Kerf is not installed here ({missing})"
        hint = (
            f"In a checkout run make setup; elsewhere install the whole distribution kerf-serving, or run "
            f"kerf-{part} {name} in the image of the {part}"
        )

    def refuse() -> NoReturn:
        raise ConfigError(what, where=f"kerf {name}", hint=hint)

    return click.Command(
        name,
        callback=refuse,
        help=f"Not installed here: {what}. {hint}.",
        short_help=f"Not installed here{f': part of the {part}' if part else ''}.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
