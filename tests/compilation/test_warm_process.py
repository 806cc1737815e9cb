"""A warm start in another process: nothing of the compiler is even imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.cache.helpers import snapshot
from tests.compilation.helpers import run
from tests.compilation.shared import DEEP

PROGRAM = """
import json, os, sys
from pathlib import Path
from tests.compilation.helpers import open_cache, prepare, run
from tests.compilation.models import llama
from kerf_runtime.compilation.counters import compilation_counter

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
session = open_cache(Path(sys.argv[1]), sys.argv[2], read_only=True)
prepared = prepare(llama(30), session, digest=sys.argv[2])
output = run(prepared.forward, 9)
heavy = ("torch._dynamo", "torch._inductor", "kerf_runtime.compilation.compiler", "sympy", "triton")
print(json.dumps({
    "user": os.geteuid(),
    "reason": session.verdict.reason,
    "counters": compilation_counter.snapshot(),
    "imported": [name for name in heavy if name in sys.modules],
    "pieces": prepared.report()["pieces"],
    "output": output.double().sum(0).tolist(),
}))
"""


@pytest.fixture(scope="module")
def moved(cold):
    """A copy of the cache elsewhere, that nobody can write and everybody can read."""
    with TemporaryDirectory(prefix="kerf-moved-") as folder:
        root = shutil.copytree(cold.root, Path(folder) / "elsewhere")
        Path(folder).chmod(0o755)
        for path in [root, *root.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield root


@pytest.fixture(scope="module")
def warm(moved, request):
    """What a fresh process reports that starts from there, and the folder before and after."""
    before = snapshot(moved)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(moved), DEEP],
        env={**os.environ, "HOME": "/nonexistent", "PYTHONPATH": str(request.config.rootpath)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), before, snapshot(moved)


def test_a_moved_read_only_cache_hits_for_another_user(warm):
    report, _, _ = warm
    assert report["reason"] == "Hit"
    assert report["pieces"] == 61
    if os.geteuid() == 0:
        assert report["user"] == 65534


def test_it_traces_nothing_and_compiles_nothing(warm):
    counters = warm[0]["counters"]
    assert {name: counters[name] for name in counters if counters[name]} == {"artifacts_loaded": 3}


def test_it_imports_neither_dynamo_nor_inductor(warm):
    assert warm[0]["imported"] == []


def test_it_writes_nothing(warm):
    _, before, after = warm
    assert after == before


def test_it_computes_what_the_process_computes_that_compiled(warm, cold):
    expected = run(cold.prepared.forward, 9).double().sum(0).tolist()
    assert warm[0]["output"] == pytest.approx(expected, rel=1e-6)
