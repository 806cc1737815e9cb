"""The curated packages export what they say, and the configuration imports no torch."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = [
    "kerf_runtime.cache",
    "kerf_runtime.config",
    "kerf_runtime.errors",
    "kerf_runtime.forward_context",
    "kerf_runtime.platforms",
    "kerf_runtime.reasons",
]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_exported_name_exists_and_the_list_is_sorted(name):
    module = importlib.import_module(name)
    missing = [item for item in module.__all__ if not hasattr(module, item)]
    assert missing == []
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_class_and_function_of_ours_that_a_module_defines_is_exported(name):
    module = importlib.import_module(name)
    defined = {
        item
        for item, value in vars(module).items()
        if not item.startswith("_") and getattr(value, "__module__", None) == name
    }
    assert defined <= set(module.__all__)


def test_the_configuration_the_cache_store_and_pure_decisions_import_no_torch():
    modules = [
        "kerf_runtime.cache",
        "kerf_runtime.compilation.counters",
        "kerf_runtime.config",
        "kerf_runtime.cudagraph.budget",
        "kerf_runtime.cudagraph.descriptor",
        "kerf_runtime.cudagraph.dispatcher",
        "kerf_runtime.cudagraph.size_plan",
        "kerf_runtime.cudagraph.sizes",
        "kerf_runtime.errors",
        "kerf_runtime.forward_context",
        "kerf_runtime.reasons",
    ]
    program = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "False"
