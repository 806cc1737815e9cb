"""PyTorch's internals are in one place, and are all there in the versions that it names."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kerf_runtime.compilation
from kerf_runtime.compilation import internals

FOLDER = Path(kerf_runtime.compilation.__file__).parent
PRIVATE = ("torch._", "torch.fx.experimental", "torch.utils._")
OTHERS = ("torch.__", "torch._ops", "torch._check")
"""The version, the classes of operators, which annotations name, and assertions about sizes, which are documented."""


@pytest.mark.parametrize("name", sorted(internals._PLACES))
def test_every_name_is_where_it_is_said_to_be(name: str) -> None:
    assert getattr(internals, name) is not None


def test_what_compilations_import_can_be_imported() -> None:
    for name in internals.COMPILER_MODULES:
        importlib.import_module(name)


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        internals.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["StaticCudaLauncher", "current_raw_stream"])
def test_what_a_build_without_cuda_lacks_can_be_asked_for_with_a_default(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = internals._PLACES[name]
    monkeypatch.setitem(internals._PLACES, name, f"{place}_of_no_build")
    assert getattr(internals, name, None) is None
    with pytest.raises(AttributeError, match=r"torch 2\..* has no torch\._C:"):
        getattr(internals, name)


def private_names(source: str) -> Iterator[str]:
    """Every dotted name below PyTorch's private modules that a module imports or uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_no_other_module_of_the_compiler_reaches_into_them() -> None:
    found = [
        f"{path.relative_to(FOLDER)}: {name}"
        for path in sorted(FOLDER.rglob("*.py"))
        for name in private_names(path.read_text())
        if name.startswith(PRIVATE) and not name.startswith(OTHERS)
    ]
    assert found == []
