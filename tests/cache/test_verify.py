"""Nothing that was changed after it was published is ever used; the reason says what is wrong."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.helpers import DECLARED, FILES, as_another_user, publish

from kerf_runtime.cache import CacheStore, Manifest, Problem
from kerf_runtime.cache.verify import ready_text, verify_folder
from kerf_runtime.config import cache_key
from kerf_runtime.config.key import KEY_FORMAT
from kerf_runtime.reasons import CacheReason

KEY = cache_key(DECLARED)
ALL_FILES = sorted([*FILES, "manifest.json", "READY"])


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A published folder that tests put back as it was."""
    root = tmp_path_factory.mktemp("cache")
    publish(root)
    return CacheStore(root).path(KEY)


@pytest.fixture
def folder(intact, tmp_path):
    """A copy of it that a test may change."""
    return shutil.copytree(intact, tmp_path / KEY)


def verify(folder, checksums=True):
    return verify_folder(folder, KEY, checksums=checksums)


def reason(folder, checksums=True):
    found = verify(folder, checksums)
    assert isinstance(found, Problem)
    assert str(folder) in found.message
    return found.reason


def republish(folder, **changes):
    """Change fields of the manifest and make READY agree, as an honest other version would."""
    path = folder / "manifest.json"
    text = json.dumps({**json.loads(path.read_text()), **changes})
    path.write_text(text)
    (folder / "READY").write_text(ready_text(KEY, text.encode()))


def test_an_intact_folder_and_its_copy_are_accepted(intact, folder):
    assert isinstance(verify(intact), Manifest)
    assert verify(intact) == verify(folder)


@given(st.data())
def test_any_changed_byte_of_any_file_is_refused(intact, data):
    path = intact / data.draw(st.sampled_from(ALL_FILES))
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    flip = data.draw(st.integers(1, 255))
    path.write_bytes(before[:at] + bytes([before[at] ^ flip]) + before[at + 1 :])
    try:
        assert reason(intact) is CacheReason.CHECKSUM_MISMATCH
    finally:
        path.write_bytes(before)


@given(st.data())
def test_a_cut_file_makes_the_key_incomplete_and_a_longer_one_is_a_mismatch(intact, data):
    name = data.draw(st.sampled_from(sorted(FILES)))
    path = intact / name
    before = path.read_bytes()
    length = data.draw(st.integers(0, len(before) + 3).filter(lambda n: n != len(before)))
    path.write_bytes((before + b"abc")[:length])
    cut = length < len(before)
    try:
        for checksums in (True, False):
            found = CacheReason.INCOMPLETE if cut else CacheReason.CHECKSUM_MISMATCH
            assert reason(intact, checksums) is found
            if cut:
                said = f"{path} has {length} of {len(before)} bytes"
                assert verify(intact, checksums).message == said
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", ["manifest.json", "READY"])
@pytest.mark.parametrize(
    "change", [lambda raw: raw[:-2], lambda raw: raw + b" "], ids=["cut", "longer"]
)
def test_a_manifest_or_ready_of_another_length_is_refused(folder, name, change):
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    assert reason(folder) is CacheReason.CHECKSUM_MISMATCH


@given(st.data())
def test_without_checksums_a_damaged_manifest_is_still_no_crash(intact, data):
    path = intact / "manifest.json"
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    path.write_bytes(before[:at] + data.draw(st.binary(max_size=3)) + before[at + 1 :])
    try:
        assert isinstance(verify(intact, checksums=False), (Manifest, Problem))
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_missing_file_makes_the_key_incomplete(folder, name, checksums):
    (folder / name).unlink()
    assert reason(folder, checksums) is CacheReason.INCOMPLETE
    assert name.rsplit("/")[-1] in verify(folder, checksums).message


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize(
    "name", ["extra", "rank_0/extra.py", "rank_0/pieces/0123/kernel_1.so", ".hidden"]
)
def test_an_added_file_is_refused_and_named(folder, name, checksums):
    (folder / name).write_text("surprise")
    assert reason(folder, checksums) is CacheReason.CHECKSUM_MISMATCH
    assert f"{folder}/{name} is not in the manifest" in verify(folder, checksums).message


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_link_in_place_of_a_file_is_refused_even_if_it_leads_to_the_same_content(
    folder, tmp_path, name
):
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert reason(folder, checksums=False) is CacheReason.CHECKSUM_MISMATCH
    assert f"{folder}/{name} is a link" in verify(folder).message


def test_a_link_in_place_of_a_folder_is_refused(folder, tmp_path):
    (folder / "rank_0").rename(tmp_path / "elsewhere")
    (folder / "rank_0").symlink_to(tmp_path / "elsewhere")
    assert reason(folder) is CacheReason.CHECKSUM_MISMATCH


def test_a_manifest_cannot_list_files_outside_the_folder(folder, tmp_path):
    (tmp_path / "outside").write_bytes(b"")
    files = [{"path": "../outside", "size": 0, "sha256": "0"}]
    republish(folder, files=[*json.loads((folder / "manifest.json").read_text())["files"], *files])
    assert reason(folder) is CacheReason.INCOMPLETE


def test_a_format_of_a_later_version_is_recognised_whatever_else_that_version_writes(folder):
    later = KEY_FORMAT + 1
    republish(folder, format=later, files={"other": "shape"}, key=None)
    assert reason(folder) is CacheReason.FORMAT_TOO_NEW
    assert f"format {later}, this version reads up to {KEY_FORMAT}" in verify(folder).message


def test_unknown_fields_of_a_manifest_are_no_problem(folder):
    republish(folder, remark="from another version")
    assert isinstance(verify(folder), Manifest)


def test_a_manifest_of_another_key_is_refused(folder):
    other = folder.rename(folder.parent / ("0" * 16))
    found = verify_folder(other, "0" * 16, checksums=True)
    assert found.reason is CacheReason.CHECKSUM_MISMATCH
    found = verify_folder(other, "0" * 16, checksums=False)
    assert found.reason is CacheReason.CHECKSUM_MISMATCH
    assert f"holds key {KEY}" in found.message


def test_a_manifest_whose_factors_were_exchanged_is_refused(folder):
    republish(folder, declared={**DECLARED, "dtype": "float16"})
    assert reason(folder) is CacheReason.CHECKSUM_MISMATCH
    assert "not the digest of the declared factors" in verify(folder).message


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": "x"}', "[" * 5000])
def test_a_manifest_that_is_none_is_refused(folder, text):
    (folder / "manifest.json").write_text(text)
    (folder / "READY").write_text(ready_text(KEY, text.encode()))
    assert reason(folder) is CacheReason.CHECKSUM_MISMATCH


def test_a_folder_in_place_of_a_file_is_refused(folder):
    (folder / "READY").unlink()
    (folder / "READY").mkdir()
    assert reason(folder) is CacheReason.INCOMPLETE


def test_what_this_user_may_not_read_is_unreadable(intact, open_folder):
    folder = shutil.copytree(intact, open_folder / KEY)
    for path, mode in [
        (folder / "rank_0/graph/plan.json", 0o600),
        (folder / "manifest.json", 0o600),
        (folder / "rank_0/graph", 0o700),
        (folder, 0o700),
        (open_folder, 0o700),
    ]:
        before = path.stat().st_mode
        path.chmod(mode)
        found = as_another_user(lambda: verify(folder))
        path.chmod(before)
        assert isinstance(found, Problem), path
        assert found.reason is CacheReason.UNREADABLE, path
    assert isinstance(as_another_user(lambda: verify(folder)), Manifest)
