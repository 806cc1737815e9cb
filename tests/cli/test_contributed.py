"""Commands of other parts: `kerf render` of the operator, and what is said where a part is missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from kerf_operator.__main__ import cli as operator_cli
from kerf_runtime.cli import contributed
from kerf_runtime.cli.contributed import GROUP, contributed_command, contributed_names

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2.yaml"


@pytest.fixture
def installed(monkeypatch):
    """``installed(greet="module:name")``: nothing else brings commands."""

    def use(**targets):
        found = EntryPoints(EntryPoint(name, value, GROUP) for name, value in targets.items())
        monkeypatch.setattr(contributed, "entry_points", lambda **which: found.select(**which))

    return use


def test_what_is_installed_is_what_pyproject_declares():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    assert found == declared[GROUP], "the installation is older than pyproject.toml: make setup"


@pytest.mark.parametrize("options", [[], ["--json"], ["-n", "team", "--runtime-image", "i:1"]])
def test_kerf_and_kerf_operator_render_the_same(kerf, options):
    ours = kerf("render", "-f", EXAMPLE, *options)
    theirs = CliRunner().invoke(operator_cli, ["render", "-f", str(EXAMPLE), *options])
    assert (ours.code, ours.out) == (0, theirs.stdout)


def test_with_json_the_objects_are_one_list(kerf):
    found = kerf("render", "-f", EXAMPLE, "--json").json
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    assert found["items"] == list(yaml.safe_load_all(kerf("render", "-f", EXAMPLE).out))


def test_errors_of_render_look_like_those_of_every_command(kerf, tmp_path):
    done = kerf("render", "-f", tmp_path / "none.yaml", "--json")
    assert done.code == 2
    assert (
        done.err
        == f"Error: {tmp_path}/none.yaml: cannot read the file: No such file or directory\n"
    )
    assert done.json["error"]["reason"] == "Config"


def test_help_of_render_loads_no_more_than_its_options():
    code = (
        "import sys\n"
        "from kerf_runtime.cli import run\n"
        "assert run(['--help']) == 0 and run(['render', '--help']) == 0\n"
        "loaded = {name for name in sys.modules if name.startswith('kerf_operator')}\n"
        "assert loaded == {'kerf_operator', 'kerf_operator.render_command'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_the_operator_render_says_what_is_missing_and_where_it_is(kerf, installed):
    installed()
    done = kerf("render", "-f", EXAMPLE, "--json")
    assert done.code == 2
    assert "kerf render: the operator part of Kerf is not installed here" in done.err
    assert "make setup" in done.err
    assert "kerf-operator render in the image of the operator" in done.err
    assert done.json["error"]["reason"] == "Config"
    assert "render      Not installed here: part of the operator." in kerf("--help").out
    assert "make setup" in kerf("render", "--help").out


def test_a_command_whose_module_is_missing_names_the_module(kerf, installed):
    installed(render="kerf_no_operator.render_command:render")
    done = kerf("render", "-f", EXAMPLE)
    assert done.code == 2
    assert "not installed here (No module named 'kerf_no_operator')" in done.err


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:greet", "No module named 'no_such_module'"),
        ("kerf_runtime:greet", "has no attribute 'greet'"),
        ("kerf_runtime:__version__", "kerf_runtime:__version__ is no command"),
    ],
)
def test_a_command_that_cannot_be_loaded_says_why_and_spoils_no_other(
    kerf, installed, target, words
):
    installed(greet=target)
    done = kerf("greet")
    assert done.code == 2
    assert words in done.err
    assert "Install it again, or remove it" in done.err
    assert kerf("--help").code == 0
    assert kerf("validate", "-f", EXAMPLE).code == 0


def test_any_distribution_may_bring_a_command_but_replaces_none_of_ours(kerf, installed):
    installed(greet="kerf_runtime.cli.completion:completion", validate="kerf_runtime:__version__")
    assert "_KERF_COMPLETE=bash" in kerf("greet", "bash").out
    assert kerf("validate", "-f", EXAMPLE).out.startswith("smollm2: valid")
    assert kerf("--help").out.count("validate ") == 1


def test_a_name_that_nobody_brings_is_unknown(installed):
    installed(greet="kerf_runtime.cli.completion:completion")
    assert contributed_names() == ["greet", "render"]
    assert isinstance(contributed_command("greet"), click.Command)
    assert contributed_command("frobnicate") is None
