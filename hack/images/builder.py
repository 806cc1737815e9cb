"""Buildah, with a storage of its own below the cache folder and one log per build.

Builds run in chroot isolation: it needs no user namespaces and no cgroups, and the network inside
is the machine's.  The machine's certificate authorities are *not* inside; where a package index is
only reachable through a proxy with a private authority, ``ca_bundle`` mounts that file, and a pip
configuration that names it, for the length of the build.  Neither ends up in the image.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from hack.cluster.errors import BuildError, tail
from hack.cluster.host import require_programs
from hack.cluster.progress import Heartbeat, duration, say

__all__ = ["Builder"]

BUILD_DEADLINE_S = 3600.0
PULL_DEADLINE_S = 300.0
# Where pip and others look inside a Debian image.
CA_INSIDE = "/etc/ssl/certs/kerf-build-ca.crt"


class Builder:
    """Builds and exports images.

    Args:
        cache: the project's cache folder; images lie in ``<cache>/images``.
        ca_bundle: a PEM file that builds need to reach their package index, or None.
        index_url: a package index instead of pip's default, or None.
    """

    def __init__(
        self, cache: Path, *, ca_bundle: Path | None = None, index_url: str | None = None
    ) -> None:
        self.folder = cache / "images"
        self._logs = cache / "logs"
        self._ca_bundle = ca_bundle
        self._index_url = index_url

    @staticmethod
    def from_environ(cache: Path, environ: Mapping[str, str] = os.environ) -> Builder:
        """A builder that is told what the machine's own pip was told.

        ``KERF_BUILD_CA_BUNDLE`` or ``PIP_CERT`` name the certificate bundle, ``PIP_INDEX_URL`` the
        index; none of them is set on an ordinary machine.
        """
        bundle = environ.get("KERF_BUILD_CA_BUNDLE") or environ.get("PIP_CERT")
        return Builder(
            cache,
            ca_bundle=Path(bundle) if bundle else None,
            index_url=environ.get("PIP_INDEX_URL"),
        )

    def exists(self, tag: str) -> bool:
        """Whether an image of that tag was built."""
        result = self._buildah(["inspect", "--type", "image", "--format", "{{.FromImageID}}", tag])
        return result.returncode == 0

    def image_id(self, tag: str) -> str:
        """The image's id: the sha256 of its configuration, in hex."""
        return self._checked(["images", "--quiet", "--no-trunc", tag]).strip().split()[0]

    def build(
        self,
        tag: str,
        *,
        context: Path,
        dockerfile: Path,
        target: str | None = None,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        """Build one image; steps whose inputs did not change come from the layer cache.

        Raises:
            BuildError: the build failed; the message names the step and shows the log's end.
        """
        command = ["build", "--isolation=chroot", "--network=host", "--layers", "--format=oci"]
        command += [f"--file={dockerfile}", f"--tag={tag}", *self._network_options()]
        command += [f"--target={target}"] if target else []
        command += [f"--build-arg={key}={value}" for key, value in (arguments or {}).items()]
        self._logged(f"building image {tag}", [*command, str(context)], tag)

    def pull(self, reference: str) -> bool:
        """Fetch a base image from its registry; False when the registry cannot be reached."""
        result = self._buildah(
            ["pull", "--quiet", "--policy=missing", reference], deadline_s=PULL_DEADLINE_S
        )
        return result.returncode == 0

    def from_root(self, tag: str, archive: Path) -> None:
        """Make an image of one layer from a root file system in a tar archive."""
        container = self._checked(["from", "scratch"]).strip()
        try:
            self._checked(["add", "--quiet", container, str(archive), "/"])
            self._checked(["config", "--cmd", "/bin/bash", container])
            self._checked(["commit", "--quiet", "--format=oci", container, tag])
        finally:
            self._checked(["rm", container])

    def export(self, tag: str, layout: Path) -> None:
        """Write an image into an OCI layout folder, uncompressed; blobs that exist are kept.

        An uncompressed layer has the digest by which the builder's storage already knows it, so a
        layer that lies there is skipped without being read.  Buildah's own push always compresses
        for this kind of target, which takes minutes for gigabytes; skopeo can be told not to.
        """
        require_programs("skopeo")
        layout.parent.mkdir(parents=True, exist_ok=True)
        options = ["--quiet", "--insecure-policy", "--dest-oci-accept-uncompressed-layers"]
        result = subprocess.run(
            ["skopeo", "copy", *options, f"containers-storage:{tag}", f"oci:{layout}:{tag}"],
            env=self._environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_DEADLINE_S,
            check=False,
        )
        if result.returncode != 0:
            raise BuildError(f"exporting {tag} failed: {result.stderr.strip()}")

    def references(self, prefix: str) -> list[str]:
        """References that begin with ``prefix`` and were built here, the newest first."""
        images = json.loads(self._checked(["images", "--json"]) or "[]")
        images.sort(key=lambda image: str(image["createdatraw"]), reverse=True)
        names = [name for image in images for name in image.get("names") or []]
        return [name for name in names if name.startswith(prefix)]

    def clean_up(self) -> None:
        """Remove working containers, which failed or interrupted builds leave behind, mounted."""
        if self._checked(["containers", "--quiet"]).strip():
            self._checked(["rm", "--all"])

    def remove(self, *tags: str) -> None:
        """Remove images and what only they needed of the layer cache."""
        if tags:
            self._checked(["rmi", *tags])
            self._checked(["rmi", "--prune"])

    def _network_options(self) -> list[str]:
        if self._ca_bundle is None and self._index_url is None:
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = ["[global]"]
        options = []
        if self._ca_bundle is not None:
            lines.append(f"cert = {CA_INSIDE}")
            options.append(f"--volume={self._ca_bundle.resolve()}:{CA_INSIDE}:ro")
        if self._index_url is not None:
            lines.append(f"index-url = {self._index_url}")
        configuration = self.folder / "pip.conf"
        configuration.write_text("\n".join(lines) + "\n")
        return [*options, f"--volume={configuration}:/etc/pip.conf:ro"]

    def _environ(self) -> dict[str, str]:
        require_programs("buildah")
        self.folder.mkdir(parents=True, exist_ok=True)
        configuration = self.folder / "storage.conf"
        if not configuration.exists():
            configuration.write_text(
                "[storage]\n"
                'driver = "overlay"\n'
                f'graphroot = "{self.folder / "storage"}"\n'
                f'runroot = "{self.folder / "run"}"\n'
            )
        return {**os.environ, "CONTAINERS_STORAGE_CONF": str(configuration)}

    def _buildah(
        self, arguments: Sequence[str], deadline_s: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["buildah", *arguments],
            env=self._environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )

    def _checked(self, arguments: Sequence[str], deadline_s: float = 600.0) -> str:
        result = self._buildah(arguments, deadline_s)
        if result.returncode != 0:
            raise BuildError(f"'buildah {' '.join(arguments)}' failed: {result.stderr.strip()}")
        return result.stdout

    def _logged(self, name: str, arguments: Sequence[str], tag: str) -> None:
        """Run a build: all output to a log, and progress lines that name the current step."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"image-{tag.rpartition('/')[2].replace(':', '-')}.log"
        say(f"{name} (log: {log})")
        current = "starting"
        process = subprocess.Popen(
            ["buildah", *arguments],
            env=self._environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        watchdog = threading.Timer(BUILD_DEADLINE_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            with log.open("w") as file, Heartbeat(name) as heartbeat:
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    if line.startswith(("STEP", "[")):
                        current = line.strip()[:100]
                        heartbeat.text = f"{name}: {current}"
                code = process.wait()
        finally:
            watchdog.cancel()
            if process.poll() is None:
                process.terminate()
                process.wait()
        if code != 0:
            raise BuildError(
                f"{name} failed at '{current}'\n{tail(log, 25)}", hint=f"The whole log is {log}"
            )
        say(f"{name}: done in {duration(heartbeat.elapsed())}")


def free_gigabytes(folder: Path) -> float:
    """Free space where ``folder`` lies (or will lie), in units of 10^9 bytes."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 1e9
