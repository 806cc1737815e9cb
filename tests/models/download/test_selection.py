"""Which files of a repository make the checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.errors import SourceError
from kerf_runtime.models.download.selection import select

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
GGUF_SHARDS = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["config.json", "model.safetensors"], ["config.json", "model.safetensors"]),
        (["config.json", INDEX, *SHARDS], ["config.json", *SHARDS, INDEX]),
        (
            ["config.json", "chat_template.jinja", "model.safetensors", "merges.txt"],
            ["chat_template.jinja", "config.json", "model.safetensors"],
        ),
        (
            ["config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "a.onnx"],
            ["config.json", "model.safetensors"],
        ),
        (
            ["config.json", "consolidated.safetensors", "model.safetensors"],
            ["config.json", "model.safetensors"],
        ),
        (
            ["config.json", "consolidated.safetensors"],
            ["config.json", "consolidated.safetensors"],
        ),
        (
            ["config.json", ".gitattributes", "model.safetensors"],
            ["config.json", "model.safetensors"],
        ),
        (["config.json", "model.safetensors", "m.gguf"], ["config.json", "model.safetensors"]),
        (["config.json", "README.md", "m.gguf"], ["m.gguf"]),
        (["a/config.json", "a/model.safetensors"], ["a/config.json", "a/model.safetensors"]),
    ],
    ids=str,
)
def test_what_the_loader_reads_is_wanted(names: list[str], wanted: list[str]) -> None:
    assert select(names, path=None, where="hub") == wanted


def test_a_gguf_file_in_one_shard_is_wanted() -> None:
    assert select(["m-00001-of-00001.gguf"], path=None, where="hub") == ["m-00001-of-00001.gguf"]


def test_a_gguf_file_that_is_named_is_all_that_is_wanted() -> None:
    names = ["a.gguf", "b.gguf", "config.json", "model.safetensors"]
    assert select(names, path="b.gguf", where="hub") == ["b.gguf"]


@pytest.mark.parametrize(
    ("names", "path", "words"),
    [
        ([], None, "there are no files"),
        ([], "small", "there is nothing at small"),
        (["config.json"], "config.json", "config.json is not a .gguf file"),
        (["a.gguf", "b.gguf"], None, "there are 2 GGUF files: a.gguf, b.gguf"),
        (["a.gguf", "b.gguf"], None, "Set path to one of them"),
        (GGUF_SHARDS, None, "merge them into one"),
        (GGUF_SHARDS, GGUF_SHARDS[0], "m-00001-of-00002.gguf is one of several shards"),
        (["model.safetensors"], None, "there are weights but no config.json"),
        (["config.json", "pytorch_model.bin"], None, "found config.json, pytorch_model.bin"),
        ([f"{n:02}.txt" for n in range(12)], None, "07.txt and 4 more"),
        ([".gitattributes"], None, "there is no checkpoint; found nothing"),
    ],
)
def test_what_is_no_checkpoint_says_what_is_there(
    names: list[str], path: str | None, words: str
) -> None:
    with pytest.raises(SourceError) as raised:
        select(names, path=path, where="hub org/model@main")
    assert str(raised.value).startswith("hub org/model@main: ")
    assert words in str(raised.value)


NAMES = st.lists(
    st.sampled_from(
        ["config.json", "a.gguf", "b.gguf", "model.safetensors", *SHARDS, "a.bin", ".x", "t.json"]
    ),
    unique=True,
)


@given(NAMES, st.sampled_from([None, "a.gguf", "config.json", "other"]))
def test_nothing_is_chosen_that_was_not_listed(names: list[str], path: str | None) -> None:
    try:
        found = select(names, path=path, where="hub")
    except SourceError:
        return
    assert found
    assert set(found) <= set(names)
    assert len(set(found)) == len(found)
