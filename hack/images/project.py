"""The project's own images: which exist, what they are made from, and their tags.

A tag is a digest over everything that goes in: the Dockerfile, the lock file, our sources and the
base image.  The runtime's tag is a factor of the compile cache's key, as a real release's is.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.locks import file_lock
from hack.cluster.progress import say
from hack.images.base import base_image
from hack.images.builder import Builder, free_gigabytes

__all__ = ["Images", "build_images", "build_model_image"]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "operator", "runtime")
# torch and the CUDA libraries it is linked with: 5 GB, three times (build, archive, snapshot).
NEEDED_GB = 20.0
BUILD_LOCK_S = 3600.0
# Images of each kind that are kept, for going back and forth between two states of the code.
KEPT = 4


@dataclass(frozen=True)
class Images:
    """References of built images, as a pod names them."""

    operator: str
    runtime: str
    base: str


def build_images(builder: Builder, root: Path = ROOT) -> Images:
    """Build what is missing of both images.

    Raises:
        BuildError: a step failed.
    """
    lock = builder.folder / "build.lock"
    with file_lock(lock, purpose="building images", deadline_s=BUILD_LOCK_S):
        builder.clean_up()
        base = base_image(builder, root / "Dockerfile")
        identity = builder.image_id(base)
        tags = {
            target: f"localhost/kerf/{target}:{_digest(root, target, identity)}"
            for target in ("operator", "runtime")
        }
        for target, tag in tags.items():
            if builder.exists(tag):
                say(f"image {tag} is there")
                continue
            free = free_gigabytes(builder.folder)
            if target == "runtime" and free < NEEDED_GB:
                say(f"only {free:.0f} GB free: the runtime image may need {NEEDED_GB:.0f}")
            builder.build(
                tag,
                context=root,
                dockerfile=root / "Dockerfile",
                target=target,
                arguments={"BASE_IMAGE": base, "REVISION": _revision(root)},
            )
        for tag in tags.values():
            # Every change of code leaves a tag, and every change of a lock file gigabytes.
            builder.remove(*builder.references(f"{tag.rpartition(':')[0]}:")[KEPT:])
    return Images(operator=tags["operator"], runtime=tags["runtime"], base=base)


def build_model_image(builder: Builder, base: str, model: Path) -> str:
    """An image that carries one model file and can copy it into a volume; returns its reference.

    The demo's loader Job runs it: a cluster has no access to this machine's files, as it would be
    for a user.
    """
    digest = hashlib.sha256()
    with model.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    dockerfile = Path(__file__).with_name("demo-model.Dockerfile")
    digest.update(dockerfile.read_bytes() + builder.image_id(base).encode())
    tag = f"localhost/kerf/demo-model:{digest.hexdigest()[:12]}"
    if not builder.exists(tag):
        builder.build(
            tag,
            context=model.parent,
            dockerfile=dockerfile,
            arguments={"BASE_IMAGE": base, "MODEL": model.name},
        )
    return tag


def _digest(root: Path, target: str, base_identity: str) -> str:
    digest = hashlib.sha256(base_identity.encode())
    locks = ("requirements/build.lock", f"requirements/{target}.lock")
    for file in _files(root, ("Dockerfile", ".dockerignore", *locks, *SOURCES)):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _files(root: Path, names: Iterable[str]) -> list[Path]:
    found = []
    for name in names:
        path = root / name
        below = path.rglob("*") if path.is_dir() else [path]
        found += [f for f in below if f.is_file() and "__pycache__" not in f.parts]
    return sorted(found)


def _revision(root: Path) -> str:
    result = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"
