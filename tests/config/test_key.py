"""The cache key: changed by what generated code depends on, and by nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.config.builders import (
    MODEL,
    build,
    code_factors,
    other_settings,
    platform,
    spec,
    without_options_of_eager,
)

from kerf_runtime.config import (
    PASS_VERSIONS,
    DType,
    ModelDeploymentSpec,
    PassConfig,
    cache_key,
    compile_document,
    declared_factors,
    digest,
    needs_compile_cache,
    pass_uuids,
    resolve,
)

IMAGE = "registry/kerf-runtime@sha256:0123"


def key(wanted, image=IMAGE, **more):
    return cache_key(declared_factors(wanted, image=image, **more))


BASE = spec()


@pytest.mark.parametrize(
    "parts",
    [
        {"replicas": 7},
        {"replicas": None, "autoscaling": {"maxReplicas": 3}},
        {"compilation": {"captureSizes": [1, 2, 3]}},
        {"compilation": {"cudagraphMode": "NONE"}},
        {"compilation": {"strict": True}},
        {"engine": {"prefixCaching": False}},
        {"compilation": {"splittingOps": ["kerf::attention"]}},
        {"compilation": {"inductorConfig": {}}},
        {"compilation": {"backend": "inductor", "customOps": [], "compileSizes": []}},
        {"compilation": {"customOps": ["none"]}},
        {"compilation": {"customOps": ["-rms_norm"]}},
        {"compilation": {"passes": {"noopElimination": True, "normQuantFusion": False}}},
        # Attention is split out, so the pass is off and generates nothing.
        {"compilation": {"passes": {"attentionQuantFusion": True}}},
        {"compilation": {"cudagraphCopyInputs": True}},
        {"compilation": {"graphMemoryBudget": "1Gi"}},
        {"engine": {"maxModelLen": 100, "maxNumSeqs": 3, "blockSize": 32, "kvCacheMemory": "2Gi"}},
        {"service": {"port": 8080}},
        {"probes": {"startupTimeoutSeconds": 60}},
        {"resources": {"limits": {"cpu": 4}}},
        {"drainSeconds": 1},
        {"suspend": True},
        {"compile": {"policy": "Require", "token": "again", "job": {"backoffLimit": 0}}},
        {"cache": {"verification": "None", "volume": {"existingClaim": "shared"}}},
        {"imagePullPolicy": "Always", "imagePullSecrets": ["secret"]},
        {"deletionPolicy": "Retain"},
        {"model": {**MODEL, "servedName": "other"}},
    ],
    ids=lambda parts: ",".join(parts),
)
def test_the_key_is_unchanged_by(parts):
    assert key(spec(**parts)) == key(BASE)


@pytest.mark.parametrize(
    "parts",
    [
        {"engine": {"dtype": "bfloat16"}},
        {"engine": {"quantization": "fp8"}},
        {"compilation": {"level": 0}},
        {"compilation": {"backend": "eager"}},
        {"compilation": {"customOps": ["all"]}},
        {"compilation": {"customOps": ["+rms_norm"]}},
        {"compilation": {"compileSizes": [1]}},
        {"compilation": {"compileSizes": ["cudagraph_capture_sizes"]}},
        {"compilation": {"passes": {"noopElimination": False}}},
        {"compilation": {"passes": {"normQuantFusion": True}}},
        {"compilation": {"passes": {"activationQuantFusion": True}}},
        {"compilation": {"splittingOps": []}},
        {"compilation": {"splittingOps": ["kerf::attention", "aten::mm"]}},
        {"compilation": {"inductorConfig": {"max_autotune": True}}},
        {"model": {"source": {"pvc": {"claimName": "models", "path": "other.gguf"}}}},
        {"model": {"source": {"pvc": {"claimName": "other", "path": "model.gguf"}}}},
        {"model": {"source": {"oci": {"reference": "registry/model:1"}}}},
        {"model": {"source": {"huggingFace": {"repo": "org/model"}}}},
        {"model": {"source": {"s3": {"bucket": "models"}}}},
    ],
    ids=str,
)
def test_the_key_is_changed_by(parts):
    assert key(spec(**parts)) != key(BASE)


HUB = {"repo": "org/model"}
BUCKET = {"bucket": "models", "prefix": "llama"}


@pytest.mark.parametrize(
    ("plain", "opened"),
    [
        (
            {"source": {"huggingFace": HUB}},
            {"source": {"huggingFace": {**HUB, "tokenSecretRef": {"name": "hub"}}}},
        ),
        (
            {"source": {"huggingFace": HUB}},
            {"source": {"huggingFace": HUB}, "volume": {"existingClaim": "weights"}},
        ),
        (
            {"source": {"s3": BUCKET}},
            {"source": {"s3": {**BUCKET, "credentialsSecretRef": {"name": "minio"}}}},
        ),
    ],
    ids=["token", "volume", "credentials"],
)
def test_secrets_and_the_place_of_a_download_are_no_part_of_the_model(plain, opened):
    with_secret, without = spec(model=opened), spec(model=plain)
    assert key(with_secret) == key(without)
    assert compile_document(with_secret) == compile_document(without)
    assert "Secret" not in json.dumps(compile_document(with_secret))


def test_the_default_revision_is_main_by_another_name():
    named = {"source": {"huggingFace": {**HUB, "revision": "main"}}}
    assert key(spec(model=named)) == key(spec(model={"source": {"huggingFace": HUB}}))


def test_a_download_folder_has_a_readable_name_of_its_own_for_every_source():
    sources = [
        {"huggingFace": HUB},
        {"huggingFace": {**HUB, "revision": "v2"}},
        {"huggingFace": {**HUB, "path": "small"}},
        {"s3": BUCKET},
        {"s3": {**BUCKET, "endpoint": "http://minio:9000"}},
    ]
    folders = [spec(model={"source": source}).model.source.download_folder for source in sources]
    assert len(set(folders)) == len(folders)
    assert folders[0].startswith("org-model-main-")
    assert folders[3].startswith("models-llama-")


def test_every_change_of_the_list_gives_a_key_of_its_own():
    changes = [
        {"level": 0},
        {"backend": "eager"},
        {"customOps": ["all"]},
        {"customOps": ["+rms_norm"]},
        {"compileSizes": [1]},
        {"compileSizes": [1, 8]},
        {"splittingOps": []},
        {"splittingOps": [], "passes": {"attentionQuantFusion": True}},
        {"passes": {"normQuantFusion": True}},
    ]
    keys = {key(spec(compilation=change)) for change in changes}
    assert len(keys) == len(changes)


STATIC = ["cudagraph_capture_sizes"]


def test_capture_sizes_are_in_the_key_only_where_each_is_compiled():
    plain = [spec(compilation={"captureSizes": sizes}) for sizes in ([1], [1, 2])]
    assert key(plain[0]) == key(plain[1]) == key(BASE)
    static = [
        spec(compilation={"captureSizes": sizes, "compileSizes": STATIC}) for sizes in ([1], [1, 2])
    ]
    assert key(static[0]) != key(static[1])
    assert declared_factors(static[1], image=IMAGE)["compileSizes"] == [1, 2]
    assert key(static[1]) == key(spec(compilation={"compileSizes": [2, 1]}))


def test_default_capture_sizes_that_are_compiled_bring_the_largest_batch_into_the_key():
    keys = {
        key(spec(engine={"maxNumSeqs": seqs}, compilation={"compileSizes": STATIC}))
        for seqs in (16, 24)
    }
    assert len(keys) == 2
    for mode in ("NONE", "FULL"):
        assert key(spec(compilation={"compileSizes": STATIC, "cudagraphMode": mode})) == key(
            spec(compilation={"compileSizes": STATIC})
        )


def test_what_has_nothing_to_work_on_is_not_in_the_key():
    def eager(**more):
        return spec(compilation={"backend": "eager", **more})

    assert key(eager(compileSizes=[1], passes={"normQuantFusion": True})) == key(eager())


def test_the_key_holds_the_uuid_of_every_pass_that_runs(monkeypatch):
    factors = declared_factors(BASE, image=IMAGE)
    assert factors["passes"] == pass_uuids(PassConfig())
    before = key(BASE)
    monkeypatch.setitem(PASS_VERSIONS, "norm_quant_fusion", 99)
    assert key(BASE) == before
    monkeypatch.setitem(PASS_VERSIONS, "fix_functionalization", 99)
    assert key(BASE) != before


def test_the_compile_document_holds_the_largest_static_size_within_a_step():
    wanted = spec(engine={"maxNumBatchedTokens": 2048}, compilation={"compileSizes": [2048, 1]})
    assert compile_document(wanted)["engine"]["maxNumBatchedTokens"] == 2048
    small = spec(engine={"maxNumBatchedTokens": 64}, compilation={"compileSizes": [1]})
    assert compile_document(small)["engine"]["maxNumBatchedTokens"] == 512


@given(code_factors, other_settings)
def test_the_key_says_what_resolution_puts_in_force(code, other):
    compilation = {**code["compilation"], "level": 3, "strict": False}
    wanted = build({**code, "compilation": compilation}, other)
    effective = resolve(wanted, platform=platform(), model_max_len=8192, model_dtype=DType.FLOAT32)
    factors = declared_factors(wanted, image=IMAGE)
    assert factors["customOps"] == list(effective.custom_ops)
    assert factors["compileSizes"] == list(effective.compile_sizes)
    assert factors["splittingOps"] == list(effective.splitting_ops)
    assert factors["backend"] == effective.backend
    assert factors["quantization"] == effective.quantization
    inductor = effective.backend == "inductor"
    assert factors["passes"] == (pass_uuids(effective.passes) if inductor else {})


def test_the_key_is_changed_by_the_image_and_by_the_digest_of_a_local_model():
    keys = [
        key(BASE),
        key(BASE, image="other"),
        key(BASE, model_config_digest="a"),
        key(BASE, model_config_digest="b"),
    ]
    assert len(set(keys)) == len(keys)


def test_a_local_model_is_its_configuration_wherever_the_document_says_it_is():
    other = spec(model={"source": {"oci": {"reference": "elsewhere"}}})
    assert key(BASE, model_config_digest="a") == key(other, model_config_digest="a")


@given(code_factors, other_settings, other_settings)
def test_settings_that_code_does_not_depend_on_change_neither_key_nor_compile_document(
    code, first, second
):
    a, b = build(code, first), build(code, second)
    assert key(a) == key(b)
    assert compile_document(a) == compile_document(b)


@given(st.data(), code_factors, code_factors, other_settings)
def test_compile_documents_are_equal_exactly_when_the_keys_are(data, first, other, settings):
    """``second`` differs from ``first`` in few fields, so that both cases occur."""
    changed = (
        data.draw(st.sets(st.sampled_from(sorted(other["compilation"])), max_size=2))
        if (other["compilation"])
        else set()
    )
    second = {
        **first,
        "compilation": without_options_of_eager(
            {**first["compilation"], **{name: other["compilation"][name] for name in changed}}
        ),
    }
    a, b = build(first, settings), build(second, settings)
    as_json = [json.dumps(compile_document(x), sort_keys=True) for x in (a, b)]
    assert (key(a) == key(b)) == (as_json[0] == as_json[1])


@given(code_factors, other_settings)
def test_the_compile_document_is_a_valid_spec_with_the_same_key(code, other):
    wanted = build(code, other)
    reduced = ModelDeploymentSpec.model_validate(compile_document(wanted))
    assert key(reduced) == key(wanted)


@given(st.dictionaries(st.text(), st.integers() | st.text(), max_size=6), st.randoms())
def test_the_digest_does_not_depend_on_the_order_of_fields(data, random):
    items = list(data.items())
    random.shuffle(items)
    assert digest(dict(items)) == digest(data)


def test_a_key_is_the_first_16_hex_digits_of_the_digest_of_the_factors():
    factors = declared_factors(BASE, image=IMAGE)
    assert key(BASE) == digest(factors)[:16]
    assert int(key(BASE), 16) >= 0


def test_nothing_of_the_machine_is_in_the_factors(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody-special")
    monkeypatch.setenv("HOSTNAME", "node-special")
    text = json.dumps(declared_factors(BASE, image=IMAGE))
    assert "special" not in text
    assert os.getcwd() not in text  # noqa: PTH109 - the text of the folder, not a path


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "/nonexistent", "USER": "other", "HOSTNAME": "elsewhere"},
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "2", "LANG": "C", "TZ": "Asia/Tokyo"},
    ],
)
def test_another_process_in_another_folder_and_environment_computes_the_same_key(
    environment, tmp_path
):
    program = (
        "import json, sys; from kerf_runtime.config import *; "
        "spec = ModelDeploymentSpec.model_validate(json.loads(sys.argv[1])); "
        "print(cache_key(declared_factors(spec, image=sys.argv[2])))"
    )
    wanted = spec(compilation={"inductorConfig": {"b": 1, "a": "x"}})
    found = subprocess.run(
        [sys.executable, "-c", program, json.dumps(wanted.to_document()), IMAGE],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.strip() == key(wanted)


@pytest.mark.parametrize(
    ("parts", "needed"),
    [
        ({}, True),
        ({"compilation": {"level": 0}}, False),
        ({"compilation": {"level": 1}}, False),
        ({"compilation": {"level": 2}}, False),
        ({"compilation": {"backend": "eager"}}, True),
        ({"engine": {"enforceEager": True}}, False),
    ],
)
def test_a_cache_is_needed_only_at_level_3(parts, needed):
    assert needs_compile_cache(spec(**parts)) is needed
