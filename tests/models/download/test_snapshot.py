"""A folder of downloads: resumed, verified, published at once, or invisible."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.models.download.conftest import FILES, REPO, WANTED, Pull, contents
from tests.models.download.hub_server import Hub

from kerf_runtime.errors import DownloadError, SourceError
from kerf_runtime.models.download import Retry, snapshot

WEIGHTS = "model.safetensors"
SIZE = len(FILES[WEIGHTS])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the one source of a test."""
    return tmp_path / "models"


def visible(folder: Path) -> list[str]:
    """Complete versions, and the link to one."""
    return [path.name for path in folder.glob("*/*") if not path.name.startswith(".")]


def ranges(hub: Hub) -> list[str | None]:
    """What was asked of the weights, by every request."""
    return [headers.get("Range") for _, headers in hub.kept]


def test_a_broken_connection_is_taken_up_where_it_broke(hub: Hub, pull: Pull) -> None:
    hub.faults.break_after, hub.faults.breaks = 2_000_000, 1
    found = pull()
    assert contents(found.path)[WEIGHTS] == FILES[WEIGHTS]
    assert ranges(hub) == [None, "bytes=2000000-"]
    assert found.received == found.size


def test_breaks_without_end_are_borne_as_long_as_something_comes(hub: Hub, pull: Pull) -> None:
    hub.faults.break_after, hub.faults.breaks = 200_000, 1000
    assert contents(pull().path)[WEIGHTS] == FILES[WEIGHTS]
    assert len(hub.kept) == SIZE // 200_000 + 1


def test_a_connection_that_brings_nothing_is_given_up_and_nothing_is_visible(
    hub: Hub, pull: Pull, folder: Path
) -> None:
    hub.faults.breaks = 1000
    with pytest.raises(DownloadError, match=r"\(tried 3 times\)"):
        pull()
    assert visible(folder) == []


def test_another_process_goes_on_where_the_last_one_ended(
    hub: Hub, pull: Pull, folder: Path
) -> None:
    hub.faults.break_after, hub.faults.breaks = 2_000_000, 1
    broken = snapshot_that_ends_after_the_first_break(pull)
    assert visible(folder) == []
    assert next(folder.glob(f"*/.partial-*/{WEIGHTS}.part")).stat().st_size == 2_000_000
    hub.kept.clear()
    found = pull()
    assert ranges(hub) == ["bytes=2000000-"]
    assert found.received < found.size
    assert contents(found.path)[WEIGHTS] == FILES[WEIGHTS]
    assert "tried 1 times" in str(broken)


def snapshot_that_ends_after_the_first_break(pull: Pull) -> DownloadError:
    with pytest.raises(DownloadError) as raised:
        pull(retry=Retry(attempts=1))
    return raised.value


def test_a_server_that_cannot_begin_in_the_middle_sends_all_again(hub: Hub, pull: Pull) -> None:
    hub.faults.break_after, hub.faults.breaks, hub.faults.ignore_ranges = 2_000_000, 1, True
    found = pull()
    assert contents(found.path)[WEIGHTS] == FILES[WEIGHTS]
    assert found.received == found.size + 2_000_000


def test_a_damaged_file_is_downloaded_again(hub: Hub, pull: Pull) -> None:
    hub.faults.flip = 1
    found = pull()
    assert contents(found.path) == {name: FILES[name] for name in WANTED}
    assert len(hub.downloads()) == len(WANTED) + 1


def test_a_file_that_is_damaged_twice_is_given_up_and_never_visible(
    hub: Hub, pull: Pull, folder: Path
) -> None:
    hub.faults.flip = 1000
    with pytest.raises(DownloadError, match=r"damaged twice on its way: (sha256|git) is .*, not "):
        pull()
    assert visible(folder) == []


def test_what_an_earlier_process_left_is_verified_too(hub: Hub, pull: Pull, folder: Path) -> None:
    hub.faults.break_after, hub.faults.breaks = 2_000_000, 1
    snapshot_that_ends_after_the_first_break(pull)
    part = next(folder.glob(f"*/.partial-*/{WEIGHTS}.part"))
    with part.open("r+b") as file:
        file.write(b"damage")
    hub.kept.clear()
    assert contents(pull().path)[WEIGHTS] == FILES[WEIGHTS]
    assert ranges(hub) == ["bytes=2000000-", None]


def test_a_part_that_is_whole_is_only_verified(hub: Hub, pull: Pull, folder: Path) -> None:
    hub.faults.break_after, hub.faults.breaks = 2_000_000, 1
    snapshot_that_ends_after_the_first_break(pull)
    next(folder.glob(f"*/.partial-*/{WEIGHTS}.part")).write_bytes(FILES[WEIGHTS])
    hub.kept.clear()
    assert contents(pull().path)[WEIGHTS] == FILES[WEIGHTS]
    assert hub.kept == []


@pytest.mark.parametrize("size", [SIZE + 1, 3 * SIZE])
def test_a_part_that_is_too_long_is_thrown_away(
    hub: Hub, pull: Pull, folder: Path, size: int
) -> None:
    hub.faults.break_after, hub.faults.breaks = 2_000_000, 1
    snapshot_that_ends_after_the_first_break(pull)
    next(folder.glob(f"*/.partial-*/{WEIGHTS}.part")).write_bytes(bytes(size))
    assert contents(pull().path)[WEIGHTS] == FILES[WEIGHTS]


def test_more_bytes_than_announced_are_not_taken(hub: Hub, pull: Pull) -> None:
    hub.faults.surplus = 1
    assert contents(pull().path) == {name: FILES[name] for name in WANTED}


