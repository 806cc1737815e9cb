"""Publishing and reading: visible all at once or not at all, whatever fails in between."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from tests.cache.helpers import DECLARED, FILES, OBSERVED, open_session, publish, write_files
from tests.patience import PATIENCE, join

from kerf_runtime.cache import CacheStore, Manifest, Problem
from kerf_runtime.config import cache_key, digest
from kerf_runtime.errors import CacheError
from kerf_runtime.reasons import CacheReason

KEY = cache_key(DECLARED)


@pytest.fixture
def store(tmp_path):
    return CacheStore(tmp_path)


def names(store):
    return sorted(p.name for p in store.folder.iterdir() if not p.name.startswith(".lock"))


def test_what_was_published_is_read_back(store, tmp_path):
    written = publish(tmp_path)
    found = store.read(KEY)
    assert found == written
    assert found.key == KEY
    assert found.digest == digest(DECLARED)
    assert found.declared == DECLARED
    assert found.observed == OBSERVED
    assert (found.counters, found.timings) == ({"dynamo_traces": 1}, {"trace": 0.5})
    assert {entry.path: entry.size for entry in found.files} == {
        name: len(content) for name, content in FILES.items()
    }
    assert found.total_bytes == sum(map(len, FILES.values()))
    for name, content in FILES.items():
        assert (store.path(KEY) / name).read_bytes() == content


def test_a_published_folder_holds_nothing_but_the_files_the_manifest_and_ready(store, tmp_path):
    publish(tmp_path)
    folder = store.path(KEY)
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {
        *FILES,
        "manifest.json",
        "READY",
    }
    assert names(store) == [KEY]
    assert store.keys() == [KEY]


def test_a_manifest_survives_being_written_and_read(tmp_path):
    manifest = publish(tmp_path)
    assert Manifest.from_text(manifest.to_text()) == manifest


def test_an_empty_volume_has_no_keys(store):
    assert store.keys() == []
    found = store.read(KEY)
    assert isinstance(found, Problem)
    assert found.reason is CacheReason.NO_SUCH_KEY
    assert str(store.path(KEY)) in found.message


def test_a_half_written_key_is_invisible(store, tmp_path):
    staging = store.stage(KEY)
    write_files(staging.path)
    (staging.path / "READY").write_text("too early")
    assert store.keys() == []
    assert store.read(KEY).reason is CacheReason.NO_SUCH_KEY
    assert not open_session(tmp_path).verdict.hit


def test_a_staging_folder_that_was_not_published_is_removed(store, tmp_path):
    def fail():
        with open_session(tmp_path).staging() as staging:
            write_files(staging.path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(store) == []


def test_a_new_writer_collects_what_a_dead_one_left_hours_ago_and_nothing_younger(store):
    old, young, foreign = store.stage(KEY), store.stage(KEY), store.stage("0" * 16)
    for staging in (old, foreign):
        write_files(staging.path)
        os.utime(staging.path, (time.time() - 7 * 3600,) * 2)
    new = store.stage(KEY)
    assert names(store) == sorted(s.path.name for s in (young, foreign, new))


def test_publishing_over_a_key_moves_the_old_one_to_quarantine(store, tmp_path):
    publish(tmp_path)
    (store.path(KEY) / "READY").unlink()
    publish(tmp_path, {"rank_0/graph/plan.json": b"new"})
    assert [entry.path for entry in store.read(KEY).files] == ["rank_0/graph/plan.json"]
    (quarantine,) = store.folder.glob(f".quarantine-{KEY}-*")
    assert (quarantine / "rank_0/pieces/0123/wrapper.py").is_file()
    assert store.keys() == [KEY]


def test_a_quarantined_key_is_no_longer_there_but_can_be_looked_at(store, tmp_path):
    publish(tmp_path)
    moved = store.quarantine(KEY)
    assert store.keys() == []
    assert store.read(KEY).reason is CacheReason.NO_SUCH_KEY
    assert (moved / "manifest.json").is_file()


def test_everything_is_readable_by_other_users(store, tmp_path):
    old = os.umask(0o077)
    try:
        publish(tmp_path)
    finally:
        os.umask(old)
    folder = store.path(KEY)
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


class Crash(BaseException):
    """The process is killed here: nothing runs afterwards."""


@pytest.fixture
def fail_at(monkeypatch):
    """``fail_at(n, error, forever)``: the n-th call that touches the disk raises ``error``.

    Returns the list of calls, by name, as they happen.
    """

    def arm(number, error, *, forever=False):
        calls = []

        def wrap(name, function):
            def call(*args, **kwargs):
                calls.append(name)
                if len(calls) - 1 == number or (forever and len(calls) > number):
                    raise error
                return function(*args, **kwargs)

            return call

        for module, name in [
            (os, "rename"),
            (os, "fsync"),
            (os, "chmod"),
            (os, "open"),
            (io, "open"),
        ]:
            monkeypatch.setattr(module, name, wrap(name, getattr(module, name)))
        return calls

    yield arm
    monkeypatch.undo()


def try_to_publish(session, staging, files=None):
    write_files(staging.path, files)
    session.publish(staging, observed=OBSERVED, counters={}, timings={}, gate={})


def number_of_steps(tmp_path, fail_at, monkeypatch):
    session = open_session(tmp_path / "count")
    with session.staging() as staging:
        calls = fail_at(10**9, OSError())
        try_to_publish(session, staging)
        count = len(calls)
        monkeypatch.undo()
    assert {"rename", "fsync", "chmod", "open"} <= set(calls)
    return count


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_any_step_of_publishing_that_fails_leaves_no_key_and_a_clear_error(
    tmp_path, fail_at, monkeypatch, code
):
    for step in range(number_of_steps(tmp_path, fail_at, monkeypatch)):
        root = tmp_path / f"root-{step}"
        session = open_session(root)
        with session.staging() as staging:
            write_files(staging.path)
            fail_at(step, OSError(code, os.strerror(code)))
            try:
                session.publish(staging, observed=OBSERVED, counters={}, timings={}, gate={})
            except CacheError as error:
                text = str(error)
            else:
                text = ""
            monkeypatch.undo()
        if not text:
            # The files were written before the fault was armed: fewer steps than counted.
            assert session.store.keys() == [KEY]
            continue
        assert str(session.store.folder) in text
        assert ("the volume is full" in text) == (code == errno.ENOSPC)
        assert names(session.store) == [], f"step {step}"
        assert open_session(root).verdict.reason == CacheReason.NO_SUCH_KEY
        publish(root)
        assert open_session(root).verdict.hit


@pytest.mark.parametrize("replaced", [False, True], ids=["first", "again"])
def test_a_crash_at_any_step_leaves_no_key_or_a_whole_one(tmp_path, fail_at, monkeypatch, replaced):
    crashes = 0
    for step in range(number_of_steps(tmp_path, fail_at, monkeypatch) + 10):
        root = tmp_path / f"root-{step}"
        if replaced:
            publish(root, {"old": b"old"})
        session = open_session(root)
        staging = session.store.stage(KEY)
        write_files(staging.path, {"new": b"new"})
        fail_at(step, Crash(), forever=True)
        try:
            session.publish(staging, observed=OBSERVED, counters={}, timings={}, gate={})
        except Crash:
            crashes += 1
        monkeypatch.undo()
        found = session.store.read(KEY)
        if isinstance(found, Problem):
            assert found.reason is CacheReason.NO_SUCH_KEY, f"step {step}"
        else:
            assert [e.path for e in found.files] in ([["old"], ["new"]] if replaced else [["new"]])
        publish(root)
        assert open_session(root).verdict.hit
    assert crashes > 10


def test_a_volume_that_is_nearly_full_is_refused_before_the_work_with_the_numbers(
    store, tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CacheError, match="5 MiB free, at least 64 MiB needed") as raised:
        store.stage(KEY)
    assert raised.value.where == str(store.folder)
    assert names(store) == []


def test_a_volume_that_is_a_file_is_a_clear_error_for_a_writer_and_a_miss_for_a_reader(tmp_path):
    root = tmp_path / "file"
    root.write_text("not a folder")
    assert open_session(root).verdict.reason == CacheReason.NO_SUCH_KEY
    with pytest.raises(CacheError, match="cannot write"), CacheStore(root).writer(KEY):
        pass


def test_a_full_volume_that_does_not_exist_yet_is_a_clear_error(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(CacheError, match="the volume is full"):
        CacheStore(tmp_path / "a" / "b").stage(KEY)


def test_a_second_writer_waits_and_then_sees_what_the_first_published(store, tmp_path):
    waiting, verdicts = threading.Event(), []

    def second():
        session = open_session(tmp_path)
        assert not session.verdict.hit
        waiting.set()
        with session.store.writer(session.key):
            session.refresh()
            verdicts.append(session.verdict)

    with store.writer(KEY):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(PATIENCE)
        session = open_session(tmp_path)
        with session.staging() as staging:
            try_to_publish(session, staging)
        assert verdicts == []
    join(thread)
    assert [v.hit for v in verdicts] == [True]


def test_writers_of_other_keys_do_not_wait(store):
    with store.writer(KEY), store.writer("0" * 16, timeout_s=0):
        pass


def test_a_writer_that_waits_too_long_gives_up_with_an_error_that_names_the_key(store):
    with (
        store.writer(KEY),
        pytest.raises(CacheError, match=f"another process .* key {KEY}") as raised,
        store.writer(KEY, timeout_s=0),
    ):
        pass
    assert raised.value.hint


def test_a_killed_writer_holds_nobody_up(store, tmp_path):
    program = (
        "import sys, time, pathlib; from kerf_runtime.cache import CacheStore\n"
        "with CacheStore(pathlib.Path(sys.argv[1])).writer(sys.argv[2]):\n"
        "    print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), KEY], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(CacheError), store.writer(KEY, timeout_s=0):
            pass
        process.kill()
    with store.writer(KEY, timeout_s=PATIENCE):
        pass
