"""Documents and specs for the tests of the configuration, as short as the tests want them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kerf_runtime.config import (
    API_VERSION,
    KIND,
    AttentionGraphSupport,
    DType,
    ModelDeploymentSpec,
    PlatformFacts,
)

MODEL = {"source": {"pvc": {"claimName": "models", "path": "model.gguf"}}}


def spec(**parts: Any) -> ModelDeploymentSpec:
    """A valid spec; ``parts`` are camelCase sections that replace the defaults."""
    return ModelDeploymentSpec.model_validate({"model": MODEL, **parts})


def document(spec_document: Any = None, **top: Any) -> dict[str, Any]:
    """A whole ModelDeployment as YAML would give it."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "demo"},
        "spec": {"model": MODEL} if spec_document is None else spec_document,
        **top,
    }


def platform(
    support: AttentionGraphSupport = AttentionGraphSupport.ALWAYS,
    default_dtype: DType = DType.FLOAT32,
) -> PlatformFacts:
    """A platform whose attention can be in full graphs as far as ``support`` says."""
    return PlatformFacts("cpu", "emulated", "some-attention", support, default_dtype)


_names = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
_sources = st.one_of(
    st.builds(lambda name: {"pvc": {"claimName": name}}, _names),
    st.builds(lambda name, path: {"pvc": {"claimName": name, "path": path}}, _names, _names),
    st.builds(lambda name: {"oci": {"reference": f"registry/{name}"}}, _names),
)


def _section(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def without_options_of_eager(compilation: dict[str, Any]) -> dict[str, Any]:
    """The eager back end has no options."""
    if compilation.get("backend") == "eager":
        return {name: value for name, value in compilation.items() if name != "inductorConfig"}
    return compilation


code_factors = st.fixed_dictionaries(
    {
        "source": st.sampled_from(
            [
                {"pvc": {"claimName": "models"}},
                {"pvc": {"claimName": "models", "path": "a"}},
                {"oci": {"reference": "registry/models"}},
                {"huggingFace": {"repo": "models"}},
                {"huggingFace": {"repo": "models", "revision": "main"}},
                {"huggingFace": {"repo": "models", "revision": "v2"}},
                {"s3": {"bucket": "models"}},
                {"s3": {"bucket": "models", "endpoint": "http://minio:9000"}},
            ]
        ),
        "dtype": st.sampled_from([dtype.value for dtype in DType]),
        "quantization": st.sampled_from([None, "fp8"]),
        "compilation": _section(
            level=st.sampled_from([0, 1, 2, 3, 3, 3]),
            backend=st.sampled_from(["inductor", "inductor", "eager"]),
            customOps=st.sampled_from(
                [[], ["none"], ["all"], ["none", "+rms_norm"], ["+rms_norm"]]
            ),
            compileSizes=st.sampled_from([[], [1], [8, 1, 8], [1, 8], [1024]]),
            passes=_section(
                noopElimination=st.booleans(),
                normQuantFusion=st.booleans(),
                attentionQuantFusion=st.booleans(),
            ),
            splittingOps=st.sampled_from([[], ["kerf::attention"], ["aten::mm", "aten::add"]]),
            inductorConfig=st.dictionaries(
                st.sampled_from(["max_autotune", "cpp.simdlen"]),
                st.sampled_from([True, False, 0, 1, 1.0, "1"]),
                max_size=2,
            ),
        ).map(without_options_of_eager),
    }
)
"""Everything in a spec that generated code depends on, from few values, so that equal ones are drawn."""

other_settings = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(0, 1000),
        "drainSeconds": st.integers(0, 3600),
        "suspend": st.booleans(),
        "probes": _section(startupTimeoutSeconds=st.integers(30, 86400)),
        "service": _section(port=st.integers(1, 65535), type=st.just("NodePort")),
        "cache": _section(verification=st.sampled_from(["Checksum", "None"])),
        "compile": _section(policy=st.sampled_from(["Auto", "Require"]), token=st.just("again")),
        "resources": st.just({"limits": {"memory": "8Gi"}}),
        "imagePullPolicy": st.sampled_from(["Always", "Never"]),
        "imagePullSecrets": st.lists(_names, max_size=2),
        "deletionPolicy": st.sampled_from(["Delete", "Retain"]),
        "engine": _section(
            maxModelLen=st.integers(2, 4096),
            maxNumSeqs=st.integers(1, 64),
            maxNumBatchedTokens=st.integers(1024, 4096),
            blockSize=st.integers(1, 256),
            kvCacheMemory=st.sampled_from(["512Mi", "2Gi"]),
            maxQueueLen=st.integers(1, 1000),
            prefixCaching=st.booleans(),
        ),
        "compilation": _section(
            cudagraphMode=st.sampled_from(["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY"]),
            captureSizes=st.lists(st.integers(1, 64), min_size=1, max_size=4),
            cudagraphCopyInputs=st.booleans(),
            graphMemoryBudget=st.sampled_from(["64Mi", "1Gi"]),
            strict=st.booleans(),
        ),
        "servedName": _names,
    },
)
"""Everything in a spec that generated code does not depend on."""


def build(code: dict[str, Any], other: dict[str, Any]) -> ModelDeploymentSpec:
    """The spec with the given ``code_factors`` and ``other_settings``."""
    other = dict(other)
    served = {"servedName": other.pop("servedName")} if "servedName" in other else {}
    limit = {"maxNumBatchedTokens": 1024}
    loaded = {key: code[key] for key in ("dtype", "quantization") if code[key] is not None}
    engine = {**limit, **other.pop("engine", {}), **loaded}
    compilation = {**other.pop("compilation", {}), **code["compilation"]}
    return ModelDeploymentSpec.model_validate(
        {
            "model": {"source": code["source"], **served},
            "engine": engine,
            "compilation": compilation,
            **other,
        }
    )
