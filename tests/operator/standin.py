"""Stand-ins for what a control plane alone does not have: a node, its kubelet, and volumes.

Only for tests.  The kubelet stand-in moves pods that the real scheduler has bound: compile pods run to
completion with a termination message, serving pods become Ready with a loopback address and really
answer ``GET /debug/graphs`` there, pods that are being deleted go.  What else should happen in a
namespace is said by its ``Behaviour``.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.patience import join

from kerf_operator.client import KINDS as OPERATOR_KINDS
from kerf_operator.client import Client, Connection, Kind
from kerf_operator.errors import ApiError
from kerf_operator.render.deployment import PORT

NODE = "stand-in"
KINDS = {
    "Node": Kind("", "v1", "nodes", namespaced=False),
    "Lease": Kind("coordination.k8s.io", "v1", "leases"),
    "PersistentVolume": Kind("", "v1", "persistentvolumes", namespaced=False),
    "Namespace": Kind("", "v1", "namespaces", namespaced=False),
    "ReplicaSet": Kind("apps", "v1", "replicasets"),
    "ResourceQuota": Kind("", "v1", "resourcequotas"),
    "ServiceAccount": Kind("", "v1", "serviceaccounts"),
}


class TestClient(Client):
    """The operator's client with the kinds that only tests touch."""

    __test__ = False

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        OPERATOR_KINDS.update(KINDS)  # type: ignore[attr-defined]

    def kill_pod(self, namespace: str, name: str) -> None:
        """What a kubelet does when a pod has ended after its deletion."""
        try:
            self._request(
                "DELETE",
                f"/api/v1/namespaces/{namespace}/pods/{name}",
                body={"gracePeriodSeconds": 0, "propagationPolicy": "Background"},
            )
        except ApiError as error:
            if not error.not_found:
                raise

    def delete_any(
        self, kind: str, name: str, *, namespace: str | None = None, foreground: bool = False
    ) -> None:
        """Delete by name, as kubectl does."""
        entry = OPERATOR_KINDS[kind]
        scope = f"/namespaces/{namespace}" if namespace else ""
        self._request(
            "DELETE",
            f"{entry.root}{scope}/{entry.plural}/{name}",
            body={"propagationPolicy": "Foreground" if foreground else "Background"},
        )

    def merge(
        self, kind: str, name: str, patch: dict[str, Any], *, namespace: str, subresource: str = ""
    ) -> dict[str, Any]:
        """A JSON merge patch, as ``kubectl patch --type merge`` sends it."""
        entry = OPERATOR_KINDS[kind]
        path = f"{entry.root}/namespaces/{namespace}/{entry.plural}/{name}"
        return self._request(
            "PATCH",
            f"{path}/{subresource}" if subresource else path,
            body=patch,
            content_type="application/merge-patch+json",
        )


@dataclass
class Behaviour:
    """What happens to the pods of one namespace.

    Attributes:
        hold_jobs: compile pods stay Running.
        job_exit: exit code of compile pods.
        job_message: termination message; None for a good result.
        job_reason: reason of the end, for example OOMKilled.
        download_exit: exit code of the container that downloads, in compile pods that have one.
        download_message: its termination message.
        image_error: message of an image that cannot be pulled, for every pod.
        hold_serving: serving pods run but do not become Ready.
        report: changes the report of a serving pod before it is sent.
    """

    hold_jobs: bool = False
    job_exit: int = 0
    job_message: str | None = None
    job_reason: str | None = None
    download_exit: int = 0
    download_message: str = ""
    image_error: str | None = None
    hold_serving: bool = False
    report: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda report: report)


