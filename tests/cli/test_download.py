"""``kerf download``, and the commands that download before they begin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.conftest import Kerf
from tests.models.download.conftest import FILES, REPO, WANTED, contents
from tests.models.download.hub_server import COMMIT, Hub, Repository, running_hub
from tests.patience import PATIENCE, eventually

from kerf_runtime.models.download import Retry

ENGINE_COMMANDS = [["run"], ["serve"], ["compile"], ["bench", "latency"], ["bench", "startup"]]
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with the environment that leads to it; nothing of the real user's is used."""
    with running_hub() as found:
        found.repositories[REPO] = Repository(dict(FILES), lfs=frozenset({WEIGHTS}))
        monkeypatch.setenv("HF_ENDPOINT", found.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "no-login"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "KERF_MODEL_DIR", "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield found


@pytest.fixture
def hub_document(document: Path) -> Path:
    """A document whose model is the hub's."""
    data: dict[str, Any] = yaml.safe_load(document.read_text())
    data["spec"]["model"]["source"] = {"huggingFace": {"repo": REPO}}
    document.write_text(yaml.safe_dump(data))
    return document


def test_a_model_is_downloaded_into_the_users_cache_folder(
    kerf: Kerf, hub_document: Path, tmp_path: Path
) -> None:
    done = kerf("download", "-f", hub_document)
    assert done.code == 0
    path, _, rest = done.out.strip().partition(": ")
    assert Path(path).is_relative_to(tmp_path / "cache" / "kerf" / "models")
    assert contents(Path(path)) == {name: FILES[name] for name in WANTED}
    assert rest == f"2.9 MiB of hub {REPO}@main, 2.9 MiB downloaded now"
    assert kerf("download", "-f", hub_document).out.endswith("0 B downloaded now\n")


def test_where_a_redirect_leads_is_not_logged_because_it_may_be_signed(
    kerf: Kerf, hub_document: Path, hub: Hub
) -> None:
    done = kerf("--debug", "download", "-f", hub_document)
    assert len(hub.kept) == 1
    assert hub.storage not in done.out + done.err


def test_every_line_of_json_output_is_an_object_and_the_last_one_is_the_result(
    kerf: Kerf, hub_document: Path, tmp_path: Path
) -> None:
    done = kerf("download", "-f", hub_document, "--model-dir", tmp_path / "there", "--json")
    events = [json.loads(line) for line in done.out.splitlines()]
    assert [event["event"] for event in events if event["event"] != "progress"] == [
        "phase",
        "phase_done",
        "done",
    ]
    assert (events[0]["phase"], events[0]["detail"]) == ("download", f"hub {REPO}@main")
    result = events[-1]
    assert Path(result["path"]).is_relative_to(tmp_path / "there")
    assert result["revision"] == COMMIT
    assert result["receivedBytes"] == result["sizeBytes"] > 0
    assert result["warning"] is None


def test_the_folder_of_all_models_is_a_variable_too(
    kerf: Kerf, hub_document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERF_MODEL_DIR", str(tmp_path / "models"))
    assert kerf("download", "-f", hub_document).out.startswith(str(tmp_path / "models"))


def test_a_refusal_is_in_the_result_file_with_its_reason(
    kerf: Kerf, hub_document: Path, hub: Hub, tmp_path: Path
) -> None:
    hub.repositories.clear()
    file = tmp_path / "result.json"
    done = kerf("download", "-f", hub_document, "--result-file", file, "--json")
    assert done.code == 3
    error = json.loads(file.read_text())["error"]
    assert (error["reason"], error["exitCode"]) == ("Source", 3)
    assert error["message"].startswith(f"hub {REPO}@main: 401: there is no repository")
    assert done.json["error"] == error


def test_a_network_that_fails_has_an_exit_code_of_its_own(
    kerf: Kerf, hub_document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retry, "delay", lambda *_: 0.0)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = kerf("download", "-f", hub_document)
    assert done.code == 8
    assert "127.0.0.1:9 refuses the connection (tried 6 times)" in done.err


def test_a_volume_is_not_downloaded(kerf: Kerf, document: Path) -> None:
    done = kerf("download", "-f", document)
    assert done.code == 2
    assert "the document names a volume" in done.err


def test_an_earlier_download_is_used_with_a_warning_when_nobody_may_be_asked(
    kerf: Kerf, hub_document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kerf("download", "-f", hub_document)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = kerf("download", "-f", hub_document)
    assert done.code == 0
    assert "was not asked (HF_HUB_OFFLINE is set); using what was downloaded before" in done.err


@pytest.mark.parametrize("command", ENGINE_COMMANDS, ids=" ".join)
def test_commands_without_a_path_download_the_model_of_the_document(
    kerf: Kerf, hub_document: Path, hub: Hub, command: list[str]
) -> None:
    hub.repositories[REPO].files["config.json"] = b'{"architectures": ["FalconForCausalLM"]}'
    done = kerf(*command, "-f", hub_document)
    assert done.code == 3
    assert "FalconForCausalLM is not supported" in done.err
    assert sorted(hub.downloads()) == sorted(WANTED)


@pytest.mark.parametrize("command", [["validate"], ["run"]], ids=" ".join)
def test_a_path_that_is_given_wins_over_the_source(
    kerf: Kerf, hub_document: Path, hub: Hub, command: list[str], tmp_path: Path
) -> None:
    kerf(*command, "-f", hub_document, "--model-path", tmp_path / "nowhere")
    assert hub.requests == []


def start(document: Path, folder: Path) -> subprocess.Popen[str]:
    arguments = ["download", "-f", str(document), "--model-dir", str(folder), "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "kerf_runtime.cli", *arguments], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)]
)
def test_a_download_that_is_killed_is_invisible_and_the_next_one_goes_on(
    kerf: Kerf, hub_document: Path, hub: Hub, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    folder = tmp_path / "models"
    hub.faults.break_after, hub.faults.stalls = 2_000_000, 1
    process = start(hub_document, folder)
    try:
        eventually(
            lambda: (
                process.poll() is not None
                or sum(part.stat().st_size for part in folder.rglob(f"{WEIGHTS}.part")) >= 1_900_000
            )
        )
        assert process.poll() is None
        os.kill(process.pid, number)
        hub.faults.go_on.set()
        assert process.wait(PATIENCE) == code
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert not [path for path in folder.glob("*/*") if not path.name.startswith(".")]
    done = kerf("download", "-f", hub_document, "--model-dir", folder, "--json")
    assert done.code == 0
    assert done.json["receivedBytes"] < len(FILES[WEIGHTS]) / 2
    assert contents(Path(done.json["path"]))[WEIGHTS] == FILES[WEIGHTS]
