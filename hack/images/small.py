"""Images of one static program, written straight as OCI archives: no builder and no base.

The pause container and cluster DNS need nothing else, and the node can start without buildah.
Archives are deterministic, so an image that was imported once is recognised by its digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from hack.cluster.errors import BuildError
from hack.cluster.host import require_programs
from hack.cluster.versions import architecture

__all__ = ["pause_archive", "program_archive"]

COMPILE_DEADLINE_S = 60.0


def pause_archive(folder: Path, reference: str) -> Path:
    """Compile the pause program and write its image below ``folder``; returns the archive."""
    source = Path(__file__).with_name("pause.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    archive = folder / f"pause-{digest}.tar"
    if archive.is_file():
        return archive
    require_programs("gcc")
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"pause-{digest}"
    result = subprocess.run(
        ["gcc", "-Os", "-static", "-s", "-o", program, source],
        capture_output=True,
        text=True,
        timeout=COMPILE_DEADLINE_S,
        check=False,
    )
    if result.returncode != 0:
        raise BuildError(f"compiling {source.name} failed: {result.stderr.strip()}")
    return program_archive(archive, reference, program, ["/pause"], user="65535:65535")


def program_archive(
    archive: Path, reference: str, program: Path, command: Sequence[str], *, user: str
) -> Path:
    """Write the image of one program, which lies at ``command[0]`` inside."""
    layer = _layer(program, command[0])
    configuration = _encode(
        {
            "architecture": architecture(),
            "os": "linux",
            "config": {"User": user, "Entrypoint": list(command), "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _encode(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor(configuration, "application/vnd.oci.image.config.v1+json"),
            "layers": [_descriptor(layer, "application/vnd.oci.image.layer.v1.tar")],
        }
    )
    named = {
        **_descriptor(manifest, "application/vnd.oci.image.manifest.v1+json"),
        "annotations": {
            "io.containerd.image.name": reference,
            "org.opencontainers.image.ref.name": reference,
        },
    }
    members = {
        "oci-layout": _encode({"imageLayoutVersion": "1.0.0"}),
        "index.json": _encode({"schemaVersion": 2, "manifests": [named]}),
        **{
            f"blobs/{_digest(blob).replace(':', '/')}": blob
            for blob in (layer, configuration, manifest)
        },
    }
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return partial.replace(archive)


def _layer(program: Path, path: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        content = program.read_bytes()
        member = tarfile.TarInfo(path.lstrip("/"))
        member.size, member.mode = len(content), 0o755
        tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _encode(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(content: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}
