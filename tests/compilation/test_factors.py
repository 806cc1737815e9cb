"""Observed factors: contents and facts, never places."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from tests.compilation import models
from torch import nn

from kerf_runtime.compilation.factors import (
    observed_factors,
    parameter_fingerprint,
    source_digests,
)
from kerf_runtime.platforms import current_platform


@pytest.fixture
def package(tmp_path, monkeypatch):
    """``package(place, **files)``: a package ``kerf_factor_pkg`` below ``place``, found first."""

    def make(place, **files):
        folder = tmp_path / place / "kerf_factor_pkg"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder.parent))
        return folder

    return make


NAMES = ["kerf_factor_pkg", "kerf_factor_pkg.model"]


def test_digests_follow_the_contents_and_not_the_place(package):
    package("a", __init__="", model="x = 1")
    first = source_digests(NAMES)
    assert "missing" not in first.values()
    package("b", __init__="", model="x = 1")
    assert source_digests(NAMES) == first
    package("c", __init__="", model="x = 2")
    changed = source_digests(NAMES)
    assert changed["kerf_factor_pkg"] == first["kerf_factor_pkg"]
    assert changed["kerf_factor_pkg.model"] != first["kerf_factor_pkg.model"]


def test_a_package_without_init_file_is_found_too(package):
    package("a", model="x = 1")
    first = source_digests(NAMES)
    assert first["kerf_factor_pkg"] == "missing"
    assert first["kerf_factor_pkg.model"] != "missing"
    package("b", model="x = 2")
    assert source_digests(NAMES) != first


def test_a_digest_imports_nothing(package):
    package("a", __init__="raise RuntimeError('imported')", model="x = 1")
    source_digests(NAMES)
    assert "kerf_factor_pkg" not in sys.modules


@pytest.mark.parametrize(
    "name", ["no_such_package_at_all", "kerf_runtime.no_such_module", "sys", "os"]
)
def test_a_module_without_a_source_file_is_missing(name):
    assert source_digests([name]) == {name: "missing"}


def test_the_parameter_fingerprint_sees_names_shapes_strides_and_dtypes_but_no_values():
    def model(name="w", tensor=None):
        module = nn.Module()
        module.register_parameter(
            name, nn.Parameter(torch.zeros(2, 3) if tensor is None else tensor)
        )
        return parameter_fingerprint(module)

    base = model()
    assert model(tensor=torch.ones(2, 3)) == base
    others = [
        model(name="v"),
        model(tensor=torch.zeros(3, 2)),
        model(tensor=torch.zeros(3, 2).t()),
        model(tensor=torch.zeros(2, 3, dtype=torch.float64)),
    ]
    assert len({base, *others}) == 5


def test_buffers_count_as_well():
    module = models.WithBuffer()
    before = parameter_fingerprint(module)
    module.register_buffer("another", torch.zeros(1))
    assert parameter_fingerprint(module) != before


def observed(**changes):
    arguments = {
        "platform": current_platform(),
        "model_config_digest": "digest",
        "sources": ["tests.compilation.models"],
        "dtype": "float32",
        **changes,
    }
    return observed_factors(models.tiny(1).model, **arguments)


def test_observed_factors_are_plain_data_and_stable():
    found = observed()
    assert json.loads(json.dumps(found)) == found
    assert found == observed()
    assert found["torch"] == torch.__version__
    assert "missing" not in found["sources"].values()


def test_the_modules_that_give_an_artifact_its_meaning_are_always_among_the_sources():
    assert {"kerf_runtime.compilation.plan", "kerf_runtime.compilation.loader"} <= set(
        observed(sources=[])["sources"]
    )


def test_no_factor_is_a_place_or_a_name_of_this_machine(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere/special")
    text = json.dumps(observed())
    assert "special" not in text
    assert "/" not in text
