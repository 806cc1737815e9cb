"""The model in a pod: its volume, its path, and the init container that downloads it.  Pure.

Weights of ``pvc`` and ``oci`` are mounted.  Those of ``huggingFace`` and ``s3`` are downloaded by
``kerf download`` before the runtime starts: once into the claim of ``model.volume``, where the Job and all
pods find them, or else into a temporary volume of each pod.  Only that container may write to the volume
and sees the credentials, which the kubelet takes from the Secret.
"""

from __future__ import annotations

from typing import Any

from kerf_operator.render.pod import container_security, environment, resource_requirements
from kerf_runtime.config.deployment import ImagePullPolicy, ResourceRequirements
from kerf_runtime.config.source import DownloadSettings, ModelSource

__all__ = ["DOWNLOAD", "download_container", "model_mount", "model_path", "model_volume"]

DOWNLOAD = "download"
"""Name of the init container."""
MODEL_MOUNT = "/model"
RESULT_FILE = "/dev/termination-log"


def model_path(source: ModelSource) -> str:
    """Path of the model inside the container."""
    folders = [MODEL_MOUNT]
    if source.is_downloaded:
        folders += [source.download_folder, "current"]
    return "/".join([*folders, source.path] if source.path else folders)


def model_mount(*, read_only: bool = True) -> dict[str, Any]:
    """Where the volume of the model is mounted."""
    mount: dict[str, Any] = {"name": "model", "mountPath": MODEL_MOUNT}
    if read_only:
        mount["readOnly"] = True
    return mount


def model_volume(source: ModelSource, settings: DownloadSettings | None) -> dict[str, Any]:
    """The volume of the model.

    Args:
        source: where the weights come from.
        settings: where a download is kept; None as for no settings.
    """
    if source.pvc is not None:
        claim: dict[str, Any] = {"claimName": source.pvc.claim_name, "readOnly": True}
        return {"name": "model", "persistentVolumeClaim": claim}
    if source.oci is not None:
        image = {"reference": source.oci.reference, "pullPolicy": "IfNotPresent"}
        return {"name": "model", "image": image}
    if settings is not None and settings.existing_claim is not None:
        return {
            "name": "model",
            "persistentVolumeClaim": {"claimName": settings.existing_claim},
        }
    return {"name": "model", "emptyDir": {}}


def download_container(
    source: ModelSource,
    settings: DownloadSettings | None,
    *,
    image: str,
    pull_policy: ImagePullPolicy,
    document: str,
    resources: ResourceRequirements | None,
) -> list[dict[str, Any]]:
    """The init containers: the one that downloads, or none for a source that is mounted.

    Args:
        source: where the weights come from.
        settings: what opens the source; None for nothing.
        image: the runtime image.
        pull_policy: when it is pulled.
        document: what ``kerf download`` reads.
        resources: those of the container that runs afterwards; a pod needs the larger of the two.
    """
    if not source.is_downloaded:
        return []
    return [
        {
            "name": DOWNLOAD,
            "image": image,
            "imagePullPolicy": pull_policy.value,
            "command": ["kerf"],
            "args": ["download", "--model-dir", MODEL_MOUNT, "--result-file", RESULT_FILE],
            "env": [
                *environment(document=document, image=image, cache_key=None),
                *_credentials(source, settings or DownloadSettings()),
            ],
            "volumeMounts": [
                model_mount(read_only=False),
                {"name": "tmp", "mountPath": "/tmp"},
            ],
            "securityContext": container_security(),
            "terminationMessagePath": RESULT_FILE,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": resource_requirements(resources),
        }
    ]


def _credentials(source: ModelSource, settings: DownloadSettings) -> list[dict[str, Any]]:
    """Environment variables of the source, their values taken from Secrets."""
    found: list[dict[str, Any]] = []
    if source.hugging_face is not None:
        found.append(
            {"name": "HF_HUB_OFFLINE", "value": "0"}
        )  # the image sets it for everything else
        token = settings.token_secret_ref
        if token is not None:
            found.append(_from_secret("HF_TOKEN", token.name, token.key))
    secret = settings.credentials_secret_ref
    if source.s3 is not None and secret is not None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            found.append(_from_secret(name, secret.name, name))
        session = "AWS_SESSION_TOKEN"
        found.append(_from_secret(session, secret.name, session, optional=True))
    return found


def _from_secret(variable: str, name: str, key: str, *, optional: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": name, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}
