"""``kerf validate``."""

from __future__ import annotations

import pytest
from tests.server.tiny import MAX_LENGTH, write_tiny_checkpoint

from kerf_runtime.config import cache_key, declared_factors, load_document
from kerf_runtime.models import model_config_digest


def test_a_right_document_says_its_name_and_key(kerf, document):
    done = kerf("validate", "-f", document)
    key = cache_key(declared_factors(load_document(document).spec, image="local"))
    assert done.code == 0
    assert done.out.splitlines() == [
        "demo: valid",
        "served name  demo",
        f"cache key    {key} (in a cluster, for the image in KERF_IMAGE)",
    ]


def test_the_key_depends_on_the_image(kerf, document, monkeypatch):
    before = kerf("validate", "-f", document, "--json").json["cacheKey"]
    monkeypatch.setenv("KERF_IMAGE", "registry/kerf@sha256:1")
    assert kerf("validate", "-f", document, "--json").json["cacheKey"] != before


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_document_that_caches_nothing_has_no_key(kerf, document, level):
    done = kerf("validate", "-f", document, "--set", f"compilation.level={level}")
    assert "none (only level 3 is cached)" in done.out


def test_with_a_model_it_shows_what_will_be_in_force_and_why(kerf, document, tmp_path):
    model = write_tiny_checkpoint(tmp_path / "model")
    arguments = ("validate", "-f", document, "--model-path", model)
    shown = kerf(*arguments, "--json").json
    factors = declared_factors(
        load_document(document).spec, image="local", model_config_digest=model_config_digest(model)
    )
    assert shown["cacheKey"] == cache_key(factors)  # the one that `kerf run` uses here
    effective = shown["effective"]
    assert effective["max_model_len"] == MAX_LENGTH
    assert effective["dtype"] == "float32"
    text = kerf(*arguments, "--set", "compilation.level=0").out
    assert "changed      cudagraphMode FULL_AND_PIECEWISE -> FULL_DECODE_ONLY (LevelTooLow" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("splittingOps=[kerf::attentio]", "Did you mean kerf::attention"),
        ("inductorConfig.max_autotun=true", "Did you mean max_autotune"),
        ("inductorConfig.max_autotune=often", "takes a value of type bool"),
    ],
)
def test_with_a_model_it_refuses_what_the_compiler_would(kerf, document, tmp_path, change, message):
    model = write_tiny_checkpoint(tmp_path / "model")
    done = kerf("validate", "-f", document, "--model-path", model, "--set", f"compilation.{change}")
    assert done.code == 2
    assert message in done.err


def test_it_shows_what_is_compiled_how_and_what_may_not_do_what_is_hoped_for(
    kerf, document, tmp_path
):
    model = write_tiny_checkpoint(tmp_path / "model")
    done = kerf(
        *("validate", "-f", document, "--model-path", model),
        *("--set", "compilation.compileSizes=[8, 1]", "--set", "compilation.customOps=[+rms_norm]"),
        *("--set", "compilation.passes.normQuantFusion=true"),
        *("--set", "compilation.passes.noopElimination=false"),
        *("--set", "engine.quantization=fp8"),
    )
    lines = done.out.splitlines()
    for line in (
        "back end     inductor",
        "custom ops   rms_norm",
        "static sizes 1, 8",
        "passes       normQuantFusion",
        "dtype        float32, fp8 weights",
    ):
        assert line in lines
    assert "warning      passes.normQuantFusion (MissingDependency: " in done.out


def test_a_length_above_the_models_limit_is_refused_with_both_numbers(kerf, document, tmp_path):
    model = write_tiny_checkpoint(tmp_path / "model")
    done = kerf(
        *("validate", "-f", document, "--model-path", model, "--set", "engine.maxModelLen=999")
    )
    assert done.code == 2
    assert f"999 is above the model's own limit of {MAX_LENGTH}" in done.err
