"""Errors, exit codes, help and completion of the command line."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kerf_runtime import __version__, errors
from kerf_runtime.cli import root
from kerf_runtime.cli.root import cli, run
from kerf_runtime.errors import KerfError

ROOT = Path(__file__).parents[2]
ERRORS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, KerfError)
]


@pytest.fixture
def raising(monkeypatch):
    """Make ``kerf validate`` raise."""

    def use(error):
        @click.command()
        @click.option("--json", "as_json", is_flag=True)
        def command(as_json):
            raise error

        monkeypatch.setattr(root, "_COMMANDS", {"validate": "tests.cli.test_root:command"})
        monkeypatch.setattr(sys.modules[__name__], "command", command, raising=False)
        monkeypatch.setitem(sys.modules, "tests.cli.test_root", sys.modules[__name__])

    return use


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_one_message_without_a_traceback_and_its_own_exit_code(kerf, raising, kind):
    raising(kind("it broke", where="here", hint="Mend it"))
    done = kerf("validate")
    assert (done.code, done.out) == (kind.exit_code, "")
    assert done.err == "Error: here: it broke. Mend it\n"


def test_with_json_the_error_is_also_on_standard_output(kerf, raising):
    raising(errors.ModelError("it broke", where="here"))
    done = kerf("validate", "--json")
    assert done.json == {"error": {"reason": "Model", "message": "here: it broke", "exitCode": 3}}
    assert "it broke" in done.err


def test_debug_adds_the_traceback(kerf, raising):
    raising(errors.ModelError("it broke"))
    done = kerf("--debug", "validate")
    assert done.code == 3
    assert "Traceback" in done.err


def test_a_bug_is_one_line_too_and_says_how_to_see_more(kerf, raising):
    raising(ZeroDivisionError("oh"))
    done = kerf("validate")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "ZeroDivisionError: oh" in done.err
    assert "--debug" in done.err


def test_an_interrupt_is_130(kerf, raising):
    raising(KeyboardInterrupt())
    assert kerf("validate").code == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--no-such-option"], "--no-such-option"),
        (["validate", "--model-pth", "x"], "--model-path"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["serve", "--port", "99999"], "99999 is not in the range"),
        (["bench", "latency", "--repeats", "0"], "0 is not in the range"),
    ],
)
def test_wrong_usage_is_2_and_names_the_option(kerf, arguments, message):
    done = kerf(*arguments)
    assert done.code == 2
    assert message in done.err


def test_version_and_help(kerf):
    assert kerf("--version").out == f"kerf {__version__}\n"
    done = kerf("--help")
    assert done.code == 0
    for name in ("run", "serve", "compile", "validate", "bench", "cache", "render"):
        assert name in done.out


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from kerf_runtime.cli import run\n"
        "assert run(['--help']) == 0 and run(['serve', '--help']) == 0\n"
        "heavy = {'torch', 'fastapi', 'pydantic', 'numpy', 'tokenizers', 'rich', 'yaml', 'zmq'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def commands(group=cli, prefix=()):
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield (*prefix, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*prefix, name))


def test_every_command_and_option_has_help():
    for path, command in commands():
        assert command.help, path
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, (path, option.name)


def test_the_document_lists_every_command_option_and_exit_code():
    text = (ROOT / "docs" / "cli.md").read_text()
    for path, command in commands():
        assert f"kerf {' '.join(path)}" in text, path
        for option in command.params:
            if isinstance(option, click.Option):
                assert f"`{max(option.opts, key=len)}" in text, (path, option.name)
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)}
    assert documented == {0, 130, 143} | {kind.exit_code for kind in ERRORS}


def test_completion_knows_commands_and_fields():
    def complete(words, last):
        environment = {
            **os.environ,
            "_KERF_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(last),
        }
        code = "from kerf_runtime.cli import main; main()"
        # click finds the variable by the name of the program
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv[0] = 'kerf'; {code}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout

    assert "plain,serve" in complete("kerf se", 1)
    assert "plain,render" in complete("kerf ren", 1)
    assert "plain,--runtime-image" in complete("kerf render --run", 2)
    assert "plain,compilation.level=" in complete("kerf validate --set compilation.l", 3)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_that_calls_us_back(kerf, shell):
    done = kerf("completion", shell)
    assert done.code == 0, done.err
    assert f"_KERF_COMPLETE={shell}_complete" in done.out
    assert "kerf" in done.out


def test_bash_completes_what_the_script_says(tmp_path):
    program = tmp_path / "kerf"
    program.write_text(f"#!{sys.executable}\nfrom kerf_runtime.cli import main\nmain()\n")
    program.chmod(0o755)
    script = (
        'eval "$(kerf completion bash)"\n'
        "COMP_WORDS=(kerf bench th) COMP_CWORD=2\n"
        '_kerf_completion kerf\necho "${COMPREPLY[@]}"\n'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "throughput", done.stderr


def test_an_unknown_shell_is_2(kerf):
    done = kerf("completion", "tcsh")
    assert done.code == 2
    assert "'bash', 'zsh', 'fish'" in done.err


def test_run_returns_the_exit_code_of_a_command():
    assert run(["--version"]) == 0
