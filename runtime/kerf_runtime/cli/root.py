"""The group of all commands.

Each is imported when it is asked for; those of other parts are found by their entry points
(``contributed.py``).  What errors look like is decided in ``kerf_runtime.command_line``.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from kerf_runtime import __version__
from kerf_runtime.command_line import invoke
from kerf_runtime.environment import LOG_LEVEL_VARIABLE

__all__ = ["cli", "main", "run"]

_COMMANDS = {
    "run": "kerf_runtime.cli.serve:run",
    "serve": "kerf_runtime.cli.serve:serve",
    "compile": "kerf_runtime.cli.compile:compile_command",
    "download": "kerf_runtime.cli.model:download_command",
    "validate": "kerf_runtime.cli.validate:validate",
    "plan": "kerf_runtime.cli.plan:plan",
    "bench": "kerf_runtime.cli.bench:bench",
    "cache": "kerf_runtime.cli.cache:cache",
    "completion": "kerf_runtime.cli.completion:completion",
}


class _LazyGroup(click.Group):
    """Imports the module of a command when it is asked for, and looks for other parts only when it must."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from kerf_runtime.cli.contributed import contributed_names

        return [*_COMMANDS, *(name for name in contributed_names() if name not in _COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = _COMMANDS.get(cmd_name)
        if target is None:
            from kerf_runtime.cli.contributed import contributed_command

            return contributed_command(cmd_name)
        module, _, name = target.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kerf", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks and debug logs.")
def cli(debug: bool) -> None:
    """Compile a model once, capture its graphs, serve it.

    \b
    kerf run -f examples/smollm2.yaml --model-path MODEL.gguf

    Exit codes and shell completion: docs/cli.md.
    """
    if debug:
        os.environ[LOG_LEVEL_VARIABLE] = "DEBUG"  # for the engine process
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    for noisy in ("httpx", "httpcore", "asyncio", "filelock", "urllib3", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return invoke(cli, arguments, program="kerf", debug_option="--debug")


def main() -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run())
