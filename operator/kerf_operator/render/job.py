"""The compile Job of a CompileCache.  Pure.

Exit codes of the runtime (``kerf_runtime.errors``) that another try cannot mend end the Job at once:
wrong configuration, unusable model, refused compilation.  A pod that the cluster took away is not a
failure at all.
"""

from __future__ import annotations

from typing import Any

from kerf_operator.api.cache import CompileCacheSpec
from kerf_operator.api.names import (
    COMPILE,
    JOB_SETTINGS,
    job_name,
    labels,
    owner_reference,
)
from kerf_operator.render.pod import (
    CACHE_MOUNT,
    container_security,
    environment,
    mounts,
    pod_security,
    resource_requirements,
    runtime_document,
    volumes,
)
from kerf_operator.render.weights import (
    download_container,
    model_mount,
    model_path,
    model_volume,
)
from kerf_runtime.config import ModelDeploymentSpec, digest
from kerf_runtime.errors import CompileError, ConfigError, ModelError

__all__ = ["render_job", "settings_digest"]

RESULT_FILE = "/dev/termination-log"
FINAL_EXIT_CODES = sorted(error.exit_code for error in (ConfigError, ModelError, CompileError))


def settings_digest(spec: CompileCacheSpec) -> str:
    """Digest of how the Job runs; a waiting Job with another digest is replaced."""
    return digest(spec.job.to_document())[:10]


def render_job(cache: dict[str, Any], spec: CompileCacheSpec, *, claim_uid: str) -> dict[str, Any]:
    """The Job of the current attempt.

    Args:
        cache: the CompileCache.
        spec: its parsed spec.
        claim_uid: identity of the claim, so that a replaced claim is filled again.

    Raises:
        pydantic.ValidationError: ``spec.document`` is not a valid part of a ModelDeployment's spec.
    """
    name = cache["metadata"]["name"]
    deployment = ModelDeploymentSpec.model_validate(spec.document)
    source = deployment.model.source
    metadata_labels = labels(COMPILE, cache=name)
    document = runtime_document(f"cache-{spec.key}", spec.document)
    download = download_container(
        source,
        spec.job.download,
        image=spec.image,
        pull_policy=spec.job.image_pull_policy,
        document=document,
        resources=spec.job.resources,
    )
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "volumes": volumes(
            model_volume(source, spec.job.download),
            cache_claim=spec.claim_name,
            cache_read_only=False,
        ),
        "containers": [
            {
                "name": "kerf",
                "image": spec.image,
                "imagePullPolicy": spec.job.image_pull_policy.value,
                "command": ["kerf"],
                "args": [
                    "compile",
                    "--model-path",
                    model_path(source),
                    "--cache-dir",
                    CACHE_MOUNT,
                    "--result-file",
                    RESULT_FILE,
                ],
                "env": environment(document=document, image=spec.image, cache_key=spec.key),
                "volumeMounts": mounts(model_mount(), cache=True, cache_read_only=False),
                "securityContext": container_security(),
                "terminationMessagePath": RESULT_FILE,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "resources": resource_requirements(spec.job.resources),
            }
        ],
    }
    if download:
        pod["initContainers"] = download
    if spec.job.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in spec.job.image_pull_secrets]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(name, claim_uid, spec.job.to_document(), spec.tokens),
            "namespace": cache["metadata"]["namespace"],
            "labels": metadata_labels,
            "annotations": {JOB_SETTINGS: settings_digest(spec)},
            "ownerReferences": [owner_reference(cache, controller=True)],
        },
        "spec": {
            "backoffLimit": spec.job.backoff_limit,
            "activeDeadlineSeconds": spec.job.active_deadline_seconds,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    *(
                        {
                            "action": "FailJob",
                            "onExitCodes": {
                                "containerName": container["name"],
                                "operator": "In",
                                "values": FINAL_EXIT_CODES,
                            },
                        }
                        for container in [*pod["containers"], *download]
                    ),
                ]
            },
            "template": {"metadata": {"labels": metadata_labels}, "spec": pod},
        },
    }
