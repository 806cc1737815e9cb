"""The chart: clean, closed, and enough for an operator that runs with nothing but its permissions."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hack.cluster import ClusterError, ControlPlane
from tests.patience import PATIENCE

pytestmark = pytest.mark.control_plane

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kerf"
IMAGE = "registry.test/kerf-runtime:1"


def template(plane: ControlPlane, *arguments: str) -> list[dict[str, Any]]:
    text = plane.helm("template", "kerf", CHART, "--namespace", "kerf-system", *arguments)
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [obj for obj in objects if obj["kind"] == kind]


def test_helm_lint_is_clean(control_plane: ControlPlane) -> None:
    text = control_plane.helm("lint", "--strict", CHART)
    assert "0 chart(s) failed" in text
    assert "[WARNING]" not in text


@pytest.mark.parametrize(
    "setting",
    ["bogus=1", "image.bogus=1", "operator.workers=0", "image.digest=latest", "runtimeImage="],
)
def test_wrong_values_are_refused(control_plane: ControlPlane, setting: str) -> None:
    name = setting.split("=")[0].split(".")[-1]
    with pytest.raises(ClusterError, match=name):
        template(control_plane, "--set", setting)


def test_the_crds_are_those_of_the_repository(control_plane: ControlPlane) -> None:
    packaged = of_kind(template(control_plane), "CustomResourceDefinition")
    for crd in packaged:
        annotations = crd["metadata"].pop("annotations")
        assert annotations == {"helm.sh/resource-policy": "keep"}
    committed = [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")]
    assert sorted(packaged, key=str) == sorted(committed, key=str)
    assert (
        of_kind(template(control_plane, "--set", "crds.enabled=false"), "CustomResourceDefinition")
        == []
    )
    kept = of_kind(template(control_plane, "--set", "crds.keep=false"), "CustomResourceDefinition")
    assert all("annotations" not in crd["metadata"] for crd in kept)


def rules_of(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        rule
        for kind in ("Role", "ClusterRole")
        for obj in of_kind(objects, kind)
        for rule in obj["rules"]
    ]


def test_permissions_are_few(control_plane: ControlPlane) -> None:
    rules = rules_of(template(control_plane))
    assert all("*" not in value for rule in rules for value in rule.values())
    resources = {resource for rule in rules for resource in rule["resources"]}
    assert not resources & {
        "secrets",
        "configmaps",
        "serviceaccounts",
        "nodes",
        "pods/exec",
        "pods/proxy",
        "roles",
    }
    pods = [set(rule["verbs"]) for rule in rules if "pods" in rule["resources"]]
    assert pods == [{"get", "list", "watch"}]


def test_named_namespaces_get_roles_and_the_cluster_role_shrinks(
    control_plane: ControlPlane,
) -> None:
    objects = template(control_plane, "--set", "watchNamespaces={a,b}")
    assert [role["metadata"]["namespace"] for role in of_kind(objects, "Role")] == ["a", "b"]
    cluster = of_kind(objects, "ClusterRole")[0]["rules"]
    assert [rule["resources"] for rule in cluster] == [["storageclasses"]]
    env = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "KERF_NAMESPACES", "value": "a b"} in env


def test_the_operator_pod_meets_the_restricted_standard(control_plane: ControlPlane) -> None:
    spec = of_kind(template(control_plane), "Deployment")[0]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = spec["containers"][0]["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_digest_wins_over_the_tag(control_plane: ControlPlane) -> None:
    digest = "sha256:" + "0" * 64
    objects = template(control_plane, "--set", f"image.digest={digest}")
    container = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"kerf-operator@{digest}"


@pytest.fixture
def release(control_plane: ControlPlane) -> Iterator[tuple[str, str]]:
    """The chart installed for one namespace: (release namespace, served namespace)."""
    served = f"c-{uuid.uuid4().hex[:8]}"
    system = f"{served}-system"
    for name in (served, system):
        control_plane.kubectl("create", "namespace", name)
    control_plane.kubectl(
        "label", "namespace", system, "pod-security.kubernetes.io/enforce=restricted"
    )
    # The CRDs may be there already, applied by another test; helm would not take them over.
    present = "modeldeployments.kerf.dev" in control_plane.kubectl("get", "crd", "-o", "name")
    settings = [
        f"watchNamespaces={{{served}}}",
        f"runtimeImage={IMAGE}",
        f"crds.enabled={'false' if present else 'true'}",
    ]
    flags = [part for setting in settings for part in ("--set", setting)]
    text = control_plane.helm("install", "kerf", CHART, "--namespace", system, *flags)
    assert "kubectl wait --for=condition=Ready" in text
    yield system, served
    control_plane.helm("uninstall", "kerf", "--namespace", system)
    for name in (served, system):
        control_plane.kubectl("delete", "namespace", name, "--wait=false")


def test_the_chart_installs_and_its_permissions_are_enough(
    control_plane: ControlPlane, release: tuple[str, str], tmp_path: Path
) -> None:
    system, served = release
    token = control_plane.kubectl("create", "token", "kerf", "-n", system).strip()
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    control_plane.kubectl(
        "create", "-n", served, "-f", "-",
        stdin="""
apiVersion: kerf.dev/v1alpha1
kind: ModelDeployment
metadata: {name: chat}
spec:
  model: {source: {pvc: {claimName: models}}}
  autoscaling: {maxReplicas: 2}
""",
    )  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "kerf_operator", "run",
                "--namespace", served, "--kubeconfig", kubeconfig, "--runtime-image", IMAGE,
                "--liveness-port", "0", "--metrics-port", "0",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 2 * PATIENCE
        wanted = ("ccache", "job", "pvc", "service", "hpa")
        while not all(
            control_plane.kubectl("get", kind, "-n", served, "-o", "name") for kind in wanted
        ):
            assert time.monotonic() < deadline, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        events = ""
        while "CompileStarted" not in events:
            assert time.monotonic() < deadline, log.read_text()
            events = control_plane.kubectl("describe", "mdep", "chat", "-n", served)
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
    assert "orbidden" not in log.read_text()
