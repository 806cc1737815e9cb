"""The shape of the repository itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "path", ["operator/__init__.py", "operator.py", "tests/operator/__init__.py"]
)
def test_nothing_shadows_the_standard_librarys_operator_module(path: str) -> None:
    assert not (ROOT / path).exists(), f"{path} would break every Python started in the checkout"


def test_the_standard_librarys_operator_module_is_found_from_the_root_of_the_checkout() -> None:
    code = "import operator; print(operator.add(1, 2))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "3\n"


def test_there_is_no_package_marker_below_tests() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_the_configuration_reference_is_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, "hack/configuration_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_every_relative_link_in_the_documentation_leads_somewhere() -> None:

    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_the_locks_hold_every_direct_dependency() -> None:

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("operator", "runtime", "dev"):
        lock = (ROOT / "requirements" / f"{extra}.lock").read_text()
        locked = {m.group(1).lower() for m in re.finditer(r"^([A-Za-z0-9_.-]+)==", lock, re.M)}
        wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
        for requirement in wanted:
            name = re.match(r"[A-Za-z0-9_.-]+", requirement)
            assert name is not None
            assert name.group(0).lower() in locked, f"{requirement} is not in {extra}.lock"
