"""A real Kubernetes on this machine, for tests and the demo.

    from hack.cluster import control_plane

    with control_plane() as plane:
        plane.kubectl("apply", "-f", "crds/")

``control_plane`` runs etcd, the API server, the controller manager and the scheduler: enough for
operator and chart tests, without root and beside any number of others.  ``node`` adds containerd,
the kubelet and kube-proxy, so that pods run; it needs root and there is one per machine.
From a shell: ``python -m hack.cluster --help``.  How it works: ``docs/cluster.md``.
"""

from hack.cluster.controlplane import ControlPlane, control_plane
from hack.cluster.errors import BuildError, ClusterError, PrerequisiteError

__all__ = ["BuildError", "ClusterError", "ControlPlane", "PrerequisiteError", "control_plane"]