class StandIn:
    """The node, its kubelet and its volumes, in one thread of the test process."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        self.behaviours: dict[str, Behaviour] = {}
        self.jobs_run: Counter[str] = Counter()
        self.steps = 0
        self._stop = threading.Event()
        self._servers: dict[str, tuple[str, ThreadingHTTPServer]] = {}
        self._octet = random.randrange(2, 250)
        self._next = 1
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="kubelet-stand-in", daemon=True)

    def start(self) -> None:
        """Make the node Ready and begin."""
        self._make_node()
        self._thread.start()

    def stop(self) -> None:
        """End, and show what went wrong in the thread."""
        self._stop.set()
        join(self._thread)
        for _, server in self._servers.values():
            server.shutdown()
            server.server_close()
        if self._errors:
            raise self._errors[0]

    def behaviour(self, namespace: str) -> Behaviour:
        """How pods of ``namespace`` behave; change it at will."""
        return self.behaviours.setdefault(namespace, Behaviour())

    # The node

    def _make_node(self) -> None:
        self.client.create(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {}}
        )
        resources = {"cpu": "512", "memory": "4Ti", "pods": "1000", "ephemeral-storage": "1Ti"}
        now = _now()
        self.client.apply(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": NODE},
                "status": {
                    "capacity": resources,
                    "allocatable": resources,
                    "conditions": [
                        {
                            "type": "Ready",
                            "status": "True",
                            "reason": "StandIn",
                            "message": "",
                            "lastHeartbeatTime": now,
                            "lastTransitionTime": now,
                        }
                    ],
                },
            },
            manager="kubelet-stand-in",
            subresource="status",
        )
        self._renew_lease()

    def _renew_lease(self) -> None:
        self.client.apply(
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": NODE, "namespace": "kube-node-lease"},
                "spec": {
                    "holderIdentity": NODE,
                    "leaseDurationSeconds": 40,
                    "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                },
            },
            manager="kubelet-stand-in",
        )

    # The loop

    def _run(self) -> None:
        turn = 0
        while not self._stop.wait(0.1):
            turn += 1
            try:
                if turn % 60 == 0:
                    self._renew_lease()
                self._bind_claims()
                self._move_pods()
                self.steps += 1
            except ApiError as error:
                if not (error.not_found or error.conflict or error.transient):
                    self._errors.append(error)
                    return

    def _bind_claims(self) -> None:
        """What a provisioner does: a volume for every claim whose class is not named 'missing'."""
        for claim in self.client.list("PersistentVolumeClaim"):
            status, metadata = claim.get("status") or {}, claim["metadata"]
            if status.get("phase") == "Bound" or "deletionTimestamp" in metadata:
                continue
            if claim["spec"].get("storageClassName") == "missing":
                continue
            self.client.apply(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": f"pv-{metadata['uid']}"},
                    "spec": {
                        "capacity": {"storage": "100Gi"},
                        "accessModes": claim["spec"]["accessModes"],
                        "persistentVolumeReclaimPolicy": "Retain",
                        "storageClassName": claim["spec"].get("storageClassName") or "",
                        "hostPath": {"path": f"/nonexistent/{metadata['uid']}"},
                        "claimRef": {
                            "apiVersion": "v1",
                            "kind": "PersistentVolumeClaim",
                            "name": metadata["name"],
                            "namespace": metadata["namespace"],
                            "uid": metadata["uid"],
                        },
                    },
                },
                manager="provisioner-stand-in",
            )

    def _move_pods(self) -> None:
        alive = set()
        for pod in self.client.list("Pod"):
            metadata, spec = pod["metadata"], pod["spec"]
            if spec.get("nodeName") != NODE:
                continue
            if "deletionTimestamp" in metadata:
                self._forget(metadata["uid"])
                self.client.kill_pod(metadata["namespace"], metadata["name"])
                continue
            alive.add(metadata["uid"])
            phase = (pod.get("status") or {}).get("phase")
            component = (metadata.get("labels") or {}).get("app.kubernetes.io/component")
            behaviour = self.behaviour(metadata["namespace"])
            if phase in ("Succeeded", "Failed"):
                continue
            if behaviour.image_error is not None:
                self._image_error(pod, behaviour.image_error)
            elif component == "compile":
                self._move_compile(pod, behaviour)
            elif component == "serving":
                self._move_serving(pod, behaviour)
        for uid in set(self._servers) - alive:
            self._forget(uid)

    def _image_error(self, pod: dict[str, Any], message: str) -> None:
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
        if _state(pod) != waiting:
            self._set(pod, "Pending", waiting, ready=False)

    def _move_compile(self, pod: dict[str, Any], behaviour: Behaviour) -> None:
        if not _state(pod):
            self.jobs_run[pod["metadata"]["namespace"]] += 1
            self._set(pod, "Running", {"running": {"startedAt": _now()}}, ready=True)
            return
        if behaviour.hold_jobs:
            return
        if behaviour.download_exit and pod["spec"].get("initContainers"):
            self._fail_download(pod, behaviour)
            return
        message = behaviour.job_message
        if message is None:
            message = json.dumps(
                {
                    "key": _env(pod, "KERF_CACHE_KEY"),
                    "result": "published",
                    "sizeBytes": 1234567,
                    "seconds": 12.5,
                    "counters": {"dynamo_traces": 1, "inductor_compilations": 3},
                    "gate": {"passed": True, "maxAbsoluteError": 1e-6},
                    "phases": {"compile": 10.0},
                }
            )
        ended = {
            "exitCode": behaviour.job_exit,
            "reason": behaviour.job_reason or ("Completed" if behaviour.job_exit == 0 else "Error"),
            "message": message,
            "startedAt": _now(),
            "finishedAt": _now(),
        }
        phase = "Succeeded" if behaviour.job_exit == 0 else "Failed"
        self._set(pod, phase, {"terminated": ended}, ready=False)

    def _fail_download(self, pod: dict[str, Any], behaviour: Behaviour) -> None:
        """The init container ended, so the container after it never began."""
        container = pod["spec"]["initContainers"][0]
        ended = {
            "exitCode": behaviour.download_exit,
            "reason": "Error",
            "message": behaviour.download_message,
            "startedAt": _now(),
            "finishedAt": _now(),
        }
        self._set(
            pod,
            "Failed",
            {"waiting": {"reason": "PodInitializing"}},
            ready=False,
            init=[
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": False,
                    "restartCount": 0,
                    "state": {"terminated": ended},
                }
            ],
        )

    def _move_serving(self, pod: dict[str, Any], behaviour: Behaviour) -> None:
        uid = pod["metadata"]["uid"]
        ready = not behaviour.hold_serving
        if uid in self._servers and _ready(pod) == ready:
            return
        if uid not in self._servers:
            self._serve(pod)
        address = self._servers[uid][0]
        self._set(pod, "Running", {"running": {"startedAt": _now()}}, ready=ready, address=address)

    def _set(
        self,
        pod: dict[str, Any],
        phase: str,
        state: dict[str, Any],
        *,
        ready: bool,
        address: str | None = None,
        init: list[dict[str, Any]] | None = None,
    ) -> None:
        metadata = pod["metadata"]
        now = _now()
        status: dict[str, Any] = {
            "phase": phase,
            "startTime": (pod.get("status") or {}).get("startTime", now),
            "conditions": [
                {"type": kind, "status": str(ready), "lastTransitionTime": now}
                for kind in ("Ready", "ContainersReady", "Initialized")
            ],
            "containerStatuses": [
                {
                    "name": "kerf",
                    "image": pod["spec"]["containers"][0]["image"],
                    "imageID": "",
                    "ready": ready,
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        if init is not None:
            status["initContainerStatuses"] = init
        if address is not None:
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        self.client.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": metadata["name"],
                    "namespace": metadata["namespace"],
                    "uid": metadata["uid"],
                },
                "status": status,
            },
            manager="kubelet-stand-in",
            subresource="status",
        )

    # Reports

    def _serve(self, pod: dict[str, Any]) -> None:
        address = f"127.{self._octet}.{self._next // 250}.{self._next % 250 + 1}"
        self._next += 1
        namespace = pod["metadata"]["namespace"]
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                report = stand_in.behaviour(namespace).report(report_of(pod))
                body = json.dumps(report).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

        server = ThreadingHTTPServer((address, PORT), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        self._servers[pod["metadata"]["uid"]] = (address, server)

    def _forget(self, uid: str) -> None:
        found = self._servers.pop(uid, None)
        if found is not None:
            threading.Thread(target=_end, args=(found[1],), daemon=True).start()


def _end(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


def report_of(pod: dict[str, Any]) -> dict[str, Any]:
    """What the runtime in ``pod`` would report after a warm start."""
    spec = json.loads(_env(pod, "KERF_DEPLOYMENT") or "{}")["spec"]
    mode = spec["compilation"]["cudagraphMode"]
    sizes = spec["compilation"].get("captureSizes", [1, 2, 4, 8])
    key = _env(pod, "KERF_CACHE_KEY")
    return {
        "version": "0.1.0",
        "served_name": spec["model"].get("servedName", "smollm2"),
        "phase": "ready",
        "ready": True,
        "cache": {"key": key, "result": "hit", "reason": "Hit", "message": "", "bytes": 1234567},
        "counters": {"dynamo_traces": 0, "backend_compilations": 0, "inductor_compilations": 0},
        "effective": {
            "requested_mode": mode,
            "mode": mode,
            "capture_sizes": sizes,
            "changes": [],
        },
        "graphs": {
            "backend": "emulated",
            "captured": 2 * len(sizes),
            "memory_bytes": 4096,
            "capture_seconds": 0.25,
        },
        "dispatch": {"FULL": 10, "PIECEWISE": 3, "NONE": 0},
        "startup": {"import": 1.0, "weights": 0.5, "cache_load": 0.25, "capture": 0.25},
    }


def _env(pod: dict[str, Any], name: str) -> str | None:
    for item in pod["spec"]["containers"][0].get("env") or []:
        if item["name"] == name:
            return str(item["value"])
    return None


def _state(pod: dict[str, Any]) -> dict[str, Any]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    return dict(statuses[0].get("state") or {})


def _ready(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
