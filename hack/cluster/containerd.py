"""containerd for one node: its configuration, its start, its clean-up, and image imports.

The content store lies in the cache folder and outlives the node, because importing the runtime
image takes minutes; sandboxes, sockets and mounts lie in the node's state folder.

An import brings only the layers that containerd lacks, and brings them by linking their files into
its content store.  A change of our code therefore costs the last layer and not five gigabytes.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hack.cluster.errors import ClusterError
from hack.cluster.host import cni_folder, run
from hack.cluster.instance import Instance
from hack.cluster.processes import Processes
from hack.cluster.progress import Heartbeat, duration, say
from hack.cluster.waiting import wait_until

__all__ = ["PAUSE_IMAGE", "Containerd"]

PAUSE_IMAGE = "localhost/kerf/pause:1"
READY_DEADLINE_S = 60.0
IMPORT_DEADLINE_S = 1800.0
# A sun_path holds 108 bytes, the final zero included.
LONGEST_SOCKET = 107

CONFIGURATION = """\
version = 2
root = "{root}"
state = "{state}/state"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing",
]

[grpc]
  address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{state}/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  stream_server_address = "127.0.0.1"
  netns_mounts_under_state_dir = true
  disable_apparmor = true
  # In a virtual machine or container root may lack CAP_SYS_RESOURCE; a negative oom_score_adj is
  # then refused and every sandbox fails with "can't get final child's PID from pipe".
  restrict_oom_score_adj = true

  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "{runc}"
        Root = "{state}/runc"

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{networks}"
"""


@dataclass(frozen=True)
class Containerd:
    """containerd of one node instance.

    Attributes:
        root: content store and snapshots; kept when the node goes.
        layout: the OCI layout folder that images are exported to and imported from.
        crictl: the path of crictl.
    """

    instance: Instance
    processes: Processes
    root: Path
    layout: Path
    crictl: Path

    def start(self, networks: Path) -> None:
        """Start containerd and wait until it answers."""
        socket, state = self.instance.containerd_socket, self.instance.containerd_socket.parent
        if len(str(socket)) > LONGEST_SOCKET:
            raise ClusterError(
                f"the socket's path has {len(str(socket))} bytes, more than {LONGEST_SOCKET}",
                where=str(socket),
                hint="Set KERF_CLUSTER_CACHE to a shorter folder",
            )
        state.mkdir(parents=True, exist_ok=True)
        self.root.mkdir(parents=True, exist_ok=True)
        configuration = state / "config.toml"
        configuration.write_text(
            CONFIGURATION.format(
                root=self.root,
                state=state,
                socket=socket,
                pause=PAUSE_IMAGE,
                runc=shutil.which("runc", path=f"{os.environ.get('PATH', '')}:/usr/sbin"),
                cni=cni_folder(),
                networks=networks,
            )
        )
        self.processes.start(
            "containerd", ["containerd", "--config", configuration, "--log-level", "warn"]
        )
        # The CRI service answers later than containerd itself: it loads its images first.
        wait_until(
            lambda: self._ctr("version").returncode == 0 and self._cri_answers(),
            what="containerd and its CRI service to answer",
            deadline_s=READY_DEADLINE_S,
            alive=lambda: self.processes.pid("containerd") is not None,
            log=self.processes.log("containerd"),
        )

    def remove_pods(self) -> int:
        """Stop and remove every sandbox, with its network; returns how many there were."""
        if self.processes.pid("containerd") is None:
            return 0
        command = self._crictl_command()
        pods = run(*command, "pods", "--quiet").split()
        if pods:
            # Force: stop without grace, CNI DEL, remove.
            run(*command, "--timeout", "60s", "rmp", "--force", *pods, deadline_s=300)
        return len(pods)

    def _crictl_command(self) -> list[str]:
        endpoint = f"unix://{self.instance.containerd_socket}"
        return [str(self.crictl), "--runtime-endpoint", endpoint, "--image-endpoint", endpoint]

    def _cri_answers(self) -> bool:
        command = [*self._crictl_command(), "pods", "--quiet"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def kill_left_over_shims(self) -> int:
        """Kill shims that outlived containerd; ours are known by our socket in their arguments."""
        killed = 0
        address = str(self.instance.containerd_socket).encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"containerd-shim" in arguments[0] and address in arguments:
                os.kill(int(entry.name), 9)
                killed += 1
        return killed

    def has_image(self, reference: str) -> bool:
        """Whether an image of that name was imported."""
        listed = self._ctr("images", "ls", "--quiet", f"name=={reference}").stdout
        return reference in listed.split()

    def forget_images(self, prefix: str, keep: Iterable[str]) -> list[str]:
        """Remove images whose name begins with ``prefix`` and is not in ``keep``.

        What only they needed goes from the image store and from the layout folder.
        """
        kept = set(keep)
        listed = self._checked("images", "ls", "--quiet").split()
        gone = [name for name in listed if name.startswith(prefix) and name not in kept]
        if gone:
            self._checked("images", "rm", *gone)
        prune_layout(self.layout, kept)
        return gone

    def import_archive(self, archive: Path) -> None:
        """Import a whole OCI archive (small images)."""
        with archive.open("rb") as file:
            result = subprocess.run(
                self._ctr_command("images", "import", "-"),
                stdin=file,
                capture_output=True,
                timeout=IMPORT_DEADLINE_S,
                check=False,
            )
        if result.returncode != 0:
            raise ClusterError(f"importing {archive} failed: {result.stderr.decode().strip()}")

    def import_layout(self, reference: str) -> int:
        """Import an image from the OCI layout folder, without the layers that are here already.

        Returns:
            the size of the layers that were new, in bytes.
        """
        descriptor = find_manifest(self.layout, reference)
        manifest, configuration, *layers = blobs_of(self.layout, descriptor)
        present = set(self._checked("content", "ls", "--quiet").split())
        new = [layer for layer in layers if layer.digest not in present]
        size = sum(layer.size for layer in new)
        say(f"importing {reference}: {size / 1e6:.1f} MB in {len(new)} of {len(layers)} layers")
        with Heartbeat(f"importing {reference}") as heartbeat:
            # Manifest and configuration always travel: the import reads the image's shape in them.
            travel = [manifest, configuration]
            travel += [layer for layer in new if not self._adopt(layer)]
            process = subprocess.Popen(
                self._ctr_command("images", "import", "-"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            assert process.stdin is not None
            try:
                write_archive(process.stdin, self.layout, reference, descriptor, travel)
            except BrokenPipeError:
                say("ctr closed its input early")
            # communicate() closes the pipe, which ends the archive, and waits for the unpacking.
            _, errors = process.communicate(timeout=IMPORT_DEADLINE_S)
        if process.returncode != 0:
            raise ClusterError(f"importing {reference} failed: {errors.decode().strip()}")
        say(f"imported {reference} in {duration(heartbeat.elapsed())}")
        return size

    def _adopt(self, blob: Blob) -> bool:
        """Let the content store and the layout share a layer's file; False where they cannot.

        A writer that announces the digest of a blob that lies in the store already is complete
        before the first byte: containerd only notes that this namespace has it too.  So the file
        is linked to its place first, and five gigabytes are neither copied nor kept twice.
        """
        store = self.root / "io.containerd.content.v1.content" / "blobs" / blob.path
        source = self.layout / "blobs" / blob.path
        store.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.hardlink_to(source)
        except FileExistsError:
            pass
        except OSError as error:
            say(f"the image store cannot share files with {self.layout}: {error}")
            return False
        expected = ["--expected-digest", blob.digest, "--expected-size", str(blob.size)]
        with source.open("rb") as content:
            result = subprocess.run(
                self._ctr_command("content", "ingest", *expected, f"kerf-{blob.digest}"),
                stdin=content,
                capture_output=True,
                text=True,
                timeout=IMPORT_DEADLINE_S,
                check=False,
            )
        if result.returncode != 0:
            raise ClusterError(f"adopting layer {blob.digest} failed: {result.stderr.strip()}")
        return True

    def _ctr_command(self, *arguments: str) -> list[str]:
        return ["ctr", "-a", str(self.instance.containerd_socket), "-n", "k8s.io", *arguments]

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._ctr_command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def _checked(self, *arguments: str) -> str:
        result = self._ctr(*arguments)
        if result.returncode != 0:
            raise ClusterError(f"'ctr {' '.join(arguments)}' failed: {result.stderr.strip()}")
        return result.stdout


@dataclass(frozen=True)
class Blob:
    """A file of an OCI layout."""

    digest: str
    size: int

    @property
    def path(self) -> Path:
        """Below the ``blobs`` folder."""
        return Path(self.digest.replace(":", "/"))


def find_manifest(layout: Path, reference: str) -> dict[str, Any]:
    """The descriptor of the image named ``reference`` in an OCI layout folder."""
    index = json.loads((layout / "index.json").read_text())
    for descriptor in reversed(index["manifests"]):
        if descriptor.get("annotations", {}).get("org.opencontainers.image.ref.name") == reference:
            return dict(descriptor)
    raise ClusterError(f"no image {reference} was exported", where=str(layout))


def blobs_of(layout: Path, descriptor: dict[str, Any]) -> list[Blob]:
    """The files of an image: manifest, configuration, layers from the base up."""
    file = layout / "blobs" / str(descriptor["digest"]).replace(":", "/")
    manifest = json.loads(file.read_text())
    parts = [descriptor, manifest["config"], *manifest["layers"]]
    return [Blob(part["digest"], part["size"]) for part in parts]


def prune_layout(layout: Path, keep: Iterable[str]) -> None:
    """Remove images that are not in ``keep`` from an OCI layout folder, with their own blobs."""
    file = layout / "index.json"
    if not file.exists():
        return
    kept = set(keep)
    index = json.loads(file.read_text())
    manifests = index["manifests"]
    names = [m.get("annotations", {}).get("org.opencontainers.image.ref.name") for m in manifests]
    index["manifests"] = [m for m, name in zip(manifests, names, strict=True) if name in kept]
    if len(index["manifests"]) == len(manifests):
        return
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(index))
    partial.replace(file)
    needed = {blob.path for m in index["manifests"] for blob in blobs_of(layout, m)}
    for blob in (layout / "blobs").glob("*/*"):
        if blob.relative_to(layout / "blobs") not in needed:
            blob.unlink()


def write_archive(
    out: IO[bytes],
    layout: Path,
    reference: str,
    descriptor: dict[str, Any],
    blobs: Iterable[Blob],
) -> None:
    """Write an OCI archive of one image with only the ``blobs`` named, to a stream."""
    names = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference,
    }
    index = {"schemaVersion": 2, "manifests": [{**descriptor, "annotations": names}]}
    headers = {"oci-layout": {"imageLayoutVersion": "1.0.0"}, "index.json": index}
    with tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20) as archive:
        for name, content in headers.items():
            encoded = json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(encoded)
            archive.addfile(member, io.BytesIO(encoded))
        for blob in blobs:
            path = Path("blobs") / blob.path
            archive.add(layout / path, arcname=str(path))
