"""Test modules that share something expensive are given to one test process."""

from __future__ import annotations

from pathlib import Path

from tests.distribution import SHARED, scope_of

ROOT = Path(__file__).resolve().parent.parent


def test_modules_that_share_something_are_one_and_others_their_own() -> None:
    assert scope_of("tests/operator/test_chaos.py") == "control_plane"
    assert scope_of("tests/operator/test_process.py") == "control_plane"
    assert scope_of("tests/cudagraph/test_runner.py") == "deep_llama"
    assert scope_of("tests/engine/test_parity.py") == "tests/engine/test_parity.py"


def test_every_module_that_is_named_exists() -> None:
    missing = [name for names in SHARED.values() for name in names if not list(ROOT.glob(name))]
    assert missing == []
