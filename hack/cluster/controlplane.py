"""The control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.

Alone it needs no root and touches nothing outside its state folder: every listener is on
127.0.0.1.  Pods are scheduled and never run.  Below a node (``node.py``) the API server must be
reachable from pods, so it listens everywhere and advertises the node's address.

The order of start and end is not free.  The scheduler, started before the API server is ready, is
refused its lists and backs off for seconds; the API server, ended after etcd, hangs.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from hack.cluster import instance as instances
from hack.cluster.binaries import Binaries
from hack.cluster.errors import ClusterError
from hack.cluster.instance import Instance
from hack.cluster.locks import file_lock
from hack.cluster.pki import create_pki, kubeconfig
from hack.cluster.processes import Owner, Processes
from hack.cluster.progress import duration, say
from hack.cluster.waiting import wait_until

__all__ = ["CONTROL_PLANE", "ControlPlane", "bring_down", "bring_up", "control_plane", "sweep"]

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
READY_DEADLINE_S = 90.0
KUBECTL_DEADLINE_S = 180.0


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane.

    Attributes:
        instance: its name, state folder and ports.
    """

    instance: Instance
    binaries: Binaries = field(repr=False)
    processes: Processes = field(repr=False)

    @property
    def kubeconfig(self) -> Path:
        """An administrator's kubeconfig, for clients on this machine."""
        return self.instance.kubeconfig

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://127.0.0.1:{self.instance.port('api')}"

    def bin(self, name: str) -> Path:
        """The path of a pinned program: ``kubectl``, ``helm``, ``kubeconform``, ..."""
        return self.binaries.path(name)

    def kubectl(
        self,
        *arguments: str | Path,
        stdin: str | None = None,
        deadline_s: float = KUBECTL_DEADLINE_S,
    ) -> str:
        """Run kubectl as administrator and return its standard output.

        Raises:
            ClusterError: it failed (the message carries its standard error) or took too long.
        """
        return self._run([self.bin("kubectl"), *arguments], stdin, deadline_s)

    def helm(self, *arguments: str | Path, deadline_s: float = KUBECTL_DEADLINE_S) -> str:
        """Run helm as administrator and return its standard output; errors as ``kubectl``."""
        return self._run([self.bin("helm"), *arguments], None, deadline_s)

    def environ(self) -> dict[str, str]:
        """The environment for programs that talk to this cluster, helm's own folders included."""
        helm = self.instance.state / "helm"
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "HELM_CACHE_HOME": str(helm / "cache"),
            "HELM_CONFIG_HOME": str(helm / "config"),
            "HELM_DATA_HOME": str(helm / "data"),
        }

    def restart_api_server(self) -> None:
        """End the API server and start it again on the same data; returns when it is ready."""
        self.processes.stop("kube-apiserver")
        _start_api_server(self)
        _wait_ready(self, "kube-apiserver", "api", "/readyz")

    def _run(self, command: Sequence[str | Path], stdin: str | None, deadline_s: float) -> str:
        shown = " ".join([Path(command[0]).name, *(str(part) for part in command[1:])])
        try:
            result = subprocess.run(
                [str(part) for part in command],
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=deadline_s,
                env=self.environ(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"'{shown}' took more than {deadline_s:.0f} s") from error
        if result.returncode != 0:
            said = (result.stderr or result.stdout).strip()
            raise ClusterError(f"'{shown}' failed with exit code {result.returncode}: {said}")
        return result.stdout


@contextmanager
def control_plane(name: str | None = None, *, cache: Path | None = None) -> Iterator[ControlPlane]:
    """A control plane for the life of a ``with`` block.

    Without a name it is one of its own, however many run at once, and it is bound to this process:
    if the process is killed, the next start of any instance sweeps it away.
    """
    owner = Owner.current()
    chosen = name or f"session-{owner.pid}-{time.monotonic_ns() % 1_000_000:06d}"
    plane = bring_up(chosen, cache=cache, owner=owner)
    try:
        yield plane
    finally:
        bring_down(plane.instance, plane.binaries.cache, processes=plane.processes)


def bring_up(
    name: str,
    *,
    cache: Path | None = None,
    owner: Owner | None = None,
    pods_reach_it: bool = False,
) -> ControlPlane:
    """Start the control plane of an instance, or what is missing of it; returns when it is ready.

    Args:
        owner: the process whose end makes the instance a left-over; None: it stays.
        pods_reach_it: listen on every address and advertise the node's, which must exist.
    """
    binaries = Binaries(cache)
    # First, and outside the instance's lock: a build can take ten minutes.
    binaries.ensure(*CONTROL_PLANE, "kubectl")
    sweep(binaries.cache)
    with instance_lock(binaries.cache, name):
        instance = instances.claim(binaries.cache, name, owner=owner)
        plane = ControlPlane(instance, binaries, processes_of(instance))
        try:
            _start(plane, pods_reach_it)
        except BaseException:
            # Also on Ctrl-C: half a control plane serves nobody.  The error has the log's end.
            if owner is not None:
                _end(instance, binaries.cache, plane.processes)
            raise
    return plane


def bring_down(instance: Instance, cache: Path, *, processes: Processes | None = None) -> None:
    """Stop the control plane and delete its state folder; safe to repeat."""
    with instance_lock(cache, instance.name):
        _end(instance, cache, processes or processes_of(instance))


def stop(processes: Processes) -> None:
    """End the control plane's processes, etcd after everything that writes to it."""
    processes.stop("kube-scheduler", "kube-controller-manager", "kube-apiserver")
    processes.stop("etcd")


def sweep(cache: Path) -> None:
    """Bring down control planes whose owner is gone: test sessions that were killed."""
    for instance in instances.instances(cache):
        if instance.has_node:  # more to clear up than processes: node.py does it
            continue
        if instance.owner is not None and not instance.owner.is_running():
            say(f"sweeping {instance.name}: its owner, process {instance.owner.pid}, is gone")
            bring_down(instance, cache)


def processes_of(instance: Instance) -> Processes:
    """The process table of an instance."""
    return Processes(instance.state / "pid", instance.logs)


def instance_lock(cache: Path, name: str) -> AbstractContextManager[None]:
    """One start or end of an instance at a time; the lock lies outside of what an end deletes."""
    return file_lock(
        cache / "locks" / f"instance-{name}.lock",
        purpose=f"cluster {name}",
        deadline_s=300,
    )


def _end(instance: Instance, cache: Path, processes: Processes) -> None:
    stop(processes)
    if instance.state.exists():
        instances.release(cache, instance)


def _start(plane: ControlPlane, pods_reach_it: bool) -> None:
    began = time.monotonic()
    if all(plane.processes.pid(name) is not None for name in CONTROL_PLANE):
        return
    create_pki(plane.instance)
    (plane.instance.state / "pods-reach-it").unlink(missing_ok=True)
    if pods_reach_it:
        (plane.instance.state / "pods-reach-it").touch()
    _start_etcd(plane)
    _start_api_server(plane)
    # The controller manager may start early: it waits until the API server answers.
    _start_controller_manager(plane)
    _wait_ready(plane, "kube-apiserver", "api", "/readyz")
    _start_scheduler(plane)
    _wait_ready(plane, "kube-controller-manager", "controller_manager", "/healthz")
    # The scheduler's /healthz is true before its informers have synced.
    _wait_ready(plane, "kube-scheduler", "scheduler", "/readyz")
    plane.processes.require_alive(*CONTROL_PLANE)
    say(f"control plane {plane.instance.name} ready in {duration(time.monotonic() - began)}")


def _start_etcd(plane: ControlPlane) -> None:
    instance = plane.instance
    client = f"http://127.0.0.1:{instance.port('etcd')}"
    peer = f"http://127.0.0.1:{instance.port('etcd_peer')}"
    plane.processes.start(
        "etcd",
        [
            plane.bin("etcd"),
            f"--name={instance.name}",
            f"--data-dir={instance.state / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={instance.name}={peer}",
            # The data is worth nothing after a power cut; without fsync a start is twice as fast.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
    )
    wait_until(
        lambda: _answers(f"{client}/health", None),
        what=f"etcd of {instance.name} to be healthy",
        deadline_s=READY_DEADLINE_S,
        alive=lambda: plane.processes.pid("etcd") is not None,
        log=plane.processes.log("etcd"),
    )


def _start_api_server(plane: ControlPlane) -> None:
    instance, pki = plane.instance, plane.instance.pki
    if (instance.state / "pods-reach-it").exists():
        reach = ["--bind-address=0.0.0.0", f"--advertise-address={instance.node_ip}"]
    else:
        # Endpoints may not hold a loopback address; without pods nobody needs the endpoint.
        reach = [
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
        ]
    plane.processes.start(
        "kube-apiserver",
        [
            plane.bin("kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{instance.port('etcd')}",
            f"--secure-port={instance.port('api')}",
            *reach,
            f"--service-cluster-ip-range={instance.service_range}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
            f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
            f"--kubelet-certificate-authority={pki / 'ca.crt'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki / 'service-account.pub'}",
            f"--service-account-signing-key-file={pki / 'service-account.key'}",
            f"--requestheader-client-ca-file={pki / 'front-proxy-ca.crt'}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={pki / 'front-proxy-client.crt'}",
            f"--proxy-client-key-file={pki / 'front-proxy-client.key'}",
            "--allow-privileged=true",
            # Without it a restart waits a minute for the watches of those that stay connected.
            "--shutdown-watch-termination-grace-period=1s",
            "--profiling=false",
        ],
    )


def _start_controller_manager(plane: ControlPlane) -> None:
    instance, pki = plane.instance, plane.instance.pki
    plane.processes.start(
        "kube-controller-manager",
        [
            plane.bin("kube-controller-manager"),
            *_client_of_the_api(instance, "controller-manager", "controller_manager"),
            f"--root-ca-file={pki / 'ca.crt'}",
            f"--service-account-private-key-file={pki / 'service-account.key'}",
            "--use-service-account-credentials=true",
            f"--cluster-signing-cert-file={pki / 'ca.crt'}",
            f"--cluster-signing-key-file={pki / 'ca.key'}",
            # Its default lies below /usr/libexec and is created at start.
            f"--flex-volume-plugin-dir={instance.state / 'volume-plugins'}",
            "--allocate-node-cidrs=false",
            f"--service-cluster-ip-range={instance.service_range}",
        ],
    )


def _start_scheduler(plane: ControlPlane) -> None:
    plane.processes.start(
        "kube-scheduler",
        [
            plane.bin("kube-scheduler"),
            *_client_of_the_api(plane.instance, "scheduler", "scheduler"),
        ],
    )


def _client_of_the_api(instance: Instance, name: str, port: str) -> list[str]:
    pki, config = instance.pki, kubeconfig(instance, name)
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1",
        f"--secure-port={instance.port(port)}",
        f"--tls-cert-file={pki / f'{name}-serving.crt'}",
        f"--tls-private-key-file={pki / f'{name}-serving.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--requestheader-client-ca-file={pki / 'front-proxy-ca.crt'}",
        "--leader-elect=false",
        "--profiling=false",
    ]


def _wait_ready(plane: ControlPlane, process: str, port: str, path: str) -> None:
    context = ssl.create_default_context(cafile=str(plane.instance.pki / "ca.crt"))
    context.load_cert_chain(plane.instance.pki / "admin.crt", plane.instance.pki / "admin.key")
    url = f"https://127.0.0.1:{plane.instance.port(port)}{path}"
    wait_until(
        lambda: _answers(url, context),
        what=f"{process} of {plane.instance.name} to answer {path}",
        deadline_s=READY_DEADLINE_S,
        alive=lambda: plane.processes.pid(process) is not None,
        log=plane.processes.log(process),
    )


def _answers(url: str, context: ssl.SSLContext | None) -> bool:
    """Whether the URL answers 200; proxies of the environment are not asked."""
    try:
        return (
            httpx.get(url, verify=context or False, trust_env=False, timeout=5).status_code == 200
        )
    except httpx.TransportError:
        return False
