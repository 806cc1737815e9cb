"""How a command line of ours ends: ``kerf`` and ``kerf-operator`` say what went wrong in the same way.

Every error a user can cause is a ``KerfError``: one message on standard error, the exit code of its
class, no traceback unless a debug option asks for one.  With a command's ``--json`` the error is also a JSON
object on standard output.  Imports nothing heavy, and nothing of ``kerf_runtime.cli``: the operator must not.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Sequence

import click

from kerf_runtime.errors import KerfError
from kerf_runtime.termination import EXIT_TERMINATED, Terminated

__all__ = ["EXIT_INTERRUPTED", "describe_error", "invoke"]

EXIT_INTERRUPTED = 130


def invoke(
    command: click.Command,
    arguments: Sequence[str],
    *,
    program: str,
    debug_option: str | None = None,
) -> int:
    """Run a command and return its exit code.

    Args:
        command: the group of all commands.
        arguments: without the program.
        program: the name that usage lines and completion go by.
        debug_option: the option that shows tracebacks.  Without one a bug always ends in its traceback.
    """
    arguments = list(arguments)
    debug = debug_option in arguments
    as_json = "--json" in arguments
    try:
        result = command.main(arguments, prog_name=program, standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except Terminated as end:
        click.echo("terminated", err=True)
        if as_json:
            _echo_error(describe_error(end))
        return EXIT_TERMINATED
    except click.ClickException as error:
        error.show()
        if as_json:
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
        click.echo(f"Error: {error}", err=True)
        if as_json:
            _echo_error(describe_error(error))
        return error.exit_code
    except BrokenPipeError:
        return 1  # the reader of our output went away, as `kerf ... | head` does
    except Exception as error:  # the last resort: a bug of ours still gets one clear line
        if debug or debug_option is None:
            raise
        logging.getLogger(__name__).debug("unexpected error", exc_info=True)
        click.echo(
            f"Error: unexpected {type(error).__name__}: {error}. This is a bug in Kerf; "
            f"{program} {debug_option} ... shows where",
            err=True,
        )
        if as_json:
            _echo_error(describe_error(error))
        return KerfError.exit_code
    return result if isinstance(result, int) else 0


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


def _echo_error(description: dict[str, object]) -> None:
    click.echo(json.dumps({"error": description}))
