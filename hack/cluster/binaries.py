"""Where each binary comes from, in order of preference.

    KUBEBUILDER_ASSETS      if the version fits
    PATH                    if the version fits
    the project's cache     a release downloaded or a build made earlier
    official release        checked by its sha256; a refused connection falls through in seconds
    go build                once, into the cache

Environment: ``KERF_CLUSTER_CACHE`` moves the cache folder (default ``~/.cache/kerf-cluster``),
``KERF_CLUSTER_DOWNLOAD=0`` skips the download.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hack.cluster import download, gobuild
from hack.cluster.errors import ClusterError
from hack.cluster.locks import file_lock
from hack.cluster.progress import say
from hack.cluster.versions import GROUPS, TOOLS, Group, Tool, architecture, parse_version

__all__ = ["Binaries", "cache_folder"]

VERSION_DEADLINE_S = 20.0
_said: set[str] = set()


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for binaries, images and the state of running clusters."""
    configured = environ.get("KERF_CLUSTER_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "kerf-cluster"


class Binaries:
    """Finds or makes the pinned programs; answers are remembered for the life of the object."""

    def __init__(
        self, cache: Path | None = None, *, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._environ = environ
        self.cache = cache or cache_folder(environ)
        self._found: dict[str, Path] = {}
        self._go: str | None = None

    def path(self, name: str) -> Path:
        """The path of one program, obtained now if it has to be.

        Raises:
            ClusterError: the name is not in the version table, or no source could supply it.
        """
        if name not in TOOLS:
            raise ClusterError(f"{name!r} is not in the version table", hint=", ".join(TOOLS))
        if name not in self._found:
            self._found[name] = self._resolve(TOOLS[name])
        return self._found[name]

    def ensure(self, *names: str) -> dict[str, Path]:
        """All of ``names``; called first, so that every long build happens before a start."""
        return {name: self.path(name) for name in names}

    def _resolve(self, tool: Tool) -> Path:
        return self.installed(tool) or self.cached(tool) or self._obtain(tool)

    def installed(self, tool: Tool) -> Path | None:
        """A fitting binary in KUBEBUILDER_ASSETS or on PATH."""
        assets = self._environ.get("KUBEBUILDER_ASSETS")
        if assets:
            candidate = Path(assets) / tool.name
            if candidate.is_file() and self._fits(tool, candidate, "KUBEBUILDER_ASSETS"):
                return candidate
        found = shutil.which(tool.name, path=self._environ.get("PATH", ""))
        if found and self._fits(tool, Path(found), "PATH"):
            return Path(found)
        return None

    def cached(self, tool: Tool) -> Path | None:
        """A binary that an earlier run downloaded or built."""
        group = GROUPS[tool.group]
        release = self._release_folder(group) / tool.name
        if release.is_file():
            return release
        go = self._go_version()
        if go is None:
            return None
        built = gobuild.build_folder(self.cache, group, go) / tool.name
        return built if built.is_file() else None

    def _obtain(self, tool: Tool) -> Path:
        group = GROUPS[tool.group]
        if self._environ.get("KERF_CLUSTER_DOWNLOAD", "1") != "0":
            lock = self.cache / "locks" / f"download-{tool.name}.lock"
            with file_lock(lock, purpose=f"downloading {tool.name}", deadline_s=900):
                release = self._release_folder(group)
                if (release / tool.name).is_file():
                    return release / tool.name
                try:
                    return download.fetch(tool, release)
                except download.Unreachable as reason:
                    say(f"{tool.name}: no official release from here ({reason})")
        return gobuild.build(self.cache, group) / tool.name

    def _release_folder(self, group: Group) -> Path:
        name = f"{group.name}-{group.version}-release-{architecture()}"
        return self.cache / "bin" / name

    def _go_version(self) -> str | None:
        if self._go is None:
            self._go = gobuild.go_version() or ""
        return self._go or None

    @staticmethod
    def _fits(tool: Tool, candidate: Path, where: str) -> bool:
        try:
            result = subprocess.run(
                [candidate, *tool.version_args],
                capture_output=True,
                text=True,
                timeout=VERSION_DEADLINE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"{tool.name} from {where} does not answer: {error}")
            return False
        version = parse_version(result.stdout or result.stderr)
        if version is None or not tool.accepts(version):
            shown = ".".join(map(str, version)) if version else "unknown"
            text = f"{tool.name} from {where} has version {shown}, which does not fit: not used"
            if text not in _said:
                _said.add(text)
                say(text)
            return False
        return True
