"""docs/models.md names what is supported, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from kerf_runtime.config import ModelDeploymentSpec
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


def test_the_examples_of_sources_are_valid_and_every_source_has_a_row() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    specs = [
        ModelDeploymentSpec.model_validate(document)
        for block in blocks
        for document in yaml.safe_load_all(block)
    ]
    assert [spec.model.source.is_downloaded for spec in specs] == [True, True]
    source = type(specs[0].model.source)
    rows = set(re.findall(r"^\| `(\w+)` \| [^|]+ \| `", PAGE, re.MULTILINE))
    assert {field.alias for field in source.model_fields.values()} <= rows
