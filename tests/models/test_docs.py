"""docs/models.md names what is supported, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from kerf_runtime.models import supported_architectures
from kerf_runtime.models.gpt2 import config as gpt2_config
from kerf_runtime.models.llama.variants import VARIANTS

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| [^|]+ \| yes \| ([^|]+) \|", PAGE, re.MULTILINE)


def test_every_supported_architecture_has_a_row_and_no_other() -> None:
    assert tuple(name for name, _ in ROWS) == supported_architectures()


def test_the_names_in_gguf_files_are_those_that_are_read() -> None:
    read = {v.architecture: v.gguf_name for v in VARIANTS if v.gguf_name}
    read |= dict.fromkeys(gpt2_config.CLASSES, gpt2_config.GGUF_NAME)
    assert {name: cell.strip("`") for name, cell in ROWS if cell.startswith("`")} == read
