"""Running the command line inside the test process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kerf_runtime.cli import run

DOCUMENT = """
apiVersion: kerf.dev/v1alpha1
kind: ModelDeployment
metadata:
  name: demo
spec:
  model:
    source:
      pvc:
        claimName: models
        path: a/b.gguf
"""


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


Kerf = Callable[..., Done]


@pytest.fixture
def kerf(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Kerf]:
    """``kerf("validate", "-f", path)``; no variable of ours is inherited."""
    for name in (
        "KERF_DEPLOYMENT",
        "KERF_IMAGE",
        "KERF_CACHE_KEY",
        "KERF_API_KEY",
        "KERF_LOG_LEVEL",
        "KERF_DISABLE_COMPILE_CACHE",
    ):
        monkeypatch.setenv(
            name, ""
        )  # so that what a command sets itself (--debug) is undone as well
        monkeypatch.delenv(name)
    handlers = list(logging.root.handlers)

    def call(*arguments: object) -> Done:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Done(code, captured.out, captured.err)

    yield call
    logging.root.handlers = handlers


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A document without anything that is not required."""
    path = tmp_path / "demo.yaml"
    path.write_text(DOCUMENT)
    return path
