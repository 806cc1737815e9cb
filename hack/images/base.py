"""The base image: the Dockerfile's default where its registry answers, else one of our own.

The own one is a minimal Debian with Python, made by mmdebstrap from the Debian mirror.  Debian's
Python is used as it is: an interpreter copied from elsewhere has its library path compiled in.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

from hack.cluster.errors import BuildError, tail
from hack.cluster.host import require_programs
from hack.cluster.progress import say, step
from hack.images.builder import Builder

__all__ = ["base_image"]

SUITE = "bookworm"
PACKAGES = "ca-certificates,python3,python3-venv"
EXCLUDED = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*")
DEADLINE_S = 1200.0


def base_image(builder: Builder, dockerfile: Path) -> str:
    """The reference of a base image that is present in the builder's storage.

    ``KERF_BASE_IMAGE`` names one and then must be reachable.

    Raises:
        BuildError: the named one cannot be pulled, or our own cannot be made.
    """
    named = os.environ.get("KERF_BASE_IMAGE")
    if named:
        if builder.exists(named) or builder.pull(named):
            return named
        raise BuildError(f"the base image {named} cannot be pulled", where="KERF_BASE_IMAGE")
    own = f"localhost/kerf/base:{SUITE}-{_digest()}"
    if builder.exists(own):
        return own
    default = _default_of(dockerfile)
    if builder.exists(default) or builder.pull(default):
        return default
    say(f"{default} cannot be pulled from here: making a Debian base image instead")
    _make(builder, own)
    return own


def _make(builder: Builder, tag: str) -> None:
    require_programs("mmdebstrap")
    archive = builder.folder / f"base-{SUITE}-{_digest()}.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    log = archive.with_suffix(".log")
    command = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}"]
    command += [f"--dpkgopt=path-exclude={path}" for path in EXCLUDED]
    with step(f"Debian {SUITE} root file system (log: {log})"), log.open("w") as file:
        result = subprocess.run(
            [*command, SUITE, str(archive)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        )
    if result.returncode != 0:
        raise BuildError(f"mmdebstrap failed\n{tail(log)}", hint="KERF_BASE_IMAGE names another")
    with step(f"image {tag}"):
        builder.from_root(tag, archive)
    archive.unlink()


def _digest() -> str:
    return hashlib.sha256("\0".join((SUITE, PACKAGES, *EXCLUDED)).encode()).hexdigest()[:8]


def _default_of(dockerfile: Path) -> str:
    match = re.search(r"^ARG BASE_IMAGE=(\S+)", dockerfile.read_text(), re.MULTILINE)
    if match is None:
        raise BuildError("no default for BASE_IMAGE", where=str(dockerfile))
    return match.group(1)
