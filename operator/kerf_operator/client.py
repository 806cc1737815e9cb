"""The one place that talks to the API server: plain dictionaries over the official client's connection.

The official client brings authentication (in-cluster token, kubeconfig with its plugins) and connection
pooling; its typed models would only be converted back to dictionaries, so requests go out as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

from kerf_operator.api.names import CACHE_KIND, GROUP, VERSION
from kerf_operator.errors import ApiError, ClusterError
from kerf_runtime.config import KIND

__all__ = ["KINDS", "Client", "Connection", "Kind", "connect"]

JsonObject = dict[str, Any]
_load_in_cluster: Callable[..., None] = kubernetes_config.load_incluster_config
_load_kubeconfig: Callable[..., None] = kubernetes_config.load_kube_config
TIMEOUT = urllib3.Timeout(connect=5, read=30)
Observer = Callable[[str, int], None]
"""Told about every request: verb and status code (0 when no answer came)."""


@dataclass(frozen=True)
class Kind:
    """How a kind is addressed."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """``group/version``, or the version alone for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path of the API group."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"


KINDS: Mapping[str, Kind] = {
    KIND: Kind(GROUP, VERSION, "modeldeployments"),
    CACHE_KIND: Kind(GROUP, VERSION, "compilecaches"),
    "Deployment": Kind("apps", "v1", "deployments"),
    "Job": Kind("batch", "v1", "jobs"),
    "Pod": Kind("", "v1", "pods"),
    "Service": Kind("", "v1", "services"),
    "Event": Kind("", "v1", "events"),
    "PersistentVolumeClaim": Kind("", "v1", "persistentvolumeclaims"),
    "HorizontalPodAutoscaler": Kind("autoscaling", "v2", "horizontalpodautoscalers"),
    "StorageClass": Kind("storage.k8s.io", "v1", "storageclasses", namespaced=False),
}


@dataclass(frozen=True)
class Connection:
    """Where the API server is and how to authenticate, as the official client read it."""

    configuration: Any

    @property
    def server(self) -> str:
        return str(self.configuration.host)

    def bearer(self) -> str | None:
        """The current bearer token with its scheme; read anew, because tokens rotate."""
        setting = self.configuration.auth_settings().get("BearerToken")
        return None if setting is None or not setting["value"] else str(setting["value"])


def connect(kubeconfig: Path | None = None, context: str | None = None) -> Connection:
    """The connection inside a pod, else from a kubeconfig.

    Args:
        kubeconfig: file to use; None for the pod's service account, then ``$KUBECONFIG`` or
            ``~/.kube/config``.
        context: context of the kubeconfig; None for its current one.

    Raises:
        ClusterError: neither is there, or the file cannot be used.
    """
    configuration = kubernetes_client.Configuration()
    error_type = kubernetes_config.ConfigException
    try:
        if kubeconfig is None and context is None:
            try:
                _load_in_cluster(client_configuration=configuration)
                return Connection(configuration)
            except error_type:
                pass  # not inside a pod: the kubeconfig decides, and its error is the one to show
        _load_kubeconfig(
            config_file=None if kubeconfig is None else str(kubeconfig),
            context=context,
            client_configuration=configuration,
        )
    except (error_type, OSError, ValueError) as error:
        raise ClusterError(
            f"no usable connection to a cluster: {error}",
            where=str(kubeconfig) if kubeconfig else "in-cluster and kubeconfig",
            hint="Run inside a pod, or pass --kubeconfig or set KUBECONFIG",
        ) from None
    return Connection(configuration)


class Client:
    """Requests as dictionaries.  Safe to use from several threads."""

    def __init__(
        self, connection: Connection, *, observer: Observer | None = None, pool_size: int = 8
    ) -> None:
        connection.configuration.connection_pool_maxsize = pool_size
        self._connection = connection
        self._api = kubernetes_client.ApiClient(connection.configuration)
        self._observer = observer

    def get(self, kind: str, name: str, *, namespace: str | None = None) -> JsonObject | None:
        """The object, or None when there is none of that name."""
        try:
            return self._request("GET", _path(kind, namespace, name))
        except ApiError as error:
            if error.not_found:
                return None
            raise

    def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[JsonObject]:
        """Every object of ``kind`` with the given labels and fields."""
        query = {}
        if labels:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in labels.items())
        if fields:
            query["fieldSelector"] = ",".join(f"{key}={value}" for key, value in fields.items())
        items = self._request("GET", _path(kind, namespace), query=query).get("items") or []
        described = {"apiVersion": KINDS[kind].api_version, "kind": kind}
        return [described | item for item in items]

    def create(self, manifest: JsonObject) -> JsonObject:
        """Create an object.

        Raises:
            ApiError: ``already_exists`` when the name is taken.
        """
        path = _path(manifest["kind"], manifest["metadata"].get("namespace"))
        return self._request("POST", path, body=manifest)

    def apply(
        self, manifest: JsonObject, *, manager: str, subresource: str | None = None
    ) -> JsonObject:
        """Server-side apply: ``manager`` owns exactly the fields of ``manifest``, by force."""
        metadata = manifest["metadata"]
        path = _path(manifest["kind"], metadata.get("namespace"), metadata["name"], subresource)
        return self._request(
            "PATCH",
            path,
            query={"fieldManager": manager, "force": "true"},
            body=manifest,
            content_type="application/apply-patch+yaml",
        )

    def delete(self, kind: str, name: str, *, namespace: str, uid: str) -> None:
        """Delete exactly the object with ``uid``; one that is gone already is no error."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            self._request("DELETE", _path(kind, namespace, name), body=body)
        except ApiError as error:
            if not error.not_found:
                raise

    def served(self, group: str, version: str) -> set[str]:
        """Plural names that the API server serves in a group; empty when it knows no such group."""
        try:
            found = self._request("GET", f"/apis/{group}/{version}")
        except ApiError as error:
            if error.not_found:
                return set()
            raise
        return {str(resource["name"]) for resource in found.get("resources") or []}

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = "application/json",
    ) -> JsonObject:
        url = self._connection.server.rstrip("/") + path
        if query:
            url += "?" + urlencode(query)
        headers = {"Accept": "application/json", "User-Agent": "kerf-operator"}
        bearer = self._connection.bearer()
        if bearer is not None:
            headers["Authorization"] = bearer
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = json.dumps(body).encode()
        verb = {"GET": "get", "POST": "create", "PATCH": "apply", "DELETE": "delete"}[method]
        try:
            response = self._api.rest_client.pool_manager.request(
                method, url, headers=headers, body=data, timeout=TIMEOUT, retries=False
            )
        except urllib3.exceptions.HTTPError as error:
            self._note(verb, 0)
            raise ApiError(
                verb=verb, target=path, code=0, reason="Unreachable", message=str(error)
            ) from None
        self._note(verb, response.status)
        document = _parse(response.data)
        if response.status >= 400:
            raise ApiError(
                verb=verb,
                target=path,
                code=response.status,
                reason=str(document.get("reason", "")),
                message=str(document.get("message", response.data[:500])),
            )
        return document

    def _note(self, verb: str, code: int) -> None:
        if self._observer is not None:
            self._observer(verb, code)


def _path(
    kind: str, namespace: str | None, name: str | None = None, subresource: str | None = None
) -> str:
    entry = KINDS[kind]
    parts = [entry.root]
    if entry.namespaced and namespace is not None:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(entry.plural)
    if name is not None:
        parts.append(quote(name, safe=""))
    if subresource is not None:
        parts.append(subresource)
    return "/".join(parts)


def _parse(data: bytes) -> JsonObject:
    try:
        document = json.loads(data) if data else {}
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
