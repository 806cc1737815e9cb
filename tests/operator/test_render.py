"""The builders of every kind: golden files, and what must hold for any spec.

After an intended change: ``KERF_UPDATE_GOLDEN=1 pytest tests/operator/test_render.py``, and read the diff.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import CLAIM_UID, IMAGE, resource, spec_document, spec_of, target_of

from kerf_operator.api.cache import CompileCacheSpec
from kerf_operator.preview import preview_objects
from kerf_operator.render import render_compile_cache, render_job
from kerf_runtime.config import ModelDeploymentDocument, parse_document
from kerf_runtime.errors import DownloadError, SourceError

GOLDEN = Path(__file__).parent / "golden"

CASES: dict[str, dict[str, Any]] = {
    "minimal": {},
    "level-0": {"compilation": {"level": 0, "cudagraphMode": "NONE"}, "replicas": 0},
    "hub": {
        "model": {
            "source": {
                "huggingFace": {
                    "repo": "org/model",
                    "revision": "v2",
                    "tokenSecretRef": {"name": "hub", "key": "HF_TOKEN"},
                }
            },
            "volume": {"existingClaim": "weights"},
        },
        "resources": {"limits": {"memory": "8Gi"}},
    },
    "s3": {
        "model": {
            "source": {
                "s3": {
                    "bucket": "models",
                    "prefix": "llama/model.gguf",
                    "endpoint": "http://minio.storage:9000",
                    "credentialsSecretRef": {"name": "minio"},
                }
            }
        },
        "compilation": {"level": 0, "cudagraphMode": "NONE"},
    },
    "everything": {
        "model": {
            "source": {"oci": {"reference": "registry.test/model:1", "path": "weights"}},
            "servedName": "org/chat",
        },
        "engine": {
            "dtype": "bfloat16",
            "quantization": "fp8",
            "maxModelLen": 4096,
            "maxNumSeqs": 32,
            "maxNumBatchedTokens": 2048,
        },
        "compilation": {
            "cudagraphMode": "FULL",
            "backend": "inductor",
            "customOps": ["+rms_norm"],
            "compileSizes": [1024, 8, 1],
            "passes": {"normQuantFusion": True, "attentionQuantFusion": True},
            "splittingOps": [],
            "inductorConfig": {"max_autotune": True},
        },
        "compile": {
            "policy": "Require",
            "token": "2",
            "job": {"backoffLimit": 1, "resources": {"limits": {"memory": "16Gi"}}},
        },
        "cache": {
            "volume": {
                "claimTemplate": {
                    "storage": "20Gi",
                    "storageClassName": "fast",
                    "accessModes": ["ReadWriteMany"],
                }
            }
        },
        "autoscaling": {"minReplicas": 2, "maxReplicas": 8},
        "resources": {"requests": {"cpu": 2}, "limits": {"memory": "8Gi"}},
        "service": {"port": 8080, "type": "NodePort"},
        "probes": {"startupTimeoutSeconds": 121},
        "drainSeconds": 60,
        "runtimeImage": "registry.test/other:2",
        "imagePullPolicy": "Always",
        "imagePullSecrets": ["pull"],
        "deletionPolicy": "Retain",
    },
}


def rendered(**changes: Any) -> list[dict[str, Any]]:
    document = ModelDeploymentDocument(name="chat", spec=spec_of(**changes))
    return preview_objects(document, namespace="team", runtime_image=IMAGE)


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_as_committed(name: str) -> None:
    found = json.loads(json.dumps(rendered(**CASES[name])))
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("KERF_UPDATE_GOLDEN") == "1":
        path.write_text(yaml.safe_dump_all(found, sort_keys=False, width=110))
    assert list(yaml.safe_load_all(path.read_text())) == found


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        obj["spec"]["template"]["spec"] for obj in objects if obj["kind"] in ("Job", "Deployment")
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_pod_meets_the_restricted_standard(name: str) -> None:
    for spec in pods(rendered(**CASES[name])):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        allowed = {"persistentVolumeClaim", "emptyDir", "image"}
        assert all(set(volume) - {"name"} <= allowed for volume in spec["volumes"])
        for container in spec["containers"] + spec.get("initContainers", []):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_serving_pods_mount_the_cache_read_only_and_the_job_may_write() -> None:
    job, serving = pods(rendered())
    for spec, read_only in ((job, None), (serving, True)):
        volume = next(v for v in spec["volumes"] if v["name"] == "cache")
        mount = next(m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "cache")
        assert volume["persistentVolumeClaim"].get("readOnly") is read_only
        assert mount.get("readOnly") is read_only
        model = next(m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "model")
        assert model["readOnly"] is True


def test_values_reach_the_container_as_arguments_and_environment_never_through_a_shell() -> None:
    for spec in pods(rendered()):
        container = spec["containers"][0]
        assert container["command"] == ["kerf"]
        assert all(isinstance(argument, str) for argument in container["args"])


@pytest.mark.parametrize("name", CASES)
def test_the_runtime_can_parse_the_document_that_pods_get(name: str) -> None:
    for spec in pods(rendered(**CASES[name])):
        env = {item["name"]: item["value"] for item in spec["containers"][0]["env"]}
        document = parse_document(json.loads(env["KERF_DEPLOYMENT"]), where="KERF_DEPLOYMENT")
        assert document.spec.replicas is None


@pytest.mark.parametrize("name", ["hub", "s3"])
def test_only_the_container_that_downloads_sees_credentials_and_writes_to_the_model(
    name: str,
) -> None:
    for spec in pods(rendered(**CASES[name])):
        download, kerf = spec["initContainers"][0], spec["containers"][0]
        assert any("secretKeyRef" in item.get("valueFrom", {}) for item in download["env"])
        assert not any("valueFrom" in item for item in kerf["env"])
        volume = next(v for v in spec["volumes"] if v["name"] == "model")
        assert "readOnly" not in volume.get("persistentVolumeClaim", {})
        for container, read_only in ((download, None), (kerf, True)):
            mount = next(m for m in container["volumeMounts"] if m["name"] == "model")
            assert mount.get("readOnly") is read_only


@pytest.mark.parametrize("name", ["hub", "s3"])
def test_the_runtime_looks_for_the_model_where_the_download_leaves_it(name: str) -> None:
    for spec in pods(rendered(**CASES[name])):
        download, kerf = spec["initContainers"][0], spec["containers"][0]
        env = {item["name"]: item.get("value") for item in download["env"]}
        source = parse_document(json.loads(env["KERF_DEPLOYMENT"]), where="x").spec.model.source
        root = download["args"][download["args"].index("--model-dir") + 1]
        path = kerf["args"][kerf["args"].index("--model-path") + 1]
        file = f"/{source.path}" if source.path else ""
        assert path == f"{root}/{source.download_folder}/current{file}"


def test_a_model_that_is_mounted_needs_no_init_container() -> None:
    assert not any("initContainers" in spec for spec in pods(rendered()))


def test_another_secret_or_claim_is_another_job_and_not_another_cache() -> None:
    def job_and_cache(**source: Any) -> tuple[str, str]:
        hub = {"huggingFace": {"repo": "org/model", **source}}
        objects = rendered(model={"source": hub})
        names = {obj["kind"]: obj["metadata"]["name"] for obj in objects}
        return names["Job"], names["CompileCache"]

    plain = job_and_cache()
    opened = job_and_cache(tokenSecretRef={"name": "hub"})
    assert opened[0] != plain[0]
    assert opened[1] == plain[1]


def test_a_stopping_pod_gets_longer_than_its_drain() -> None:
    spec = pods(rendered(drainSeconds=100))[1]
    assert (
        spec["terminationGracePeriodSeconds"]
        > 100 + spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    )


def test_the_startup_probe_allows_the_whole_startup_timeout() -> None:
    probe = pods(rendered(probes={"startupTimeoutSeconds": 901}))[1]["containers"][0][
        "startupProbe"
    ]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 901


REPLICAS = st.integers(0, 100)
SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=8)


@given(replicas=REPLICAS, sizes=SIZES)
def test_replicas_and_sizes_never_change_the_cache(replicas: int, sizes: list[int]) -> None:
    target = target_of(replicas=replicas, compilation={"captureSizes": sizes})
    assert target.cache_name == target_of().cache_name


@given(replicas=REPLICAS, port=st.integers(1, 65535), suspend=st.booleans())
def test_what_pods_do_not_see_does_not_roll_them(replicas: int, port: int, suspend: bool) -> None:
    target = target_of(replicas=replicas, service={"port": port}, suspend=suspend)
    assert target.revision == target_of().revision


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"dtype": "bfloat16"}},
        {"model": {"source": {"pvc": {"claimName": "other"}}}},
        {"compilation": {"splittingOps": []}},
        {"compilation": {"inductorConfig": {"max_autotune": True}}},
        {"runtimeImage": "registry.test/other:2"},
    ],
    ids=["dtype", "model", "splitting ops", "Inductor options", "image"],
)
def test_what_changes_generated_code_changes_the_key(changes: dict[str, Any]) -> None:
    assert target_of(**changes).key != target_of().key


def test_the_same_key_on_two_claims_is_two_caches() -> None:
    here, there = target_of(), target_of(cache={"volume": {"existingClaim": "shared"}})
    assert here.key == there.key
    assert here.cache_name != there.cache_name


def test_the_job_depends_on_the_key_and_not_on_who_asks() -> None:
    def job_of(name: str, **changes: Any) -> dict[str, Any]:
        shared = {"cache": {"volume": {"existingClaim": "shared"}}, **changes}
        cache = render_compile_cache(
            resource(name), spec_of(**shared), target_of(name, **shared), settings=True
        )
        cache["metadata"]["uid"] = "uid"
        return render_job(
            cache, CompileCacheSpec.model_validate(cache["spec"]), claim_uid=CLAIM_UID
        )

    assert job_of("one") == job_of("two", replicas=5, compilation={"captureSizes": [7]})


def test_errors_that_another_try_cannot_mend_end_the_job() -> None:
    job = next(obj for obj in rendered() if obj["kind"] == "Job")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert rules[1]["onExitCodes"]["values"] == [2, 3, 4]
    assert len(rules) == 2
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"


def test_a_source_that_refuses_ends_the_job_and_a_network_that_fails_does_not() -> None:
    job = next(obj for obj in rendered(**CASES["hub"]) if obj["kind"] == "Job")
    rule = job["spec"]["podFailurePolicy"]["rules"][2]["onExitCodes"]
    assert rule["containerName"] == job["spec"]["template"]["spec"]["initContainers"][0]["name"]
    assert SourceError.exit_code in rule["values"]
    assert DownloadError.exit_code not in rule["values"]


def test_an_autoscaled_deployment_is_rendered_without_replicas() -> None:
    objects = rendered(autoscaling={"maxReplicas": 3})
    deployment = next(obj for obj in objects if obj["kind"] == "Deployment")
    assert "replicas" not in deployment["spec"]
    assert spec_document()["compilation"]["captureSizes"] == [1, 2, 4]
