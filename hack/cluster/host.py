"""The machine below the node: programs, rights, global settings; noted before, restored after.

A kubelet and kube-proxy change settings of the whole machine and leave folders at fixed places.
Before the first of them starts, ``Before.note`` writes down what was there; ``Before.restore`` puts
back exactly that and removes only what was not there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hack.cluster.errors import ClusterError, PrerequisiteError
from hack.cluster.processes import start_time
from hack.cluster.progress import step
from hack.cluster.waiting import wait_until

__all__ = ["Before", "require_programs", "require_root", "unmount_below"]

# Program -> Debian package.
PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "buildah": "buildah",
    "skopeo": "skopeo",
    "mmdebstrap": "mmdebstrap",
    "gcc": "gcc",
}
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PLUGINS = ("bridge", "host-local", "firewall", "portmap", "loopback")
INSTALL_DEADLINE_S = 900.0

# What the kubelet and kube-proxy write, and what pods need (forwarding).
SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/ip_forward",
    "net/ipv4/conf/all/route_localnet",
    "net/bridge/bridge-nf-call-iptables",
)
# Folders at places that no flag moves: device plugins, links to logs, CNI results, shim sockets.
FIXED_FOLDERS = (
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/lib/cni",
    "/run/containerd",
)


def require_root(what: str) -> None:
    """Raise PrerequisiteError unless this process is root."""
    if os.geteuid() != 0:
        raise PrerequisiteError(
            f"{what} needs root (mounts, network, cgroups)",
            hint="Run it with sudo; the control plane alone needs no root",
        )


def cni_folder() -> Path | None:
    """The folder that holds every CNI plugin that the node uses, if there is one."""
    for folder in CNI_FOLDERS:
        if all((folder / plugin).is_file() for plugin in CNI_PLUGINS):
            return folder
    return None


def missing_programs(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are not installed; ``bridge`` stands for the CNI plugins."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [
        name
        for name in names
        if (cni_folder() is None if name == "bridge" else shutil.which(name, path=path) is None)
    ]


def require_programs(*names: str) -> None:
    """Make sure that programs are installed: with apt-get as root, else by saying what to do.

    Raises:
        PrerequisiteError: something is missing and cannot be installed from here.
    """
    missing = missing_programs(names)
    if not missing:
        return
    packages = sorted({PACKAGES[name] for name in missing})
    command = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PrerequisiteError(
            f"not installed: {', '.join(missing)}", hint=f"On Debian or Ubuntu, as root: {command}"
        )
    with step(f"installing {', '.join(packages)} with apt-get"):
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            result = subprocess.run(
                ["apt-get", "-q", *arguments],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=INSTALL_DEADLINE_S,
                check=False,
            )
            if result.returncode != 0:
                raise PrerequisiteError(
                    f"'apt-get {arguments[0]}' failed: {result.stderr.strip()[-500:]}",
                    hint=f"Install by hand: {command}",
                )
    still = missing_programs(names)
    if still:
        raise PrerequisiteError(f"apt-get installed {packages}, but {still} are still missing")


@dataclass(frozen=True)
class Before:
    """What the machine looked like before the node.

    Attributes:
        sysctls: values by path below /proc/sys.
        folders: those of FIXED_FOLDERS that existed.
        cgroups: the ``kubepods`` cgroups that existed.
        chains: netfilter chains by table, as ``netfilter.chains`` names them.
    """

    sysctls: dict[str, str]
    folders: list[str]
    cgroups: list[str]
    chains: dict[str, list[str]]

    @staticmethod
    def note(chains: dict[str, list[str]]) -> Before:
        """Look at the machine now."""
        values = {name: _read_sysctl(name) for name in SYSCTLS}
        return Before(
            sysctls={name: value for name, value in values.items() if value is not None},
            folders=[folder for folder in FIXED_FOLDERS if Path(folder).exists()],
            cgroups=[str(path) for path in _pod_cgroups()],
            chains=chains,
        )

    def save(self, file: Path) -> None:
        """Keep it for the teardown, which may be another process."""
        file.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(file: Path) -> Before:
        """Read what ``save`` wrote."""
        return Before(**json.loads(file.read_text()))

    def kill_pods(self) -> int:
        """Kill what still runs in pods' cgroups that were not there; returns how many processes.

        Only needed where containerd was killed: its containers live on without it.
        """
        ours = [cgroup for cgroup in _pod_cgroups() if str(cgroup) not in self.cgroups]
        # With cgroups v1 a process is in one hierarchy per controller, and so found many times.
        found = {pid for cgroup in ours for pid in _processes_in(cgroup)}
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: not any(_processes_in(cgroup) for cgroup in ours),
            what="the processes of pods to end",
            deadline_s=20,
        )
        return len(found)

    def restore(self) -> None:
        """Put settings back, and remove folders and cgroups that were not there."""
        for name, value in self.sysctls.items():
            if _read_sysctl(name) != value:
                (Path("/proc/sys") / name).write_text(value)
        for folder in FIXED_FOLDERS:
            if folder not in self.folders and Path(folder).exists():
                shutil.rmtree(folder)
        for cgroup in _pod_cgroups():
            if str(cgroup) not in self.cgroups:
                _remove_cgroup(cgroup)


def unmount_below(folder: Path) -> int:
    """Unmount everything mounted below a folder, deepest first; returns how many."""
    prefix = f"{folder}/"
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    # /proc/mounts writes a blank as \040; nothing of ours has one.
    mine = sorted((point for point in points if point.startswith(prefix)), reverse=True)
    for point in mine:
        run("umount", "--lazy", point)
    return len(mine)


def remove_tree(folder: Path) -> None:
    """Delete a folder that may hold left-over mounts, without reaching into what is mounted."""
    unmount_below(folder)
    if folder.exists():
        shutil.rmtree(folder)


def run(*command: str, stdin: str | None = None, deadline_s: float = 60.0) -> str:
    """Run a program of the machine and return its output.

    Raises:
        ClusterError: it failed.
    """
    result = subprocess.run(
        command,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    if result.returncode != 0:
        raise ClusterError(f"'{' '.join(command)}' failed: {result.stderr.strip()}")
    return result.stdout


def _read_sysctl(name: str) -> str | None:
    try:
        return (Path("/proc/sys") / name).read_text().strip()
    except OSError:
        return None


def _pod_cgroups() -> list[Path]:
    # One hierarchy per controller (v1), or one for all (v2).
    root = Path("/sys/fs/cgroup")
    return [path for path in (root / "kubepods", *root.glob("*/kubepods")) if path.is_dir()]


def _processes_in(cgroup: Path) -> list[int]:
    files = [cgroup / "cgroup.procs", *cgroup.rglob("cgroup.procs")]
    listed = (int(pid) for file in files for pid in file.read_text().split())
    # A zombie that nobody buries stays listed for ever.
    return [pid for pid in listed if start_time(pid) is not None]


def _remove_cgroup(cgroup: Path) -> None:
    # Only empty cgroups can be removed, and only from the leaves up.
    for folder in sorted((p for p in cgroup.rglob("*") if p.is_dir()), reverse=True):
        folder.rmdir()
    cgroup.rmdir()
