"""The CRDs in a real API server: what it refuses and how it says so, explain, columns, transitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hack.cluster import ClusterError, ControlPlane
from tests.operator.builders import spec_document
from tests.operator.standin import TestClient

from kerf_operator.errors import ApiError
from kerf_runtime.config import CUSTOM_OP_NAMES, parse_document
from kerf_runtime.errors import ConfigError

pytestmark = pytest.mark.control_plane

PVC = {"pvc": {"claimName": "models"}}
OCI = {"oci": {"reference": "registry.test/model:1"}}
HUB = {"huggingFace": {"repo": "org/model"}}
S3 = {"s3": {"bucket": "models", "prefix": "llama"}}


def mdep(name: str = "chat", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kerf.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec_document(**spec),
    }


REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (
        "an unknown mode",
        mdep(compilation={"cudagraphMode": "SOME"}),
        ("spec.compilation.cudagraphMode", "FULL_AND_PIECEWISE"),
    ),
    (
        "size 0",
        mdep(compilation={"captureSizes": [1, 0]}),
        ("spec.compilation.captureSizes[1]", "1"),
    ),
    ("no sizes", mdep(compilation={"captureSizes": []}), ("spec.compilation.captureSizes",)),
    ("too many sizes", mdep(compilation={"captureSizes": list(range(1, 300))}), ("captureSizes",)),
    (
        "two sources",
        mdep(model={"source": PVC | OCI}),
        ("spec.model.source", "exactly one of pvc, oci"),
    ),
    (
        "three sources",
        mdep(model={"source": OCI | HUB | S3}),
        ("spec.model.source", "exactly one of pvc, oci, huggingFace, s3"),
    ),
    (
        "a volume for downloads of a claim",
        mdep(model={"source": PVC, "volume": {"existingClaim": "weights"}}),
        ("spec.model", "it needs source huggingFace or s3"),
    ),
    (
        "a repository that is an address",
        mdep(model={"source": {"huggingFace": {"repo": "https://hub.test/org/model"}}}),
        ("spec.model.source.huggingFace.repo",),
    ),
    (
        "an endpoint without a scheme",
        mdep(model={"source": {"s3": {"bucket": "models", "endpoint": "minio:9000"}}}),
        ("spec.model.source.s3.endpoint",),
    ),
    ("no source", mdep(model={"source": {}}), ("spec.model.source", "exactly one of pvc, oci")),
    (
        "replicas with autoscaling",
        mdep(replicas=2, autoscaling={"maxReplicas": 3}),
        ("spec", "replicas, autoscaling"),
    ),
    (
        "an autoscaler upside down",
        mdep(autoscaling={"minReplicas": 4, "maxReplicas": 3}),
        ("spec.autoscaling", "minReplicas must not be above maxReplicas"),
    ),
    (
        "fewer tokens than sequences",
        mdep(engine={"maxNumSeqs": 64, "maxNumBatchedTokens": 32}),
        ("spec.engine", "maxNumBatchedTokens"),
    ),
    (
        "two cache volumes",
        mdep(cache={"volume": {"existingClaim": "a", "claimTemplate": {}}}),
        ("spec.cache.volume", "existingClaim, claimTemplate"),
    ),
    (
        "a level that does not exist",
        mdep(compilation={"level": 4}),
        ("spec.compilation.level", "3"),
    ),
    (
        "an unknown back end",
        mdep(compilation={"backend": "magic"}),
        ("spec.compilation.backend", "inductor", "eager"),
    ),
    (
        "an unknown custom operator",
        mdep(compilation={"customOps": ["none", "+rms_nrom"]}),
        ("spec.compilation.customOps[1]", "rms_norm"),
    ),
    (
        "all and no custom operators",
        mdep(compilation={"customOps": ["all", "none"]}),
        ("spec.compilation", "customOps: all and none contradict each other"),
    ),
    *(
        (
            f"{name} with and without",
            mdep(compilation={"customOps": [f"-{name}", "all", f"+{name}"]}),
            ("spec.compilation", f"customOps: +{name} and -{name} contradict each other"),
        )
        for name in CUSTOM_OP_NAMES
    ),
    (
        "static size 0",
        mdep(compilation={"compileSizes": [1, 0]}),
        ("spec.compilation.compileSizes[1]", "1"),
    ),
    (
        "a static size of no meaning",
        mdep(compilation={"compileSizes": ["all_sizes"]}),
        ("spec.compilation.compileSizes[0]", "cudagraph_capture_sizes"),
    ),
    (
        "a number as text",
        mdep(compilation={"compileSizes": ["8"]}),
        ("spec.compilation.compileSizes[0]", "cudagraph_capture_sizes"),
    ),
    (
        "a static size above every step",
        mdep(compilation={"compileSizes": [8, "cudagraph_capture_sizes", 600]}),
        ("spec", "compilation.compileSizes holds 600", "maxNumBatchedTokens 512"),
    ),
    (
        "a graph above every step",
        mdep(compilation={"captureSizes": [600, 8]}),
        ("spec", "compilation.captureSizes holds 600", "maxNumBatchedTokens 512"),
    ),
    (
        "a static compilation of a graph above every step",
        mdep(
            compilation={
                "cudagraphMode": "NONE",
                "captureSizes": [600],
                "compileSizes": ["cudagraph_capture_sizes"],
            }
        ),
        ("spec", "compilation.captureSizes holds 600", "maxNumBatchedTokens 512"),
    ),
    *(
        (
            f"{field} without tensor parallelism",
            mdep(compilation={"passes": {field: True}}),
            ("spec.compilation.passes", f"{field} needs tensor parallelism"),
        )
        for field in ("sequenceParallelism", "asyncTensorParallelism", "allReduceFusion")
    ),
    (
        "an unknown quantisation",
        mdep(engine={"quantization": "int4"}),
        ("spec.engine.quantization", "fp8"),
    ),
    ("an unknown dtype", mdep(engine={"dtype": "int4"}), ("spec.engine.dtype", "float32")),
    ("negative replicas", mdep(replicas=-1), ("spec.replicas",)),
    (
        "a path that leaves the volume",
        mdep(model={"source": {"pvc": {"claimName": "m", "path": "../etc"}}}),
        ("spec.model.source.pvc.path",),
    ),
    (
        "memory that is no quantity",
        mdep(engine={"kvCacheMemory": "plenty"}),
        ("spec.engine.kvCacheMemory",),
    ),
    (
        "a wrong access mode",
        mdep(cache={"volume": {"claimTemplate": {"accessModes": ["Sometimes"]}}}),
        ("accessModes[0]",),
    ),
    ("a port out of range", mdep(service={"port": 70000}), ("spec.service.port",)),
    ("no model", {**mdep(), "spec": {}}, ("spec.model",)),
    ("no spec", {k: v for k, v in mdep().items() if k != "spec"}, ("spec",)),
    ("a name that no Service can have", mdep(name="7b-chat"), ("metadata.name", "a letter first")),
    ("a name that is too long", mdep(name="a" * 60), ("metadata.name", "52")),
    ("text for a number", mdep(replicas="two"), ("spec.replicas",)),
]

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("the smallest", {**mdep(), "spec": {"model": {"source": PVC}}}),
    ("an OCI image", mdep(model={"source": OCI})),
    (
        "the hub",
        mdep(
            model={
                "source": {
                    "huggingFace": {
                        "repo": "org/model",
                        "path": "model.gguf",
                        "tokenSecretRef": {"name": "hub"},
                    }
                },
                "volume": {"existingClaim": "weights"},
            }
        ),
    ),
    (
        "a bucket",
        mdep(
            model={
                "source": {
                    "s3": {
                        "bucket": "models",
                        "prefix": "llama/",
                        "endpoint": "http://minio.storage:9000",
                        "region": "eu-west-1",
                        "credentialsSecretRef": {"name": "minio"},
                    }
                }
            }
        ),
    ),
    ("autoscaling without replicas", mdep(autoscaling={"maxReplicas": 3})),
    ("no pods", mdep(replicas=0)),
    *((f"level {level}", mdep(compilation={"level": level})) for level in (0, 1, 2)),
    ("the eager back end", mdep(compilation={"backend": "eager"})),
    ("custom operators", mdep(compilation={"customOps": ["none", "+rms_norm", "-quant_fp8"]})),
    ("the default custom operators", mdep(compilation={"customOps": []})),
    (
        "static sizes of both kinds",
        mdep(compilation={"compileSizes": [512, 1, "cudagraph_capture_sizes"]}),
    ),
    (
        "sizes that nothing captures",
        mdep(
            compilation={"cudagraphMode": "NONE", "captureSizes": [600], "compileSizes": [1]},
        ),
    ),
    (
        "sizes that an eager engine ignores",
        mdep(engine={"enforceEager": True}, compilation={"captureSizes": [600]}),
    ),
    (
        "fusions",
        mdep(
            compilation={
                "cudagraphCopyInputs": True,
                "passes": {
                    "noopElimination": False,
                    "normQuantFusion": True,
                    "activationQuantFusion": True,
                    "attentionQuantFusion": True,
                    "sequenceParallelism": False,
                },
            }
        ),
    ),
    ("FP8 weights", mdep(engine={"quantization": "fp8"})),
    ("no splitting ops", mdep(compilation={"splittingOps": []})),
    ("whole numbers as amounts", mdep(resources={"limits": {"cpu": 2, "memory": "4Gi"}})),
    ("an existing claim", mdep(cache={"volume": {"existingClaim": "shared"}})),
    (
        "options for Inductor",
        mdep(compilation={"inductorConfig": {"max_autotune": True, "threads": 4, "mode": "x"}}),
    ),
    (
        "exactly as many tokens as sequences",
        mdep(engine={"maxNumSeqs": 32, "maxNumBatchedTokens": 32}),
    ),
]


@pytest.mark.parametrize(
    ("document", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_bad_resources_are_refused_by_both_sides_and_the_field_is_named(
    api: TestClient, document: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ApiError) as refused:
        api.create(document)
    assert refused.value.code == 422
    for word in words:
        assert word in refused.value.message
    with pytest.raises(ConfigError):
        parse_document(document, where="test")


@pytest.mark.parametrize("document", [a[1] for a in ACCEPTED], ids=[a[0] for a in ACCEPTED])
def test_good_resources_are_accepted_by_both_sides_and_read_back_equal(
    api: TestClient, document: dict[str, Any]
) -> None:
    written = parse_document(document, where="test")
    try:
        stored = api.create(document)
        read = parse_document(stored, where="test")
    finally:
        api.delete_any("ModelDeployment", "chat", namespace="default")
    assert read == written, "defaults of the schema and of the models differ"


@pytest.mark.parametrize("name", ["hub", "s3"])
def test_pods_that_download_are_accepted(control_plane: ControlPlane, name: str) -> None:
    """The Job names its containers in its failure policy, which the API server compares."""
    golden = Path(__file__).parent / "golden" / f"{name}.yaml"
    for document in yaml.safe_load_all(golden.read_text()):
        if document["kind"] in ("Job", "Deployment"):
            document["metadata"]["namespace"] = "default"
            text = yaml.safe_dump(document)
            control_plane.kubectl(
                "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text
            )


def test_unknown_fields_are_refused_with_strict_validation(
    control_plane: ControlPlane, api: TestClient
) -> None:
    text = (
        "{apiVersion: kerf.dev/v1alpha1, kind: ModelDeployment, metadata: {name: chat},"
        " spec: {model: {source: {pvc: {claimName: m}}}, replica: 2}}"
    )
    with pytest.raises(ClusterError, match=r'unknown field "spec.replica"'):
        control_plane.kubectl("create", "--validate=strict", "-f", "-", stdin=text)


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        (
            {"accessModes": ["ReadWriteOnce"]},
            {"accessModes": ["ReadWriteMany"]},
            "accessModes is immutable",
        ),
        ({"storageClassName": "a"}, {"storageClassName": "b"}, "storageClassName is immutable"),
        ({"storage": "10Gi"}, {"storage": "9Gi"}, "storage can only grow"),
    ],
)
def test_what_a_claim_cannot_change_cannot_be_changed(
    api: TestClient, before: dict[str, Any], after: dict[str, Any], word: str
) -> None:
    api.create(mdep(cache={"volume": {"claimTemplate": before}}))
    try:
        with pytest.raises(ApiError, match=word):
            api.merge(
                "ModelDeployment",
                "chat",
                {"spec": {"cache": {"volume": {"claimTemplate": after}}}},
                namespace="default",
            )
    finally:
        api.delete_any("ModelDeployment", "chat", namespace="default")


def test_a_compile_cache_cannot_become_another_one(api: TestClient) -> None:
    cache = {
        "apiVersion": "kerf.dev/v1alpha1",
        "kind": "CompileCache",
        "metadata": {"name": "0123456789abcdef-11111", "namespace": "default"},
        "spec": {
            "key": "0123456789abcdef",
            "claimName": "c",
            "image": "i",
            "factors": {"a": 1},
            "document": {},
        },
    }
    wrong = {**cache, "metadata": {"name": "other", "namespace": "default"}}
    with pytest.raises(ApiError, match=r"metadata.name must start with spec.key"):
        api.create(wrong)
    api.create(cache)
    try:
        with pytest.raises(ApiError, match="immutable"):
            api.merge(
                "CompileCache",
                cache["metadata"]["name"],
                {"spec": {"claimName": "d"}},
                namespace="default",
            )
    finally:
        api.delete_any("CompileCache", cache["metadata"]["name"], namespace="default")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (
            "modeldeployment.spec.compilation.cudagraphMode",
            ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "Default", "status.graphs"),
        ),
        (
            "modeldeployment.spec.compilation.captureSizes",
            ("tokens", "Default", "never recompiles"),
        ),
        ("mdep.spec.compilation.level", ("torch.compile", "debugging", "cache", "Default 3")),
        ("mdep.spec.compilation.customOps", ("+name", "-name", "rms_norm", "Default")),
        ("mdep.spec.compilation.compileSizes", ("tokens", "cudagraph_capture_sizes", "Default")),
        ("mdep.spec.compilation.passes.allReduceFusion", ("tensor parallelism", "Default")),
        ("mdep.spec.engine.quantization", ("fp8", "Default")),
        ("mdep.spec.engine.maxModelLen", ("tokens", "Default")),
        ("mdep.status.graphs.memoryBytes", ("bytes",)),
        ("ccache.spec.key", ("16 hex digits",)),
    ],
)
def test_kubectl_explain_reads_well(
    control_plane: ControlPlane, api: TestClient, field: str, words: tuple[str, ...]
) -> None:
    text = " ".join(control_plane.kubectl("explain", field).split())
    for word in words:
        assert word in text


def test_columns_categories_and_short_names(control_plane: ControlPlane, api: TestClient) -> None:
    api.create(mdep())
    try:
        header = control_plane.kubectl("get", "mdep").splitlines()[0].split()
        assert header == ["NAME", "READY", "REASON", "MODEL", "MODE", "CACHE", "REPLICAS", "AGE"]
        assert "modeldeployment.kerf.dev/chat" in control_plane.kubectl("get", "kerf", "-o", "name")
    finally:
        api.delete_any("ModelDeployment", "chat", namespace="default")


def test_the_crds_fit_client_side_apply(control_plane: ControlPlane, api: TestClient) -> None:
    for name in ("modeldeployments.kerf.dev", "compilecaches.kerf.dev"):
        text = control_plane.kubectl("get", "crd", name, "-o", "json")
        assert "last-applied-configuration" in text
        conditions = control_plane.kubectl(
            "get",
            "crd",
            name,
            "-o",
            "jsonpath={.status.conditions[?(@.type=='NonStructuralSchema')].status}",
        )
        assert conditions == "", "the schema is not structural"
