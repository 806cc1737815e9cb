"""Where a binary is taken from, and what a failed download or build says."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hack.cluster import BuildError, ClusterError, PrerequisiteError, download, gobuild, versions
from hack.cluster import binaries as binaries_module
from hack.cluster.binaries import Binaries
from hack.cluster.versions import GROUPS, KUBERNETES_VERSION, TOOLS, Group, Tool, architecture


@pytest.fixture(autouse=True)
def _nothing_is_remembered_from_other_tests(monkeypatch):
    monkeypatch.setattr(download, "_unreachable", {})
    monkeypatch.setattr(binaries_module, "_said", set())


def program(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho 'Kubernetes v{version}'\n")
    file.chmod(0o755)
    return file


def binaries(tmp_path: Path, **environ: str) -> Binaries:
    values = {"PATH": "/nonexistent", "KERF_CLUSTER_DOWNLOAD": "0", **environ}
    return Binaries(tmp_path / "cache", environ=values)


def test_kubebuilder_assets_come_first(tmp_path):
    wanted = program(tmp_path / "assets", "kubelet", KUBERNETES_VERSION)
    program(tmp_path / "path", "kubelet", KUBERNETES_VERSION)
    found = binaries(
        tmp_path, KUBEBUILDER_ASSETS=str(wanted.parent), PATH=str(tmp_path / "path")
    ).path("kubelet")
    assert found == wanted


def test_path_is_used_when_its_version_fits(tmp_path):
    wanted = program(tmp_path / "path", "kubelet", "1.34.0")
    assert binaries(tmp_path, PATH=str(wanted.parent)).path("kubelet") == wanted


@pytest.mark.parametrize("version", ["1.33.9", "1.35.0", "2.34.4", "not a number"])
def test_a_version_that_does_not_fit_is_passed_over_with_a_word(tmp_path, capsys, version):
    program(tmp_path / "path", "kubelet", version)
    release = tmp_path / "cache/bin" / f"kubernetes-v{KUBERNETES_VERSION}-release-{architecture()}"
    cached = program(release, "kubelet", KUBERNETES_VERSION)
    assert binaries(tmp_path, PATH=str(tmp_path / "path")).path("kubelet") == cached
    assert "does not fit: not used" in capsys.readouterr().err


def test_a_program_that_cannot_run_is_passed_over(tmp_path):
    broken = program(tmp_path / "path", "kubelet", "1.34.0")
    broken.write_bytes(b"\x7fELF not a program")
    tool = TOOLS["kubelet"]
    assert binaries(tmp_path, PATH=str(broken.parent)).installed(tool) is None


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(ClusterError, match=r"'kubeadm' is not in the version table.*kube-proxy"):
        binaries(tmp_path).path("kubeadm")


def test_without_network_and_go_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(gobuild, "go_version", lambda: None)
    with pytest.raises(PrerequisiteError, match=r"no Go to build it with.*KUBEBUILDER_ASSETS"):
        binaries(tmp_path).path("kubelet")


class Releases(BaseHTTPRequestHandler):
    """A release server: ``/good`` and ``/bad`` differ in the checksum they publish."""

    content = b"#!/bin/sh\necho v1.34.4\n"

    def do_GET(self) -> None:
        if self.path.endswith(".sha256"):
            right = hashlib.sha256(self.content).hexdigest()
            body = (right if "good" in self.path else "0" * 64).encode()
        elif self.path.endswith("missing"):
            self.send_error(404)
            return
        else:
            body = self.content
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Releases) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


def released(url: str) -> Tool:
    return Tool(
        name="thing",
        group="kubernetes",
        package="example.com/thing",
        version_args=("--version",),
        accepts=lambda _: True,
        url=url,
        checksum_url=f"{url}.sha256",
    )


def test_a_download_with_the_right_digest_is_installed_executable(tmp_path, server):
    path = download.fetch(released(f"{server}/good"), tmp_path / "bin")
    assert path.read_bytes() == Releases.content
    assert path.stat().st_mode & 0o111


def test_a_download_with_a_wrong_digest_is_refused_and_leaves_nothing(tmp_path, server):
    with pytest.raises(BuildError, match=r"has sha256 [0-9a-f]{64}, expected 0{64}"):
        download.fetch(released(f"{server}/bad"), tmp_path / "bin")
    assert list(tmp_path.rglob("*thing*")) == []


def test_a_file_that_is_not_there_falls_through(tmp_path, server):
    with pytest.raises(download.Unreachable, match="404"):
        download.fetch(released(f"{server}/missing"), tmp_path / "bin")


def test_a_refused_connection_falls_through_and_is_remembered(tmp_path, server):
    tool = released("http://127.0.0.1:9/good")
    for _ in range(2):
        with pytest.raises(download.Unreachable, match=r"127\.0\.0\.1:9"):
            download.fetch(tool, tmp_path / "bin")
    assert list(download._unreachable) == ["127.0.0.1:9"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{'a' * 64}\n", "a" * 64),
        (f"{'a' * 64}  other.tgz\n{'b' * 64}  ./thing.tgz\n", "b" * 64),
        (f"{'A' * 64} *thing.tgz", "a" * 64),
    ],
)
def test_published_checksums_are_read_in_every_usual_form(text, expected):
    assert download.parse_digest(text, "thing.tgz") == expected


def test_checksums_without_the_file_are_an_error():
    with pytest.raises(BuildError, match=r"no sha256 for thing\.tgz"):
        download.parse_digest(f"{'a' * 64}  other.tgz", "thing.tgz")


@pytest.fixture
def broken_group(tmp_path, monkeypatch) -> Group:
    """A build group whose program does not compile."""
    sources = tmp_path / "go" / "broken"
    sources.mkdir(parents=True)
    (sources / "go.mod").write_text("module example.com/broken\n\ngo 1.24\n")
    (sources / "main.go").write_text("package main\n\nfunc main() { undefinedThing() }\n")
    monkeypatch.setattr(versions, "GO_SOURCES", tmp_path / "go")
    group = Group(name="broken", module="example.com/broken", version="v1", ldflags="", minutes=0)
    tool = Tool(
        name="broken",
        group="broken",
        package="example.com/broken",
        version_args=(),
        accepts=lambda _: True,
        url="",
        checksum_url="",
    )
    monkeypatch.setitem(GROUPS, "broken", group)
    monkeypatch.setitem(TOOLS, "broken", tool)
    return group


@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")
def test_a_failed_build_names_the_step_and_shows_the_end_of_its_log(tmp_path, broken_group):
    with pytest.raises(BuildError, match=r"step 'broken: compiling' failed") as caught:
        gobuild.build(tmp_path / "cache", broken_group)
    assert "undefined: undefinedThing" in str(caught.value)
    assert "build-broken.log" in str(caught.value)


@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")
def test_a_build_that_failed_can_be_repeated_and_is_kept_once_it_works(tmp_path, broken_group):
    cache = tmp_path / "cache"
    with pytest.raises(BuildError):
        gobuild.build(cache, broken_group)
    main = broken_group.sources / "main.go"
    main.write_text("package main\n\nfunc main() { println(1) }\n")

    folder = gobuild.build(cache, broken_group)
    first = (folder / "broken").stat().st_mtime_ns

    assert gobuild.build(cache, broken_group) == folder
    assert (folder / "broken").stat().st_mtime_ns == first
    assert [child.name for child in (cache / "bin").iterdir()] == [folder.name]


@pytest.mark.parametrize("group", GROUPS.values(), ids=lambda group: group.name)
def test_the_version_table_and_the_go_modules_agree(group):
    assert f"{group.module} {group.version}" in (group.sources / "go.mod").read_text()


def test_every_go_change_changes_the_folders_name(tmp_path, broken_group):
    before = gobuild.build_folder(tmp_path, broken_group, "go1.26.8")
    assert gobuild.build_folder(tmp_path, broken_group, "go1.26.9") != before
    (broken_group.sources / "go.sum").write_text("")
    assert gobuild.build_folder(tmp_path, broken_group, "go1.26.8") != before


@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")
def test_two_that_ask_at_once_build_once(tmp_path, broken_group, capsys):
    main = broken_group.sources / "main.go"
    main.write_text("package main\n\nfunc main() { println(1) }\n")
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: gobuild.build(tmp_path / "cache", broken_group), range(2)))
    assert len(folders) == 1
    assert capsys.readouterr().err.count("built broken") == 1
