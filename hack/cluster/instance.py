"""One instance of a cluster: its name, state folder, ports and address ranges.

Ports are not configured but found: every instance owns a slot, and a slot is twenty consecutive
ports and one service range.  The lowest slot that no other state folder holds and whose ports are
all free is taken under a lock, so any number of control planes start at once without a clash.

    slot n   ports 26000 + 20 n ...   services 10.(98 + n).0.0/16

The range lies below both the NodePorts (30000) and the kernel's ephemeral ports (32768).
"""

from __future__ import annotations

import json
import shutil
import socket
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.cluster.locks import file_lock
from hack.cluster.processes import Owner

__all__ = ["Instance", "claim", "find", "instances", "release"]

FIRST_PORT = 26000
PORTS_PER_SLOT = 20
SLOTS = 100

# In this order from the slot's first port on.
PORT_NAMES = (
    "api",
    "etcd",
    "etcd_peer",
    "controller_manager",
    "scheduler",
    "kubelet",
    "kubelet_health",
    "proxy_health",
    "proxy_metrics",
)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """The parameters of one cluster; everything it writes lies below ``state``.

    Attributes:
        owner: the process to whose life the cluster is bound (a test session), or None for one
            that was brought up from the command line and stays until it is brought down.
    """

    name: str
    state: Path
    slot: int
    owner: Owner | None = None
    node_name: str = "kerf-node"
    node_ip: str = "10.97.255.1"
    node_bridge: str = "kerf-node0"
    pod_bridge: str = "kerf-pods0"
    pod_range: str = "10.97.0.0/24"

    def port(self, name: str) -> int:
        """The port of one component."""
        return FIRST_PORT + self.slot * PORTS_PER_SLOT + PORT_NAMES.index(name)

    @property
    def service_range(self) -> str:
        """The range of cluster IPs."""
        return f"10.{98 + self.slot}.0.0/16"

    @property
    def api_service_ip(self) -> str:
        """The cluster IP of the ``kubernetes`` Service: always the first of the range."""
        return f"10.{98 + self.slot}.0.1"

    @property
    def dns_ip(self) -> str:
        """The cluster IP of cluster DNS."""
        return f"10.{98 + self.slot}.0.10"

    @property
    def pki(self) -> Path:
        """Certificates and keys."""
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.state / "log"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.state / "admin.kubeconfig"

    @property
    def machine_before(self) -> Path:
        """Where a node keeps what it changes of the machine; exists for nodes only."""
        return self.state / "before.json"

    @property
    def has_node(self) -> bool:
        """Whether a node was started beside the control plane."""
        return self.machine_before.exists()

    @property
    def containerd_socket(self) -> Path:
        """The socket of this instance's containerd."""
        return self.state / "containerd" / "containerd.sock"


def runs_folder(cache: Path) -> Path:
    """Where the state folders lie."""
    return cache / "run"


def claim(cache: Path, name: str, *, owner: Owner | None = None) -> Instance:
    """The instance of that name: the one that exists, or a new one with a slot of its own.

    Raises:
        ClusterError: every slot is taken.
    """
    with _slots_lock(cache):
        existing = find(cache, name)
        if existing is not None:
            return existing
        taken = {instance.slot for instance in instances(cache)}
        for slot in range(SLOTS):
            candidate = Instance(name=name, state=runs_folder(cache) / name, slot=slot, owner=owner)
            if slot not in taken and all(_is_free(candidate.port(p)) for p in PORT_NAMES):
                _write(candidate)
                return candidate
    raise ClusterError(
        f"all {SLOTS} slots for clusters are taken",
        where=str(runs_folder(cache)),
        hint="Bring some down: python -m hack.cluster status",
    )


def release(cache: Path, instance: Instance) -> None:
    """Forget the instance and delete its state folder (nothing may be mounted below it)."""
    with _slots_lock(cache):
        shutil.rmtree(instance.state)


def find(cache: Path, name: str) -> Instance | None:
    """The instance of that name, if it exists."""
    return _read(runs_folder(cache) / name)


def instances(cache: Path) -> list[Instance]:
    """Every instance that has a state folder."""
    folder = runs_folder(cache)
    if not folder.is_dir():
        return []
    found = (_read(child) for child in sorted(folder.iterdir()))
    return [instance for instance in found if instance is not None]


def _slots_lock(cache: Path) -> AbstractContextManager[None]:
    return file_lock(cache / "locks" / "slots.lock", purpose="choosing ports", deadline_s=60)


def _write(instance: Instance) -> None:
    instance.logs.mkdir(parents=True, exist_ok=True)
    values = {
        "name": instance.name,
        "slot": instance.slot,
        "owner": asdict(instance.owner) if instance.owner else None,
    }
    file = instance.state / "instance.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(values))
    partial.replace(file)


def _read(state: Path) -> Instance | None:
    try:
        values = json.loads((state / "instance.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    owner = Owner(**values["owner"]) if values["owner"] else None
    return Instance(name=values["name"], state=state, slot=values["slot"], owner=owner)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers themselves do; a connection in TIME_WAIT does not make a port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
