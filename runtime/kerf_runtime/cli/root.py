"""The group of all commands, and what their errors look like.

Every error a user can cause is a ``KerfError``: one message on standard error, the exit code of its
class, no traceback unless ``--debug``.  With a command's ``--json`` the error is also a JSON object on
standard output.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from kerf_runtime import __version__
from kerf_runtime.errors import KerfError
from kerf_runtime.termination import EXIT_TERMINATED, Terminated

__all__ = ["EXIT_INTERRUPTED", "cli", "main", "run"]

EXIT_INTERRUPTED = 130

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
    """Imports the module of a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = _COMMANDS.get(cmd_name)
        if target is None:
            return None
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
        os.environ["KERF_LOG_LEVEL"] = "DEBUG"  # for the engine process
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
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        result = cli.main(arguments, prog_name="kerf", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except Terminated as end:
        click.echo("terminated", err=True)
        if "--json" in arguments:
            _echo_error(describe_error(end))
        return EXIT_TERMINATED
    except click.ClickException as error:
        error.show()
        if "--json" in arguments:
            _echo_error(
                {
                    "reason": "Usage",
                    "message": error.format_message(),
                    "exitCode": error.exit_code,
                }
            )
        return error.exit_code
    except KerfError as error:
        if debug:
            traceback.print_exc()
        _report(error, as_json="--json" in arguments)
        return error.exit_code
    except BrokenPipeError:
        return 1  # the reader of our output went away, as `kerf ... | head` does
    except Exception as error:  # the last resort: a bug of ours still gets one clear line
        if debug:
            raise
        logging.getLogger(__name__).debug("unexpected error", exc_info=True)
        click.echo(
            f"Error: unexpected {type(error).__name__}: {error}. This is a bug in Kerf; "
            "kerf --debug ... shows where",
            err=True,
        )
        if "--json" in arguments:
            _echo_error(describe_error(error))
        return KerfError.exit_code
    return result if isinstance(result, int) else 0


def main() -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run())


def _report(error: KerfError, *, as_json: bool) -> None:
    click.echo(f"Error: {error}", err=True)
    if as_json:
        _echo_error(describe_error(error))


def _echo_error(description: dict[str, object]) -> None:
    from kerf_runtime.cli.output import echo_json

    echo_json({"error": description})


def describe_error(error: Exception | Terminated) -> dict[str, object]:
    """An error as JSON: its class without ``Error`` is the reason; ``Unexpected`` if it is none of ours."""
    if isinstance(error, Terminated):
        return {"reason": "Terminated", "message": str(error), "exitCode": EXIT_TERMINATED}
    if not isinstance(error, KerfError):
        message = f"{type(error).__name__}: {error}"
        return {"reason": "Unexpected", "message": message, "exitCode": KerfError.exit_code}
    return {
        "reason": type(error).__name__.removesuffix("Error"),
        "message": str(error),
        "exitCode": error.exit_code,
    }
