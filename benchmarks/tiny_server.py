"""A server of a small random model on the CPU, in processes of its own, for programs that look for faults."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.server.tiny import write_tiny_checkpoint, write_tiny_document

from kerf_runtime.cli.bench_server import wait_ready

__all__ = ["MODEL", "TinyServer", "tiny_server"]

MODEL = "tiny"
_STOP_SECONDS = 60


@dataclass(frozen=True)
class TinyServer:
    """A server that is ready at ``url``."""

    process: subprocess.Popen[str]
    url: str

    @property
    def engine(self) -> int | None:
        """Process id of the engine; None if there is none any more."""
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found = [
                c for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()
            ]
        except FileNotFoundError:
            return None
        return int(found[0]) if found else None

    def stop(self) -> int:
        """Tell it to end; its exit code, which is that of SIGKILL if it does not."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def tiny_server(*overrides: str) -> Iterator[TinyServer]:
    """Start one, with ``overrides`` of its document; whatever happens it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kerf-tiny-") as name:
        folder = Path(name)
        command = [
            *(sys.executable, "-m", "kerf_runtime.cli", "serve", "--port", "0", "--json"),
            *("-f", str(write_tiny_document(folder / "tiny.yaml"))),
            *("--model-path", str(write_tiny_checkpoint(folder / "model"))),
        ]
        for override in overrides:
            command += ["--set", override]
        log = folder / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            yield TinyServer(process, wait_ready(process, log))
        finally:
            process.kill()
            process.wait()
