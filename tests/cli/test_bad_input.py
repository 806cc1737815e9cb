"""What is wrong with the input is said at once: what, where, what to do, and with which exit code."""

from __future__ import annotations

import json
import socket

import pytest
from tests.cli.conftest import DOCUMENT
from tests.server.tiny import write_tiny_checkpoint

ENGINE_COMMANDS = [["run"], ["serve"], ["compile"], ["bench", "latency"], ["bench", "startup"]]


@pytest.fixture
def model(tmp_path):
    return write_tiny_checkpoint(tmp_path / "model")


@pytest.fixture(autouse=True)
def _no_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home-cache"))


@pytest.mark.parametrize("command", ENGINE_COMMANDS, ids=" ".join)
def test_a_missing_model_folder(kerf, command, document, tmp_path):
    done = kerf(*command, "-f", document, "--model-path", tmp_path / "nowhere")
    assert done.code == 3
    assert str(tmp_path / "nowhere") in done.err
    assert "does not exist" in done.err


@pytest.mark.parametrize("command", [*ENGINE_COMMANDS, ["validate"]], ids=" ".join)
def test_a_truncated_gguf_file(kerf, command, document, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0\x10\0\0\0")
    done = kerf(*command, "-f", document, "--model-path", path)
    assert done.code == 3
    assert str(path) in done.err
    assert "truncated" in done.err


@pytest.mark.parametrize("command", [*ENGINE_COMMANDS, ["validate"]], ids=" ".join)
def test_an_unsupported_architecture_lists_the_supported_ones(kerf, command, document, model):
    config = model / "config.json"
    data = json.loads(config.read_text()) | {"architectures": ["FalconForCausalLM"]}
    config.write_text(json.dumps(data))
    done = kerf(*command, "-f", document, "--model-path", model)
    assert done.code == 3
    assert "FalconForCausalLM is not supported" in done.err
    assert "LlamaForCausalLM" in done.err


@pytest.mark.parametrize("command", ENGINE_COMMANDS, ids=" ".join)
def test_no_model_path(kerf, command, document):
    done = kerf(*command, "-f", document)
    assert done.code == 2
    assert "--model-path" in done.err


@pytest.mark.parametrize("command", [*ENGINE_COMMANDS, ["validate"]], ids=" ".join)
def test_no_document(kerf, command):
    done = kerf(*command)
    assert done.code == 2
    assert "no ModelDeployment was given" in done.err


@pytest.mark.parametrize("command", [*ENGINE_COMMANDS, ["validate"]], ids=" ".join)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "", "expected exactly one ModelDeployment, found 0"),
        (lambda text: text + "\n---" + text, "expected exactly one ModelDeployment, found 2"),
        (lambda text: text + "  nonsense: 1\n", "nonsense: unknown field"),
        (lambda text: text + "  compilation: {captureSizes: [0]}\n", "captureSizes.0"),
        (lambda text: text + "  : {", "not valid YAML"),
        (lambda text: text.replace("v1alpha1", "v9"), "expected apiVersion"),
    ],
    ids=["empty", "two", "unknown-field", "size-0", "yaml", "version"],
)
def test_a_wrong_document_is_named_with_its_field(kerf, command, document, change, words):
    document.write_text(change(DOCUMENT))
    done = kerf(*command, "-f", document)
    assert done.code == 2
    assert str(document) in done.err
    assert words in done.err


def test_a_document_that_is_not_there(kerf, tmp_path):
    done = kerf("validate", "-f", tmp_path / "no.yaml")
    assert done.code == 2
    assert "no.yaml: cannot read the file: No such file" in done.err


def test_a_port_in_use(kerf, document, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = kerf("serve", "-f", document, "--model-path", model, "--port", port)
    assert done.code == 2
    assert f"127.0.0.1:{port}: cannot listen" in done.err


def test_nothing_to_compile(kerf, document, model):
    arguments = ("--set", "compilation.level=0", "--cache-dir", "unused")
    done = kerf("compile", "-f", document, "--model-path", model, *arguments)
    assert done.code == 2
    assert "nothing to compile" in done.err


def test_the_job_finds_the_error_in_its_result_file(kerf, document, tmp_path):
    result = tmp_path / "termination-log"
    path = tmp_path / "nowhere"
    done = kerf("compile", "-f", document, "--model-path", path, "--result-file", result)
    assert done.code == 3
    error = json.loads(result.read_text())["error"]
    assert (error["reason"], error["exitCode"]) == ("Model", 3)
    assert "does not exist" in error["message"]


def test_a_long_error_still_fits_a_termination_message(kerf, document, tmp_path):
    result = tmp_path / "termination-log"
    done = kerf("compile", "-f", document, "--set", "x" * 6000, "--result-file", result)
    assert done.code == 2
    text = result.read_text()
    assert len(text.encode()) <= 4096
    assert json.loads(text)["error"]["message"].endswith("...")


def test_a_result_file_that_cannot_be_written_is_refused_before_anything_else(kerf, tmp_path):
    done = kerf(
        *("compile", "-f", tmp_path / "no", "--model-path", tmp_path / "no"),
        *("--result-file", tmp_path / "no" / "such" / "folder"),
    )
    assert done.code == 2
    assert f"--result-file {tmp_path}/no/such/folder" in done.err
    assert f"there is no folder {tmp_path}/no/such" in done.err


def test_compiling_without_a_cache_is_refused_at_once(kerf, document, tmp_path, monkeypatch):
    monkeypatch.setenv("KERF_DISABLE_COMPILE_CACHE", "1")
    done = kerf("compile", "-f", document, "--model-path", tmp_path / "no")
    assert done.code == 2
    assert "KERF_DISABLE_COMPILE_CACHE=1: there is no cache to compile into. Unset it" in done.err


@pytest.mark.parametrize("command", ENGINE_COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("KERF_LOG_LEVEL", "bogus", "Write one of DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        ("KERF_DISABLE_COMPILE_CACHE", "true", "Write 1 for on, 0 for off"),
    ],
)
def test_a_wrong_variable_of_an_engine_is_refused_before_one_starts(
    kerf, document, tmp_path, monkeypatch, command, name, value, words
):
    monkeypatch.setenv(name, value)
    done = kerf(*command, "-f", document, "--model-path", tmp_path / "not looked at")
    assert done.code == 2
    assert f"Error: {name}: {value!r} is" in done.err
    assert words in done.err
    assert "Traceback" not in done.err


def test_what_nobody_expected_is_in_the_result_file_and_the_json(
    kerf, document, tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("kerf_runtime.cli.compile.compile_into_cache", fail)
    result = tmp_path / "termination-log"
    model = write_tiny_checkpoint(tmp_path / "model")
    done = kerf(
        *("compile", "-f", document, "--model-path", model, "--json", "--result-file", result)
    )
    expected = {"reason": "Unexpected", "message": "ZeroDivisionError: by zero", "exitCode": 1}
    assert done.code == 1
    assert json.loads(result.read_text())["error"] == expected
    assert json.loads(done.out.splitlines()[-1])["error"] == expected


def test_wrong_usage_is_in_the_json_too(kerf, document):
    done = kerf("compile", "-f", document, "--json", "--bogus")
    assert done.code == 2
    assert json.loads(done.out)["error"]["reason"] == "Usage"
    assert "--bogus" in json.loads(done.out)["error"]["message"]
