"""Small artifacts for the tests of the cache, and running something as another user."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kerf_runtime.cache import CacheSession, Manifest

DECLARED: dict[str, Any] = {"format": 1, "model": {"path": "a"}, "dtype": "float32"}
OBSERVED: dict[str, Any] = {
    "torch": "2.11.0",
    "platform": {"machine": "x86_64", "cpuCapability": "AVX2"},
    "sources": {"pkg.model": "aa", "pkg.layers": "bb"},
}
FILES = {
    "rank_0/graph/plan.json": b'{"steps": []}\n',
    "rank_0/graph/forward.py": b"def forward(x):\n    return x\n",
    "rank_0/pieces/0123/wrapper.py": b"def call(args):\n    return args\n",
    "rank_0/pieces/0123/kernel_0.so": bytes(range(256)),
}


def open_session(root: Path, **options: Any) -> CacheSession:
    """A session for the key of ``DECLARED``."""
    return CacheSession.open(root, DECLARED, **{"read_only": False, **options})


def write_files(folder: Path, files: dict[str, bytes] | None = None) -> None:
    """Write ``files`` (default: ``FILES``) below ``folder``."""
    for name, content in (FILES if files is None else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def publish(root: Path, files: dict[str, bytes] | None = None) -> Manifest:
    """Publish a small artifact under the key of ``DECLARED``."""
    session = open_session(root)
    assert session.store is not None
    with session.store.writer(session.key), session.staging() as staging:
        write_files(staging.path, files)
        return session.publish(
            staging,
            observed=OBSERVED,
            counters={"dynamo_traces": 1},
            timings={"trace": 0.5},
            gate={"passed": True},
        )


def snapshot(root: Path) -> dict[str, Any]:
    """Everything below ``root`` that a write would change."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in [root, *sorted(root.rglob("*"))]
    }


def as_another_user(function: Callable[[], Any]) -> Any:
    """The picklable result of ``function`` in a process of the user 65534; needs root."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(function(), pipe)
            code = 0
        except BaseException:  # noqa: BLE001 - the child must never return into pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the other user's process failed; see its output"
    return pickle.loads(data)
