"""Official release downloads, checked by sha256 before anything is run.

The digest is the one checked in with the version table where there is one; otherwise it is the
file that the project publishes beside its binary, fetched over https from the same host.  The
latter protects against a truncated or corrupted download, not against the host itself.

A host that cannot be reached is remembered for the life of the process: on a machine without
internet the first of many binaries costs a few seconds at most, and the others nothing.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from hack.cluster.errors import BuildError
from hack.cluster.progress import Ticker, say
from hack.cluster.versions import Tool, architecture

__all__ = ["Unreachable", "fetch"]

CONNECT_S = 3.0
READ_S = 30.0
_unreachable: dict[str, str] = {}


class Unreachable(Exception):  # noqa: N818 - a state of the network, not a failure of ours
    """The release cannot be had from here; the caller falls through to the next source."""


def fetch(tool: Tool, into: Path) -> Path:
    """Download one program to ``into/<name>`` and return its path.

    Raises:
        Unreachable: no connection, or the server has no such file.
        BuildError: something came and its digest is wrong.
    """
    arch = architecture()
    url = tool.url.format(arch=arch)
    host = urlsplit(url).netloc
    if host in _unreachable:
        raise Unreachable(_unreachable[host])
    into.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=into.parent, prefix=f".{tool.name}-")
    os.close(descriptor)
    partial = Path(name)
    try:
        with httpx.Client(
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S), follow_redirects=True
        ) as client:
            expected = _expected_digest(client, tool, arch)
            found = _download(client, url, partial)
        if found != expected:
            raise BuildError(
                f"the download of {tool.name} has sha256 {found}, expected {expected}",
                where=url,
                hint="Nothing was installed; try again, or build with Go (KERF_CLUSTER_DOWNLOAD=0)",
            )
        binary = _unpack(partial, tool.name, url)
        binary.chmod(0o755)
        into.mkdir(exist_ok=True)
        return binary.replace(into / tool.name)
    except httpx.TransportError as error:
        _unreachable[host] = f"{host}: {error or type(error).__name__}"
        raise Unreachable(_unreachable[host]) from error
    except httpx.HTTPStatusError as error:
        raise Unreachable(f"{error.request.url}: HTTP {error.response.status_code}") from error
    finally:
        partial.unlink(missing_ok=True)


def _expected_digest(client: httpx.Client, tool: Tool, arch: str) -> str:
    pinned = dict(tool.sha256).get(arch)
    if pinned:
        return pinned
    response = client.get(tool.checksum_url.format(arch=arch))
    response.raise_for_status()
    return parse_digest(response.text, Path(urlsplit(tool.url.format(arch=arch)).path).name)


def parse_digest(text: str, file_name: str) -> str:
    """Find the digest of ``file_name`` in a checksum file: bare, or ``digest  name`` lines.

    Raises:
        BuildError: the text names no digest for that file.
    """
    for line in text.splitlines():
        words = line.split()
        if not words or len(words[0]) != 64:
            continue
        if len(words) == 1 or Path(words[1].lstrip("*")).name == file_name:
            return words[0].lower()
    raise BuildError(f"the published checksums name no sha256 for {file_name}")


def _download(client: httpx.Client, url: str, target: Path) -> str:
    """Stream ``url`` to ``target``; returns the sha256 in hex."""
    digest = hashlib.sha256()
    ticker = Ticker(every=5)
    size = 0
    say(f"downloading {url}")
    with client.stream("GET", url) as response, target.open("wb") as file:
        response.raise_for_status()
        total = int(response.headers.get("content-length") or 0)
        for chunk in response.iter_bytes(1 << 20):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            of = f" of {total / 1e6:.0f}" if total else ""
            ticker.tick(f"downloading {Path(url).name}: {size / 1e6:.0f}{of} MB")
    return digest.hexdigest()


def _unpack(file: Path, name: str, url: str) -> Path:
    """The program itself: the file as it is, or the member of that name of a tar archive."""
    if not url.endswith((".tar.gz", ".tgz")):
        return file
    with tarfile.open(file) as archive:
        for member in archive:
            if member.isfile() and Path(member.name).name == name:
                source = archive.extractfile(member)
                if source is not None:
                    unpacked = file.with_suffix(".unpacked")
                    unpacked.write_bytes(source.read())
                    return unpacked
    raise BuildError(f"the archive holds no {name}", where=url)
