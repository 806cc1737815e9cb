"""One process and one key: hit or miss with a reason, whoever looks and from wherever."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.helpers import (
    DECLARED,
    OBSERVED,
    as_another_user,
    open_session,
    publish,
    snapshot,
)

from kerf_runtime.cache import CacheSession
from kerf_runtime.cache.manifest import first_difference
from kerf_runtime.cache.session import DISABLE_VARIABLE
from kerf_runtime.config import cache_key
from kerf_runtime.errors import CacheError, ConfigError
from kerf_runtime.reasons import CacheReason


def test_an_empty_volume_is_a_miss_and_a_published_key_is_a_hit(tmp_path):
    before = open_session(tmp_path)
    assert (before.verdict.result, before.verdict.reason) == ("miss", CacheReason.NO_SUCH_KEY)
    assert before.manifest is None
    assert before.may_write
    publish(tmp_path)
    after = open_session(tmp_path)
    assert (after.verdict.result, after.verdict.reason) == ("hit", CacheReason.HIT)
    assert after.manifest.observed == OBSERVED
    assert after.key == cache_key(DECLARED)
    assert after.folder == tmp_path / "torch_compile_cache" / after.key


def test_a_damaged_key_is_a_miss_with_the_reason_of_the_damage(tmp_path):
    publish(tmp_path)
    path = open_session(tmp_path).folder / "rank_0/graph/plan.json"
    path.write_text("changed".ljust(path.stat().st_size))
    verdict = open_session(tmp_path).verdict
    assert (verdict.hit, verdict.reason) == (False, CacheReason.CHECKSUM_MISMATCH)
    assert str(path) in verdict.message


def test_without_checksums_changed_content_of_the_same_size_is_not_looked_at(tmp_path):
    publish(tmp_path)
    path = open_session(tmp_path).folder / "rank_0/graph/plan.json"
    path.write_bytes(path.read_bytes().replace(b"steps", b"spets"))
    assert not open_session(tmp_path).verdict.hit
    assert open_session(tmp_path, checksums=False).verdict.hit


def test_the_key_hits_wherever_the_folder_is_moved_or_copied(tmp_path):
    publish(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a").rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        assert open_session(tmp_path / name, read_only=True).verdict.hit
    assert not open_session(tmp_path / "a").verdict.hit


def test_another_user_without_write_permission_hits_and_writes_nothing(open_folder):
    publish(open_folder)
    before = snapshot(open_folder)

    def use():
        session = open_session(open_folder, read_only=True)
        session.check_observed(OBSERVED)
        return os.geteuid(), session.verdict.reason, session.may_write

    assert as_another_user(use) == (65534, CacheReason.HIT, False)
    assert snapshot(open_folder) == before


def test_another_user_who_tries_to_write_gets_a_clear_error(open_folder):
    publish(open_folder)

    def write():
        session = open_session(open_folder, read_only=False)
        found = []
        for attempt in (session.staging, lambda: session.store.writer(session.key)):
            try:
                with attempt():
                    found.append("written")
            except CacheError as error:
                found.append(str(error))
        return found

    for text in as_another_user(write):
        assert "cannot write: Permission denied" in text
        assert "--cache-read-only" in text


def test_a_read_only_session_refuses_to_write(tmp_path):
    session = open_session(tmp_path, read_only=True)
    assert not session.may_write
    with pytest.raises(CacheError, match="read-only here"), session.staging():
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_same_observed_factors_stay_a_hit(tmp_path):
    publish(tmp_path)
    assert open_session(tmp_path).check_observed(dict(OBSERVED)).hit


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"torch": "2.12.0"}, "torch"),
        (
            {"platform": {**OBSERVED["platform"], "cpuCapability": "AVX512"}},
            "platform.cpuCapability",
        ),
        ({"sources": {**OBSERVED["sources"], "pkg.model": "cc"}}, "sources.pkg.model"),
        ({"sources": {"pkg.model": "aa"}}, "sources.pkg.layers"),
        ({"extra": 1}, "extra"),
    ],
)
def test_another_observed_factor_is_a_miss_that_names_it_and_both_values(tmp_path, changes, factor):
    publish(tmp_path)
    session = open_session(tmp_path)
    verdict = session.check_observed({**OBSERVED, **changes})
    assert (verdict.hit, verdict.reason) == (False, f"FactorMismatch:{factor}")
    assert f"{factor} was" in verdict.message
    assert "when the cache was written" in verdict.message
    assert session.manifest is None
    assert session.verdict == verdict


def test_other_declared_factors_under_the_same_key_are_a_miss_that_names_them(tmp_path):
    publish(tmp_path)
    session = open_session(tmp_path)
    session.declared = {**DECLARED, "model": {"path": "b"}}
    session.refresh()
    assert session.verdict.reason == "FactorMismatch:model.path"
    assert "'a'" in session.verdict.message
    assert "'b'" in session.verdict.message


def test_the_variable_turns_every_use_of_the_cache_off(tmp_path, monkeypatch):
    publish(tmp_path)
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    session = open_session(tmp_path)
    assert session.verdict.reason == CacheReason.DISABLED
    assert DISABLE_VARIABLE in session.verdict.message
    assert not session.may_write
    assert session.key == cache_key(DECLARED)


def test_a_switch_that_is_neither_on_nor_off_is_not_taken_for_off(tmp_path, monkeypatch):
    monkeypatch.setenv(DISABLE_VARIABLE, "true")
    with pytest.raises(ConfigError, match=f"{DISABLE_VARIABLE}: 'true' is neither on nor off"):
        open_session(tmp_path)


def test_without_a_folder_there_is_no_cache_and_nothing_to_write():
    session = CacheSession.open(None, DECLARED, read_only=False)
    assert session.verdict.reason == CacheReason.NOT_CONFIGURED
    assert not session.may_write
    with pytest.raises(CacheError), session.staging():
        pass


def test_a_session_that_needs_no_cache_says_so():
    session = CacheSession.unused(CacheReason.NOT_NEEDED, "level 0 compiles nothing")
    assert (session.verdict.hit, session.verdict.reason) == (False, CacheReason.NOT_NEEDED)
    assert not session.may_write


def test_looking_at_a_volume_creates_nothing_on_it(tmp_path):
    open_session(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


_leaves = st.integers() | st.text(max_size=3)
_factors = st.recursive(
    st.dictionaries(st.sampled_from("abc"), _leaves, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), _leaves | inner, max_size=3),
    max_leaves=8,
)


def value_at(data, path):
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


@given(_factors)
def test_equal_factors_have_no_difference(factors):
    assert first_difference(factors, dict(factors)) is None


@given(_factors, _factors)
def test_the_difference_is_a_place_where_the_two_differ_and_shows_both_values(left, right):
    found = first_difference(left, right)
    assert (found is None) == (left == right)
    if found is not None:
        path, stored, actual = found
        assert stored == value_at(left, path)
        assert actual == value_at(right, path)
        assert stored != actual
