"""How a command line ends that has no debug option, and one that has (more of it: tests/cli/test_root.py)."""

from __future__ import annotations

import json

import click
import pytest

from kerf_runtime.command_line import EXIT_INTERRUPTED, invoke
from kerf_runtime.errors import KerfError, ModelError


def ending_in(error: BaseException | None) -> click.Command:
    def end() -> None:
        if error is not None:
            raise error

    ignore = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command("end", callback=end, context_settings=ignore)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ModelError("it broke"), ModelError.exit_code),
        (KeyboardInterrupt(), EXIT_INTERRUPTED),
        (click.Abort(), EXIT_INTERRUPTED),
        (click.UsageError("wrong"), 2),
        (BrokenPipeError(), 1),
    ],
)
def test_the_exit_code_says_how_it_ended(error: BaseException | None, code: int) -> None:
    assert invoke(ending_in(error), [], program="p") == code


def test_without_a_debug_option_a_bug_ends_in_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        invoke(ending_in(ZeroDivisionError()), [], program="p")


def test_with_one_it_is_a_line_that_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    bug = ending_in(ZeroDivisionError("oh"))
    assert invoke(bug, ["--json"], program="p", debug_option="--loud") == KerfError.exit_code
    printed = capsys.readouterr()
    assert "p --loud ... shows where" in printed.err
    assert json.loads(printed.out)["error"]["reason"] == "Unexpected"
    with pytest.raises(ZeroDivisionError):
        invoke(bug, ["--loud"], program="p", debug_option="--loud")


def test_an_error_of_ours_shows_its_traceback_only_where_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    invoke(ending_in(ModelError("it broke")), [], program="p")
    assert capsys.readouterr().err == "Error: it broke\n"
    invoke(ending_in(ModelError("it broke")), ["--loud"], program="p", debug_option="--loud")
    assert "Traceback" in capsys.readouterr().err
