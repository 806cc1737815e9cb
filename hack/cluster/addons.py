"""What every cluster offers and a bare one lacks: cluster DNS and a default storage class.

Storage is a pool of local volumes made beforehand, bound when the first pod of a claim is
scheduled.  A claim that is made at any later time finds one, which is all that a provisioner would
do on a single node, without its extra process and image.  A released volume is emptied and
offered again by ``refill``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hack.cluster.instance import Instance

__all__ = ["DNS_IMAGE", "STORAGE_CLASS", "dns", "refill", "storage"]

DNS_IMAGE = "localhost/kerf/coredns:1"
STORAGE_CLASS = "kerf-local"
VOLUMES = 24
VOLUME_SIZE = "20Gi"

Kubectl = Callable[..., str]

# Not port 53: that would need a capability, and the Service maps it anyway.
COREFILE = """\
.:1053 {
  errors
  health :8080
  ready :8181
  kubernetes cluster.local in-addr.arpa ip6.arpa {
    pods insecure
    fallthrough in-addr.arpa ip6.arpa
    ttl 5
  }
  prometheus :9153
  cache 5
  loadbalance
}
"""


def dns(instance: Instance) -> str:
    """The objects of cluster DNS, as one JSON list for ``kubectl apply``."""
    labels = {"k8s-app": "kube-dns"}
    metadata = {"name": "coredns", "namespace": "kube-system"}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    watch = ["list", "watch"]
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "system:coredns"},
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["endpoints", "services", "pods", "namespaces"],
                "verbs": watch,
            },
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": watch},
        ],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "system:coredns"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "system:coredns",
        },
        "subjects": [{"kind": "ServiceAccount", **metadata}],
    }
    configuration = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"Corefile": COREFILE},
    }
    container = {
        "name": "coredns",
        "image": DNS_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "ports": [
            {"name": "dns", "containerPort": 1053, "protocol": "UDP"},
            {"name": "dns-tcp", "containerPort": 1053, "protocol": "TCP"},
        ],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "livenessProbe": {"httpGet": {"path": "/health", "port": 8080}, "initialDelaySeconds": 30},
        "resources": {
            "requests": {"cpu": "20m", "memory": "32Mi"},
            "limits": {"memory": "128Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "serviceAccountName": "coredns",
                    "dnsPolicy": "Default",
                    "priorityClassName": "system-cluster-critical",
                    "containers": [container],
                    "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
                },
            },
        },
    }
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": "dns"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP", "targetPort": "dns-tcp"},
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
        "spec": {"clusterIP": instance.dns_ip, "selector": labels, "ports": ports},
    }
    return _list([account, role, binding, configuration, deployment, service])


def storage(instance: Instance) -> str:
    """The storage class and its volumes; makes their folders."""
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    volumes = [_volume(instance, number) for number in range(VOLUMES)]
    return _list([storage_class, *volumes])


def refill(instance: Instance, kubectl: Kubectl) -> int:
    """Empty the volumes whose claim is gone and offer them again; returns how many."""
    volumes = json.loads(kubectl("get", "pv", "-o", "json"))["items"]
    released = [
        volume["metadata"]["name"]
        for volume in volumes
        if volume["spec"].get("storageClassName") == STORAGE_CLASS
        and volume["status"].get("phase") == "Released"
    ]
    for name in released:
        kubectl("delete", "pv", name, "--wait=true")
        number = int(name.rpartition("-")[2])
        shutil.rmtree(_folder(instance, number))
        kubectl("apply", "-f", "-", stdin=json.dumps(_volume(instance, number)))
    return len(released)


def _folder(instance: Instance, number: int) -> Path:
    return instance.state / "volumes" / f"{number:02d}"


def _volume(instance: Instance, number: int) -> dict[str, object]:
    folder = _folder(instance, number)
    folder.mkdir(parents=True, exist_ok=True)
    # As a freshly formatted volume: writable for whoever the pod's fsGroup makes its owner.
    folder.chmod(0o777)
    hostname = {
        "key": "kubernetes.io/hostname",
        "operator": "In",
        "values": [instance.node_name],
    }
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{STORAGE_CLASS}-{number:02d}"},
        "spec": {
            "capacity": {"storage": VOLUME_SIZE},
            "accessModes": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [hostname]}]}},
        },
    }


def _list(items: Sequence[Mapping[str, object]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
