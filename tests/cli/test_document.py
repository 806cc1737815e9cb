"""Where the document comes from, and ``--set``."""

from __future__ import annotations

import json

import pytest

from kerf_runtime.cli.document import (
    apply_overrides,
    option_paths,
    raw_document,
    read_document,
)
from kerf_runtime.config import CUDAGraphMode, parse_document
from kerf_runtime.errors import ConfigError

REQUIRED = {"model.source.pvc.claimName"}
"""Fields that the document of these tests cannot be without."""


@pytest.fixture
def read(document):
    def call(*overrides):
        return read_document(document, overrides, {})

    return call


def test_the_document_is_read_from_the_file(read):
    assert read().served_name == "demo"


def test_without_a_file_it_comes_from_the_environment(document):
    data = raw_document(read_document(document, (), {}))
    found = read_document(None, ("engine.maxNumSeqs=3",), {"KERF_DEPLOYMENT": json.dumps(data)})
    assert found.name == "demo"
    assert found.spec.engine.max_num_seqs == 3


def test_without_either_the_error_names_both():
    with pytest.raises(ConfigError, match=r"Pass -f FILE.*KERF_DEPLOYMENT"):
        read_document(None, (), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "KERF_DEPLOYMENT: not valid JSON"),
        ("[" * 10000, "KERF_DEPLOYMENT: not valid JSON"),
        ("9" * 5000, "KERF_DEPLOYMENT: not valid JSON"),
        ("{}", "KERF_DEPLOYMENT: expected apiVersion"),
    ],
    ids=["cut", "deep", "long_number", "empty"],
)
def test_a_bad_environment_variable_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        read_document(None, (), {"KERF_DEPLOYMENT": text})


def test_the_raw_document_reads_back_as_the_same(read):
    document = read("compilation.captureSizes=[4, 1]", "engine.maxModelLen=100")
    assert parse_document(raw_document(document), where="x") == document


@pytest.mark.parametrize(
    "path", ["engine.maxNumSeqs", "engine.max_num_seqs", "spec.engine.maxNumSeqs"]
)
def test_an_override_may_be_written_in_both_cases_and_with_spec(read, path):
    assert read(f"{path}=5").spec.engine.max_num_seqs == 5


def test_values_are_yaml(read):
    spec = read(
        "compilation.level=0",
        "compilation.cudagraphMode=NONE",
        "compilation.captureSizes=[8, 2, 2]",
        "compilation.strict=true",
        "compilation.inductorConfig.cpp.threads=2",
        "model.servedName=other",
    ).spec
    assert spec.compilation.level == 0
    assert spec.compilation.cudagraph_mode is CUDAGraphMode.NONE
    assert spec.compilation.capture_sizes == [2, 8]
    assert spec.compilation.strict is True
    assert spec.compilation.inductor_config == {"cpp.threads": 2}
    assert spec.model.served_name == "other"


def test_null_removes_a_field_and_the_last_override_wins(read):
    assert read("engine.maxModelLen=5", "engine.maxModelLen=null").spec.engine.max_model_len is None
    assert read("engine.maxNumSeqs=5", "engine.maxNumSeqs=6").spec.engine.max_num_seqs == 6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("compilation.level", "expected FIELD=VALUE"),
        ("compilation.levle=0", r"no field 'compilation.levle'.*Did you mean compilation\.level"),
        ("nonsense=1", "no field 'nonsense'"),
        ("compilation.level.x=0", "no field 'compilation.level.x'"),
        ("compilation.level=7", r"--set: .*compilation\.level: .*got 7"),
        ("compilation.captureSizes=[0]", r"compilation\.captureSizes\.0"),
        ("compilation.cudagraphMode=HALF", r"compilation\.cudagraphMode.*HALF"),
        ("engine.maxNumSeqs={", "not valid YAML"),
        ("engine.maxNumBatchedTokens=1", "maxNumBatchedTokens 1 is below maxNumSeqs 16"),
    ],
)
def test_a_wrong_override_says_what_and_where(read, override, message):
    with pytest.raises(ConfigError, match=message):
        read(override)


def test_every_listed_path_is_accepted_and_is_a_field_of_the_document(read):
    paths = list(option_paths())
    assert "compilation.level" in paths
    assert "cache.volume.claimTemplate.storage" in paths
    document = read()
    for path in paths:
        if path in REQUIRED:
            with pytest.raises(ConfigError, match="--set"):
                apply_overrides(document, [f"{path}=null"])
        else:
            assert apply_overrides(document, [f"{path}=null"]) is not None
