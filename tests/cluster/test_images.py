"""Small images, OCI layouts and image tags, without a builder and without containerd."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from hack.cluster import ClusterError
from hack.cluster.containerd import blobs_of, find_manifest, prune_layout, write_archive
from hack.images import project
from hack.images.builder import Builder
from hack.images.small import program_archive

REFERENCE = "localhost/kerf/thing:1"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    return program_archive(tmp_path / "a.tar", REFERENCE, program, ["/bin/thing"], user="1:1")


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


def test_a_small_image_runs_its_program_as_the_user_it_names(archive, tmp_path):
    layout = unpack(archive, tmp_path / "layout")
    _, configuration, layer = blobs_of(layout, find_manifest(layout, REFERENCE))
    values = json.loads((layout / "blobs" / configuration.path).read_text())
    assert values["config"]["User"] == "1:1"
    assert values["config"]["Entrypoint"] == ["/bin/thing"]
    assert values["rootfs"]["diff_ids"] == [layer.digest]
    with tarfile.open(layout / "blobs" / layer.path) as tar:
        member = tar.getmember("bin/thing")
        assert member.mode == 0o755


def test_the_same_program_gives_the_same_bytes(archive, tmp_path):
    again = program_archive(
        tmp_path / "b.tar", REFERENCE, tmp_path / "program", ["/bin/thing"], user="1:1"
    )
    assert again.read_bytes() == archive.read_bytes()


def test_an_archive_for_import_holds_the_named_blobs_and_no_other(archive, tmp_path):
    layout = unpack(archive, tmp_path / "layout")
    descriptor = find_manifest(layout, REFERENCE)
    manifest, configuration, _ = blobs_of(layout, descriptor)
    stream = io.BytesIO()
    write_archive(stream, layout, REFERENCE, descriptor, [manifest, configuration])
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        blobs = [f"blobs/{blob.path}" for blob in (manifest, configuration)]
        assert tar.getnames() == ["oci-layout", "index.json", *blobs]
        index = json.load(tar.extractfile("index.json"))
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == REFERENCE


def test_an_image_that_was_not_exported_is_named_in_the_error(archive, tmp_path):
    layout = unpack(archive, tmp_path / "layout")
    with pytest.raises(ClusterError, match="no image other:1 was exported"):
        find_manifest(layout, "other:1")


def test_pruning_a_layout_keeps_what_another_image_shares(archive, tmp_path):
    layout = unpack(archive, tmp_path / "layout")
    index = json.loads((layout / "index.json").read_text())
    first = index["manifests"][0]
    manifest, configuration, layer = blobs_of(layout, first)
    # A second image with a manifest of its own over the same layer.
    content = (layout / "blobs" / manifest.path).read_bytes() + b"\n"
    other = layout / "blobs" / "sha256" / "other"
    other.write_bytes(content)
    second = {
        **first,
        "digest": "sha256:other",
        "annotations": {"org.opencontainers.image.ref.name": "other:1"},
    }
    index["manifests"].append(second)
    (layout / "index.json").write_text(json.dumps(index))

    prune_layout(layout, ["other:1"])

    left = {file.name for file in (layout / "blobs" / "sha256").iterdir()}
    assert left == {"other", configuration.path.name, layer.path.name}
    prune_layout(layout, [])
    assert list((layout / "blobs" / "sha256").iterdir()) == []


def test_a_missing_layout_has_nothing_to_prune(tmp_path):
    prune_layout(tmp_path / "none", [])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_text(name)
    for name in (
        "requirements/build.lock",
        "requirements/operator.lock",
        "requirements/runtime.lock",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for name in ("operator/kerf_operator/a.py", "runtime/kerf_runtime/b.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "operator", "runtime"),
    [
        ("runtime/kerf_runtime/b.py", True, True),
        ("Dockerfile", True, True),
        ("requirements/runtime.lock", False, True),
        ("requirements/operator.lock", True, False),
        ("runtime/kerf_runtime/__pycache__/b.pyc", False, False),
        ("tests/test_b.py", False, False),
    ],
)
def test_a_tag_changes_exactly_with_what_goes_into_its_image(tree, changed, operator, runtime):
    before = [project._digest(tree, target, "base") for target in ("operator", "runtime")]
    file = tree / changed
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("y = 2\n")
    after = [project._digest(tree, target, "base") for target in ("operator", "runtime")]
    assert [a != b for a, b in zip(after, before, strict=True)] == [operator, runtime]


def test_another_base_image_gives_other_tags(tree):
    assert project._digest(tree, "operator", "a") != project._digest(tree, "operator", "b")


def test_builds_see_no_certificates_and_no_index_of_the_machine_by_default(tmp_path):
    assert Builder.from_environ(tmp_path, {})._network_options() == []


def test_a_named_certificate_bundle_is_mounted_for_the_build_only(tmp_path):
    bundle = tmp_path / "ca.crt"
    bundle.write_text("PEM")
    options = Builder.from_environ(tmp_path, {"KERF_BUILD_CA_BUNDLE": str(bundle)})
    mounted = options._network_options()
    assert mounted[0].startswith(f"--volume={bundle}:")
    assert mounted[0].endswith(":ro")
    assert "cert = " in (tmp_path / "images" / "pip.conf").read_text()
