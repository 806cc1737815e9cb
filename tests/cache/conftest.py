"""Folders for the cache's tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, which pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp(prefix="kerf-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
