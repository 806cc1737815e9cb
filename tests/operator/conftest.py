"""Fixtures of the operator's tests against a real API server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hack.cluster import ControlPlane
from tests.operator.standin import Behaviour, StandIn, TestClient
from tests.patience import PATIENCE, eventually

from kerf_operator.client import connect

ROOT = Path(__file__).parents[2]
IMAGE = "registry.test/kerf-runtime:1"


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> TestClient:
    """A client of the control plane with our CRDs installed."""
    control_plane.kubectl("apply", "-f", str(ROOT / "crds"))
    client = TestClient(connect(control_plane.kubeconfig))
    ours = {"modeldeployments", "compilecaches"}
    eventually(lambda: ours <= client.served("kerf.dev", "v1alpha1"))
    return client


@pytest.fixture(scope="session")
def stand_in(api: TestClient) -> Iterator[StandIn]:
    """A node, its kubelet and its volumes."""
    found = StandIn(api)
    found.start()
    yield found
    found.stop()


@dataclass
class Place:
    """A namespace of one test, with what happens to its pods."""

    name: str
    api: TestClient
    stand_in: StandIn
    plane: ControlPlane

    @property
    def behaviour(self) -> Behaviour:
        return self.stand_in.behaviour(self.name)

    def create(self, name: str = "smollm2", **spec: Any) -> dict[str, Any]:
        """Create a ModelDeployment; ``spec`` is merged into a small valid one."""
        return self.api.create(document(self.name, name, **spec))

    def patch(self, spec: dict[str, Any], name: str = "smollm2") -> dict[str, Any]:
        return self.api.merge("ModelDeployment", name, {"spec": spec}, namespace=self.name)

    def get(self, kind: str = "ModelDeployment", name: str = "smollm2") -> dict[str, Any]:
        found = self.api.get(kind, name, namespace=self.name)
        assert found is not None, f"{kind} {name} does not exist"
        return found

    def list(self, kind: str) -> list[dict[str, Any]]:
        return self.api.list(kind, namespace=self.name)

    def names(self, kind: str) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.list(kind))

    def conditions(
        self, kind: str = "ModelDeployment", name: str = "smollm2"
    ) -> dict[str, dict[str, Any]]:
        found = self.api.get(kind, name, namespace=self.name) or {}
        return {c["type"]: c for c in (found.get("status") or {}).get("conditions") or []}

    def wait(self, what: str, check: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Wait until ``check`` returns something true; fails with what was waited for."""
        deadline = time.monotonic() + seconds
        while True:
            found = check()
            if found:
                return found
            if time.monotonic() > deadline:
                shown = self.plane.kubectl("get", "kerf,deploy,job,pod,pvc,events", "-n", self.name)
                pytest.fail(f"waited {seconds} s for: {what}\n{self.conditions()}\n{shown}")
            time.sleep(0.1)

    def wait_ready(self, name: str = "smollm2", seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until condition Ready is True for the present generation."""

        def ready() -> dict[str, Any] | None:
            found = self.get(name=name)
            # Of the same look: what is returned is the state that is Ready.
            conditions = (found.get("status") or {}).get("conditions") or []
            condition = next((c for c in conditions if c["type"] == "Ready"), {})
            current = condition.get("observedGeneration") == found["metadata"]["generation"]
            return found if current and condition["status"] == "True" else None

        return self.wait(f"{name} is Ready", ready, seconds)

    def wait_reason(
        self, reason: str, kind: str = "Ready", name: str = "smollm2"
    ) -> dict[str, Any]:
        """Wait until a condition has ``reason``."""
        return self.wait(
            f"{kind} has reason {reason}",
            lambda: (c := self.conditions(name=name).get(kind)) and c["reason"] == reason and c,
        )

    def status(self, *path: str) -> Any:
        """What is in the status there; None if it is not: a report that came late is not read at once."""
        found: Any = self.get().get("status")
        for name in path:
            found = (found or {}).get(name)
        return found

    def add_models(self) -> None:
        """The claim with the model, as a user would have filled it."""
        self.api.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "models", "namespace": self.name},
                "spec": {
                    "accessModes": ["ReadWriteMany"],
                    "resources": {"requests": {"storage": "1Gi"}},
                },
            }
        )


def document(namespace: str, name: str = "smollm2", **spec: Any) -> dict[str, Any]:
    """A small valid ModelDeployment."""
    base: dict[str, Any] = {
        "model": {"source": {"pvc": {"claimName": "models", "path": "model.gguf"}}},
        "engine": {"dtype": "float32"},
        "compilation": {"captureSizes": [1, 2, 4]},
    }
    return {
        "apiVersion": "kerf.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**base, **spec},
    }


@pytest.fixture
def make_place(
    api: TestClient, stand_in: StandIn, control_plane: ControlPlane
) -> Iterator[Callable[[], Place]]:
    """Makes namespaces; they are deleted at the end, without waiting."""
    made: list[str] = []

    def make() -> Place:
        name = f"t-{uuid.uuid4().hex[:8]}"
        api.create(
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {
                    "name": name,
                    "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
                },
            }
        )
        made.append(name)
        place = Place(name, api, stand_in, control_plane)
        place.wait("the default ServiceAccount", lambda: place.names("ServiceAccount"))
        place.add_models()
        return place

    yield make
    for name in made:
        api.delete_any("Namespace", name)


@pytest.fixture
def place(make_place: Callable[[], Place]) -> Place:
    """A namespace with the restricted Pod Security standard and a claim named models."""
    return make_place()


def operator_arguments(namespace: str | None, kubeconfig: Path, *extra: str) -> list[str]:
    """Arguments of an operator on one namespace or (None) on all of them."""
    scope = [] if namespace is None else ["--namespace", namespace]
    return [
        "run",
        *scope,
        f"--kubeconfig={kubeconfig}",
        f"--runtime-image={IMAGE}",
        "--liveness-port=0",
        "--metrics-port=0",
        "--host=127.0.0.1",
        "--resync-seconds=5",
        *extra,
    ]


class OperatorProcess:
    """One operator process, on one namespace or (None) on all of them."""

    def __init__(self, namespace: str | None, kubeconfig: Path, log: Path, *extra: str) -> None:
        self.log = log
        arguments = operator_arguments(namespace, kubeconfig, *extra)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kerf_operator", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL, and the process is gone when this returns."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@pytest.fixture
def run_operator(
    control_plane: ControlPlane, tmp_path: Path
) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts operator processes; shows the end of their logs when the test has failed."""
    started: list[OperatorProcess] = []

    def run(namespace: str, *extra: str, kubeconfig: Path | None = None) -> OperatorProcess:
        log = tmp_path / f"operator-{namespace}.log"
        process = OperatorProcess(namespace, kubeconfig or control_plane.kubeconfig, log, *extra)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        lines = process.log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-60:]))  # shown by pytest only for a failed test  # noqa: T201


@pytest.fixture(scope="module")
def operator(
    control_plane: ControlPlane,
    api: TestClient,
    stand_in: StandIn,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OperatorProcess]:
    """One operator on all namespaces, for a whole module."""
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    process = OperatorProcess(None, control_plane.kubeconfig, log)
    yield process
    alive = process.process.poll() is None
    process.kill()
    assert alive, f"the operator ended by itself:\n{log.read_text()[-4000:]}"


@pytest.fixture(autouse=True)
def _show_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the module's operator logged during the test, shown by pytest only when it fails."""
    if "operator" not in request.fixturenames:
        yield
        return
    log: Path = request.getfixturevalue("operator").log
    start = log.stat().st_size
    yield
    print(log.read_bytes()[start:].decode(errors="replace")[-6000:])  # noqa: T201
