"""Building the pinned programs with Go, once, into the project's cache folder.

The folder's name is made from everything that decides the bytes: module version, ``go.mod`` and
``go.sum``, flags and the Go version.  A build goes into a staging folder that is renamed at the
end, so a folder that exists is complete; what an interrupted build had already compiled stays in
Go's own build cache, which is how the next attempt resumes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

from hack.cluster.errors import BuildError, PrerequisiteError, tail
from hack.cluster.locks import file_lock
from hack.cluster.progress import Heartbeat, Ticker, duration, say
from hack.cluster.versions import TOOLS, Group, Tool, architecture

__all__ = ["build", "build_folder", "go_version"]

# cgo would add minutes for the kubelet alone and bring nothing; -trimpath makes builds repeatable.
GO_FLAGS = ("-trimpath", "-buildvcs=false")
GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOOS": "linux", "GOTOOLCHAIN": "local", "GOWORK": "off"}
BUILD_DEADLINE_S = 3600.0


def go_version() -> str | None:
    """The version of the Go on PATH (``go1.26.8``), or None when there is none."""
    go = shutil.which("go")
    if go is None:
        return None
    result = subprocess.run(
        [go, "env", "GOVERSION"], capture_output=True, text=True, check=False, env=_environment()
    )
    return result.stdout.strip() or None


def build_folder(cache: Path, group: Group, go: str) -> Path:
    """Where the binaries of ``group`` lie once they were built with that Go version."""
    digest = hashlib.sha256()
    for part in (group.module, group.version, group.ldflags, *GO_FLAGS, go, architecture()):
        digest.update(part.encode() + b"\0")
    for file in sorted(group.sources.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return cache / "bin" / f"{group.name}-{group.version}-{digest.hexdigest()[:12]}"


def build(cache: Path, group: Group) -> Path:
    """Build every program of ``group``; returns the folder that holds them.

    Two processes that ask at once build once: the second waits for the first one's lock.

    Raises:
        PrerequisiteError: there is no Go on PATH.
        BuildError: a step failed; the message names the step and shows the end of its log.
    """
    go = go_version()
    if go is None:
        raise PrerequisiteError(
            f"{group.name} {group.version} is neither installed, cached nor downloadable, and"
            " there is no Go to build it with",
            hint="Install Go 1.24 or newer, or point KUBEBUILDER_ASSETS at ready binaries",
        )
    folder = build_folder(cache, group, go)
    lock = cache / "locks" / f"{folder.name}.lock"
    with file_lock(lock, purpose=f"building {group.name}", deadline_s=BUILD_DEADLINE_S):
        if folder.is_dir():
            return folder
        staging = folder.with_name(f".{folder.name}.staging")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        log = cache / "logs" / f"build-{group.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            _build_into(staging, group, log)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def _build_into(staging: Path, group: Group, log: Path) -> None:
    tools = [tool for tool in TOOLS.values() if tool.group == group.name]
    packages = [tool.package for tool in tools]
    ticker = Ticker()
    say(
        f"building {', '.join(tool.name for tool in tools)} {group.version} with Go"
        f" (about {group.minutes:.0f} min from an empty cache; log: {log})"
    )
    listing = _step(
        f"{group.name}: resolving and downloading Go modules",
        ["go", "list", "-deps", *packages],
        group,
        log,
        "w",
    )
    _step(
        f"{group.name}: compiling",
        [
            "go",
            "build",
            "-v",
            *GO_FLAGS,
            "-ldflags",
            group.ldflags,
            "-o",
            _output(staging, tools),
            *packages,
        ],
        group,
        log,
        "a",
        total=len(listing),
    )
    missing = [tool.name for tool in tools if not (staging / tool.name).is_file()]
    if missing:
        raise BuildError(f"{group.name}: the build ended without {', '.join(missing)}")
    say(f"built {group.name} in {duration(ticker.elapsed())}")


def _output(staging: Path, tools: list[Tool]) -> str:
    # With one package Go would name the file after the module's last element ("server").
    return f"{staging / tools[0].name}" if len(tools) == 1 else f"{staging}{os.sep}"


def _step(
    name: str,
    command: list[str],
    group: Group,
    log: Path,
    mode: str,
    total: int | None = None,
) -> list[str]:
    """Run one Go command: output to the log, progress by lines; returns stdout's lines."""
    lines: list[str] = []
    seen = 0
    with log.open(mode) as file, Heartbeat(name) as heartbeat:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command,
            cwd=group.sources,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        watchdog = threading.Timer(BUILD_DEADLINE_S, process.kill)
        watchdog.start()
        try:
            # "go build -v" prints the name of every package that it had to compile.
            for line in process.stderr:
                file.write(line)
                file.flush()
                seen += 1
                of = f" of at most {total}" if total else ""
                heartbeat.text = f"{name}: {seen}{of} packages"
            code = process.wait()
            reader.join()
        finally:
            watchdog.cancel()
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code != 0:
        raise BuildError(
            f"step '{name}' failed with exit code {code}\n{tail(log)}",
            hint=f"The whole log is {log}; what was compiled so far is kept for the next attempt",
        )
    return lines


def _environment() -> dict[str, str]:
    return {**os.environ, **GO_ENVIRONMENT}
