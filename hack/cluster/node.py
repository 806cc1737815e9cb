"""The node: containerd, CNI, kubelet, kube-proxy and cluster DNS beside a control plane.

Pods really run: with restricted Pod Security, read-only roots, probes, logs, exec, port-forward,
Services, DNS and limits.  There is one node per machine, because kubelets share cgroups and a fixed
folder; it needs root.  NetworkPolicy objects are accepted and not enforced (the bridge plugin has
no policy engine).

What is changed on the machine is noted before and restored after (``host.py``, ``netfilter.py``);
``bring_down`` also clears up behind a node whose processes were killed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml
from hack.cluster import addons, controlplane, host, netfilter
from hack.cluster import instance as instances
from hack.cluster.binaries import Binaries, cache_folder
from hack.cluster.containerd import PAUSE_IMAGE, Containerd
from hack.cluster.controlplane import CONTROL_PLANE, ControlPlane
from hack.cluster.errors import ClusterError
from hack.cluster.instance import Instance
from hack.cluster.pki import kubeconfig
from hack.cluster.processes import Owner, Processes
from hack.cluster.progress import duration, say, step
from hack.cluster.waiting import wait_until
from hack.images.builder import Builder
from hack.images.small import pause_archive, program_archive

__all__ = ["NODE", "Node", "bring_down", "bring_up", "is_up", "node"]

NODE = "node"
NODE_PROCESSES = ("containerd", "kubelet", "kube-proxy")
READY_DEADLINE_S = 180.0
PROJECT_IMAGES = "localhost/kerf/"
PROGRAMS = ("containerd", "ctr", "runc", "bridge", "iptables", "ip")


@dataclass(frozen=True)
class Node(ControlPlane):
    """A running node with its control plane."""

    containerd: Containerd = field(kw_only=True, repr=False)

    def load_image(self, builder: Builder, reference: str) -> int:
        """Bring a built image into the node's image store, sending only blobs it lacks.

        Returns:
            how many bytes were sent; 0 when the image was there.
        """
        if self.containerd.has_image(reference):
            return 0
        with step(f"exporting {reference}"):
            builder.export(reference, self.containerd.layout)
        return self.containerd.import_layout(reference)

    def forget_images(self, builder: Builder) -> None:
        """Remove images of ours that the builder no longer has; pause and DNS stay."""
        keep = [*builder.references(PROJECT_IMAGES), PAUSE_IMAGE, addons.DNS_IMAGE]
        gone = self.containerd.forget_images(PROJECT_IMAGES, keep)
        if gone:
            say(f"removed {len(gone)} old images from the node")

    def refill_volumes(self) -> int:
        """Make the volumes of deleted claims available again; returns how many."""
        return addons.refill(self.instance, self.kubectl)


@contextmanager
def node(*, cache: Path | None = None) -> Iterator[Node]:
    """The node for the life of a ``with`` block; images stay in the cache folder.

    A node that somebody brought up from the command line before is used and left running.
    """
    lent = is_up(cache or cache_folder())
    running = bring_up(cache=cache, owner=Owner.current())
    try:
        yield running
    finally:
        if not lent:
            bring_down(running.binaries.cache, processes=running.processes)


def is_up(cache: Path) -> bool:
    """Whether a node runs that no process owns: one from the command line."""
    instance = instances.find(cache, NODE)
    if instance is None or instance.owner is not None:
        return False
    return controlplane.processes_of(instance).pid("kubelet") is not None


def bring_up(*, cache: Path | None = None, owner: Owner | None = None) -> Node:
    """Start the node, or what is missing of it; returns when DNS answers.

    Raises:
        PrerequisiteError: not root, or programs are missing and cannot be installed.
        ClusterError: another kubelet runs here, or a component did not come up.
    """
    host.require_root("the node")
    host.require_programs(*PROGRAMS)
    binaries = Binaries(cache)
    binaries.ensure(*CONTROL_PLANE, "kubectl", "kubelet", "kube-proxy", "crictl", "coredns")
    _sweep(binaries.cache)
    with controlplane.instance_lock(binaries.cache, f"{NODE}-up"):
        _refuse_second_kubelet(binaries.cache)
        instance = instances.claim(binaries.cache, NODE, owner=owner)
        try:
            return _bring_up(instance, binaries, owner)
        except BaseException:
            if owner is not None:
                _bring_down(instance, binaries.cache, controlplane.processes_of(instance))
            raise


def bring_down(cache: Path, *, processes: Processes | None = None, images: bool = False) -> None:
    """Stop the node and put the machine back as it was; safe to repeat.

    Args:
        images: also delete the image store, which otherwise stays for the next start.
    """
    host.require_root("taking the node down")
    with controlplane.instance_lock(cache, f"{NODE}-up"):
        instance = instances.find(cache, NODE)
        if instance is not None:
            _bring_down(instance, cache, processes or controlplane.processes_of(instance))
        if images:
            host.remove_tree(_image_store(cache))


def _bring_up(instance: Instance, binaries: Binaries, owner: Owner | None) -> Node:
    began = time.monotonic()
    _note_machine(instance)
    _address(instance)
    plane = controlplane.bring_up(
        instance.name, cache=binaries.cache, owner=owner, pods_reach_it=True
    )
    running = Node(
        plane.instance,
        binaries,
        plane.processes,
        containerd=_containerd(instance, binaries, plane.processes),
    )
    _forwarding()
    fresh = running.processes.pid("containerd") is None
    running.containerd.start(_networks(instance))
    if fresh and running.containerd.remove_pods():
        say("removed pods of an earlier node")
    _small_images(running)
    _start_kubelet(running)
    _start_kube_proxy(running)
    running.kubectl("apply", "-f", "-", stdin=addons.storage(instance))
    running.kubectl("apply", "-f", "-", stdin=addons.dns(instance))
    _wait_ready(running)
    running.processes.require_alive(*CONTROL_PLANE, *NODE_PROCESSES)
    say(f"node ready in {duration(time.monotonic() - began)}")
    return running


def _bring_down(instance: Instance, cache: Path, processes: Processes) -> None:
    began = time.monotonic()
    processes.stop("kube-proxy", "kubelet")
    containerd = _containerd(instance, Binaries(cache), processes)
    try:
        pods = containerd.remove_pods()
    except ClusterError as error:
        say(f"removing pods: {error}; their processes are killed instead")
        pods = 0
    processes.stop("containerd")
    shims = containerd.kill_left_over_shims()
    controlplane.stop(processes)
    before = host.Before.load(instance.machine_before) if instance.has_node else None
    if before and (killed := before.kill_pods()):
        say(f"killed {killed} processes of pods whose containerd was gone")
    mounts = host.unmount_below(instance.state)
    chains = 0
    if before:
        chains = netfilter.remove_new_chains(before.chains)
        before.restore()
    for link in (instance.pod_bridge, instance.node_bridge):
        if Path(f"/sys/class/net/{link}").exists():
            host.run("ip", "link", "delete", link)
    if instance.state.exists():
        instances.release(cache, instance)
    say(
        f"node gone in {duration(time.monotonic() - began)}: {pods} pods, {shims} left-over shims,"
        f" {mounts} mounts, {chains} netfilter chains removed"
    )


def _sweep(cache: Path) -> None:
    instance = instances.find(cache, NODE)
    if instance is not None and instance.owner and not instance.owner.is_running():
        say("sweeping a node whose owner is gone")
        bring_down(cache)


def _refuse_second_kubelet(cache: Path) -> None:
    instance = instances.find(cache, NODE)
    ours = controlplane.processes_of(instance).pid("kubelet") if instance else None
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == ours:
            continue
        try:
            name = (entry / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name == "kubelet":
            raise ClusterError(
                f"another kubelet runs on this machine (process {entry.name})",
                hint="Two nodes would share cgroups and the device-plugin folder; stop that one",
            )


def _note_machine(instance: Instance) -> None:
    # Only once: after a start of ours the machine no longer looks as before.
    if not instance.has_node:
        host.Before.note(netfilter.chains()).save(instance.machine_before)


def _address(instance: Instance) -> None:
    """Give the node an address that pods can reach: on a bridge without ports.

    A link of type dummy would be the usual place; small kernels have none.
    """
    link = instance.node_bridge
    if not Path(f"/sys/class/net/{link}").exists():
        host.run("ip", "link", "add", link, "type", "bridge")
    host.run("ip", "address", "replace", f"{instance.node_ip}/32", "dev", link)
    host.run("ip", "link", "set", link, "up")


def _forwarding() -> None:
    for name in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
        file = Path("/proc/sys") / name
        if file.exists():
            file.write_text("1")


def _image_store(cache: Path) -> Path:
    return cache / "containerd"


def _containerd(instance: Instance, binaries: Binaries, processes: Processes) -> Containerd:
    return Containerd(
        instance=instance,
        processes=processes,
        root=_image_store(binaries.cache),
        layout=binaries.cache / "images" / "layout",
        crictl=binaries.path("crictl"),
    )


def _networks(instance: Instance) -> Path:
    """Write the CNI configuration; returns its folder."""
    folder = instance.state / "cni" / "net.d"
    folder.mkdir(parents=True, exist_ok=True)
    address_management = {
        "type": "host-local",
        "dataDir": str(instance.state / "cni" / "addresses"),
        "ranges": [[{"subnet": instance.pod_range}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": instance.pod_bridge,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": address_management,
    }
    network = {
        "cniVersion": "1.0.0",
        "name": "kerf",
        # Without the firewall plugin pods time out where FORWARD drops by default (Docker).
        "plugins": [
            bridge,
            {"type": "firewall"},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
    (folder / "10-kerf.conflist").write_text(json.dumps(network))
    return folder


def _small_images(running: Node) -> None:
    folder = running.binaries.cache / "images" / "small"
    folder.mkdir(parents=True, exist_ok=True)
    if not running.containerd.has_image(PAUSE_IMAGE):
        running.containerd.import_archive(pause_archive(folder, PAUSE_IMAGE))
    if not running.containerd.has_image(addons.DNS_IMAGE):
        archive = program_archive(
            folder / "coredns.tar",
            addons.DNS_IMAGE,
            running.bin("coredns"),
            ["/coredns"],
            user="65532:65532",
        )
        running.containerd.import_archive(archive)


def _start_kubelet(running: Node) -> None:
    instance, state, pki = running.instance, running.instance.state, running.instance.pki
    for name in ("kubelet", "manifests", "pod-logs", "volume-plugins"):
        (state / name).mkdir(exist_ok=True)
    # Only pods with dnsPolicy Default see it.
    resolver = state / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\n")
    configuration = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": instance.node_ip,
        "port": instance.port("kubelet"),
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": instance.port("kubelet_health"),
        "tlsCertFile": str(pki / "kubelet-serving.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet-serving.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{instance.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["pods"],
        "failSwapOn": False,
        "failCgroupV1": False,
        # Both defaults need CAP_SYS_RESOURCE, which root in a virtual machine may lack.
        "oomScoreAdj": 0,
        "maxOpenFiles": 20000,
        "clusterDNS": [instance.dns_ip],
        "clusterDomain": "cluster.local",
        "resolvConf": str(resolver),
        "staticPodPath": str(state / "manifests"),
        "podLogsDir": str(state / "pod-logs"),
        "volumePluginDir": str(state / "volume-plugins"),
        "rotateCertificates": False,
        # Imported images cannot be pulled again: the kubelet must never collect them.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
            "imagefs.inodesFree": "1%",
        },
    }
    file = state / "kubelet.yaml"
    file.write_text(yaml.safe_dump(configuration))
    running.processes.start(
        "kubelet",
        [
            running.bin("kubelet"),
            f"--config={file}",
            f"--kubeconfig={kubeconfig(instance, 'kubelet')}",
            f"--root-dir={state / 'kubelet'}",
            f"--cert-dir={state / 'kubelet' / 'pki'}",
            f"--hostname-override={instance.node_name}",
            f"--node-ip={instance.node_ip}",
            "--v=1",
        ],
        environ={"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
    )


def _start_kube_proxy(running: Node) -> None:
    instance = running.instance
    local = "127.0.0.1"
    configuration = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(kubeconfig(instance, "proxy"))},
        "hostnameOverride": instance.node_name,
        "clusterCIDR": instance.pod_range,
        "bindAddress": instance.node_ip,
        "healthzBindAddress": f"{local}:{instance.port('proxy_health')}",
        "metricsBindAddress": f"{local}:{instance.port('proxy_metrics')}",
        # Zero leaves the machine's connection tracking as it is.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }
    content = yaml.safe_dump(configuration)
    file = instance.state / "kube-proxy.yaml"
    # kube-proxy watches its file and exits when it is written, even with the same bytes.
    if not file.exists() or file.read_text() != content:
        running.processes.stop("kube-proxy")
        file.write_text(content)
    running.processes.start(
        "kube-proxy",
        [running.bin("kube-proxy"), f"--config={file}"],
        environ={"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
    )


def _wait_ready(running: Node) -> None:
    name = running.instance.node_name
    url = f"http://127.0.0.1:{running.instance.port('kubelet_health')}/healthz"
    wait_until(
        lambda: _healthy(url),
        what="the kubelet to be healthy",
        deadline_s=READY_DEADLINE_S,
        alive=lambda: running.processes.pid("kubelet") is not None,
        log=running.processes.log("kubelet"),
    )
    wait_until(
        lambda: name in running.kubectl("get", "nodes", "-o", "name"),
        what="the kubelet to register its node",
        deadline_s=READY_DEADLINE_S,
        alive=lambda: running.processes.pid("kubelet") is not None,
        log=running.processes.log("kubelet"),
    )
    running.kubectl("wait", "--for=condition=Ready", f"node/{name}", "--timeout=120s")
    rollout = ["-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s"]
    running.kubectl(*rollout)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
