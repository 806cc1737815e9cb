"""``kerf cache ls`` and ``kerf cache verify``."""

from __future__ import annotations

import pytest

from kerf_runtime.cache import CacheStore
from kerf_runtime.config import cache_key, declared_factors, digest, load_document


@pytest.fixture
def published(document, tmp_path):
    """A cache with one key of one file; its root and the key."""
    root = tmp_path / "cache"
    declared = declared_factors(load_document(document).spec, image="local")
    key = cache_key(declared)
    store = CacheStore(root)
    with store.writer(key):
        staging = store.stage(key)
        (staging.path / "piece").write_bytes(b"x" * 2048)
        store.publish(staging, digest=digest(declared), declared=declared, observed={})
    return root, key


def test_ls_shows_size_verdict_and_what_it_was_compiled_for(kerf, published):
    root, key = published
    done = kerf("cache", "ls", "--cache-dir", root)
    heading, _, row = done.out.splitlines()
    assert done.code == 0
    assert heading.split() == ["KEY", "SIZE", "AGE", "VERDICT", "MODEL", "DTYPE", "LEVEL"]
    assert row.split() == [
        key,
        "2.0",
        "KiB",
        row.split()[3],
        "Complete",
        "models/a/b.gguf",
        "auto",
        "3",
    ]


def test_ls_as_json(kerf, published):
    root, key = published
    found = kerf("cache", "ls", "--cache-dir", root, "--json").json
    assert [(k["key"], k["ok"], k["sizeBytes"]) for k in found["keys"]] == [(key, True, 2048)]


def test_verify_reads_every_file(kerf, published):
    root, key = published
    done = kerf("cache", "verify", "--cache-dir", root)
    assert (done.code, done.out) == (0, f"{key}: Verified: 1 files\n")


def test_verify_finds_a_changed_byte_that_ls_does_not_look_for(kerf, published):
    root, key = published
    path = CacheStore(root).path(key) / "piece"
    path.write_bytes(b"y" + path.read_bytes()[1:])
    assert "Complete" in kerf("cache", "ls", "--cache-dir", root).out
    done = kerf("cache", "verify", "--cache-dir", root)
    assert done.code == 5
    assert f"{key}: ChecksumMismatch: " in done.out
    assert "1 of 1 keys cannot be used" in done.err


def test_verify_of_a_key_that_is_not_there(kerf, published):
    root, _ = published
    done = kerf("cache", "verify", "0123456789abcdef", "--cache-dir", root)
    assert done.code == 5
    assert "0123456789abcdef: NoSuchKey" in done.out


def test_an_incomplete_key_is_listed_as_such(kerf, published):
    root, key = published
    (CacheStore(root).path(key) / "READY").unlink()
    assert "Incomplete" in kerf("cache", "ls", "--cache-dir", root).out


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_folder_that_is_not_there(kerf, tmp_path, command):
    done = kerf("cache", command, "--cache-dir", tmp_path / "no")
    assert done.code == 5
    assert "there is no such folder" in done.err


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_an_empty_cache(kerf, tmp_path, command):
    done = kerf("cache", command, "--cache-dir", tmp_path)
    assert (done.code, done.out) == (0, f"no keys in {tmp_path}\n")


def test_the_default_is_in_the_users_cache_folder(kerf, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "kerf").mkdir()
    assert str(tmp_path / "kerf") in kerf("cache", "ls").out