def test_current_leads_to_the_version_without_naming_the_folder_it_is_in(
    pull: Pull, folder: Path
) -> None:
    found = pull()
    link = found.path.parent / "current"
    assert str(link.readlink()) == found.path.name  # a volume is mounted elsewhere in every pod
    assert sorted(visible(folder)) == sorted(["current", found.path.name])


def test_a_commit_that_changes_no_wanted_file_downloads_nothing(hub: Hub, pull: Pull) -> None:
    first = pull()
    repository = hub.repositories[REPO]
    repository.files["README.md"], repository.commit = b"# Better", "f" * 40
    second = pull()
    assert (second.path, second.received) == (first.path, 0)


def test_of_a_new_version_only_what_changed_is_downloaded(hub: Hub, pull: Pull) -> None:
    first = pull()
    hub.repositories[REPO].files["config.json"] = b'{"architectures": []}'
    hub.requests.clear()
    second = pull()
    assert second.path != first.path
    assert hub.downloads() == ["config.json"]
    assert contents(second.path) == {
        **{name: FILES[name] for name in WANTED},
        "config.json": b'{"architectures": []}',
    }
    assert contents(first.path)["config.json"] == FILES["config.json"]  # its readers go on


def test_of_old_versions_the_one_before_is_kept(hub: Hub, pull: Pull, folder: Path) -> None:
    paths = []
    for text in (b"{}", b"[]", b"{ }"):
        hub.repositories[REPO].files["tokenizer.json"] = text
        paths.append(pull().path)
    assert sorted(visible(folder)) == sorted(["current", paths[1].name, paths[2].name])


def test_a_new_version_appears_as_a_whole(hub: Hub, pull: Pull, folder: Path) -> None:
    first = pull()
    hub.repositories[REPO].files[WEIGHTS] = FILES[WEIGHTS][::-1]
    hub.faults.break_after, hub.faults.stalls = 1_000_000, 1
    thread = threading.Thread(target=pull)
    thread.start()
    try:
        while len(hub.kept) < 2:
            assert thread.is_alive()
        current = first.path.parent / "current"
        assert contents(current) == {name: FILES[name] for name in WANTED}
    finally:
        hub.faults.go_on.set()
        thread.join()
    assert contents(current)[WEIGHTS] == FILES[WEIGHTS][::-1]


def test_a_version_that_lost_a_file_is_repaired(hub: Hub, pull: Pull) -> None:
    first = pull()
    (first.path / "tokenizer.json").unlink()
    hub.requests.clear()
    second = pull()
    assert second.path == first.path
    assert contents(second.path) == {name: FILES[name] for name in WANTED}
    assert hub.downloads() == ["tokenizer.json"]


def test_without_a_network_the_last_download_is_used_and_says_so(hub: Hub, pull: Pull) -> None:
    first = pull()
    hub.faults.statuses = [503] * 3
    second = pull()
    assert second.path == first.path
    assert second.warning is not None
    assert "answered 503" in second.warning


def test_a_refusal_is_an_error_even_if_there_is_a_download(hub: Hub, pull: Pull) -> None:
    pull()
    hub.repositories[REPO].private = True
    with pytest.raises(SourceError, match="401"):
        pull()


def test_of_two_processes_one_downloads_and_the_other_finds_it(
    hub: Hub, pull: Pull, folder: Path
) -> None:
    hub.faults.break_after, hub.faults.stalls = 1_000_000, 1
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(pull())) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not hub.kept:
        assert threads[0].is_alive()
    hub.faults.go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(download.received for download in found) == [0, found[0].size]
    assert len(hub.downloads()) == len(WANTED)


def test_the_lock_goes_with_its_process(hub: Hub, pull: Pull, folder: Path) -> None:
    pull()
    with next(folder.glob("*/.lock")).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_too_little_space_is_said_before_anything_is_downloaded(
    hub: Hub, pull: Pull, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(snapshot.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match=r"the disk is too small: 0.0 GiB are needed") as raised:
        pull()
    assert str(folder) in str(raised.value)
    assert hub.downloads() == []


def test_a_disk_that_fills_up_meanwhile_is_told_and_the_next_try_goes_on(
    hub: Hub, pull: Pull, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DownloadError, match="the disk is full: No space left on device"):
            pull()
    assert visible(folder) == []
    hub.kept.clear()
    assert contents(pull().path)[WEIGHTS] == FILES[WEIGHTS]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_really_full_disk(hub: Hub, pull: Pull, folder: Path, monkeypatch: Any) -> None:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody mount a small disk")
    try:
        with pytest.raises(DownloadError, match="too small"):
            pull()
        usage = type("Usage", (), {"free": 1 << 40})
        monkeypatch.setattr(snapshot.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(DownloadError, match="the disk is full: No space left on device"):
            pull()
        assert visible(folder) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_cannot_be_written_is_told(
    hub: Hub, pull: Pull, folder: Path, tmp_path: Path
) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="cannot write: Not a directory"):
        pull()
    assert hub.requests == []


def test_progress_begins_with_what_is_here_and_ends_with_everything(hub: Hub, pull: Pull) -> None:
    hub.faults.break_after, hub.faults.breaks = 2_000_000, 1
    snapshot_that_ends_after_the_first_break(pull)
    seen: list[Any] = []
    found = pull(progress=seen.append)
    assert seen[0].done >= 2_000_000
    assert seen[-1].total == found.size
    assert seen[-1].done == found.size
    assert all(a.done <= b.done for a, b in pairwise(seen))
