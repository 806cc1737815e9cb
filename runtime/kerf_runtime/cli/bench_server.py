"""A ``kerf serve`` process of a benchmark's own: started, waited for, and interrupted at the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from kerf_runtime.cli.document import raw_document
from kerf_runtime.config import ModelDeploymentDocument
from kerf_runtime.errors import EngineError

__all__ = ["started_server", "wait_ready", "write_document"]

_START_TIMEOUT_SECONDS = 1800.0
_STOP_TIMEOUT_SECONDS = 30.0
_LAST_WORDS = 2000
"""Characters of the log that an error shows: as much as a traceback."""


def write_document(document: ModelDeploymentDocument, folder: Path) -> Path:
    """The document as a file in ``folder``."""
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(raw_document(document)))
    return file


@contextmanager
def started_server(file: Path, model_path: Path, cache: Path) -> Iterator[str]:
    """The address of a server that is ready; its log lies beside ``file``.

    Args:
        file: the document.
        model_path: folder or GGUF file.
        cache: folder of the compile cache.

    Raises:
        EngineError: the server did not become ready; with its last words.
    """
    command = [
        *(sys.executable, "-m", "kerf_runtime.cli", "serve", "-f", str(file)),
        *("--model-path", str(model_path), "--cache-dir", str(cache), "--port", "0", "--json"),
    ]
    log = file.with_suffix(".log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )
    try:
        yield wait_ready(process, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def wait_ready(process: subprocess.Popen[str], log: Path) -> str:
    """Read the server's events until it is ready; its address."""
    assert process.stdout is not None
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    for line in process.stdout:
        event = json.loads(line)
        if event.get("event") == "ready":
            return str(event["url"])
        if "error" in event or time.monotonic() > deadline:
            break
    process.kill()
    raise EngineError(f"the server did not become ready: {log.read_text().strip()[-_LAST_WORDS:]}")
