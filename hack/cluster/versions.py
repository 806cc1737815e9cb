"""The pinned versions: one row per program, with where it can come from and what is accepted.

A row says how to recognise a fitting binary that somebody else installed (``version_args`` and
``accepts``), where its official release lies, and which Go module builds it.  The modules with
their ``go.mod`` and ``go.sum`` lie in ``hack/cluster/go/<group>``; raising a version means changing
it here and there (``go get``, then ``go mod tidy``), and ``tests/cluster`` checks that both agree.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GROUPS", "KUBERNETES_VERSION", "TOOLS", "Group", "Tool", "architecture"]

KUBERNETES_VERSION = "1.34.4"
ETCD_VERSION = "3.6.16"
HELM_VERSION = "3.19.5"
CRICTL_VERSION = "1.34.0"
COREDNS_VERSION = "1.12.4"
KUBECONFORM_VERSION = "0.7.0"

GO_SOURCES = Path(__file__).parent / "go"

Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One program.

    Attributes:
        name: file name of the binary.
        group: the build group, and the folder below ``hack/cluster/go``.
        package: the Go package that builds it.
        version_args: prints the version; the first ``1.2.3`` in the output counts.
        accepts: whether a version found in KUBEBUILDER_ASSETS or PATH can be used.
        url: the official release, with ``{arch}``; a ``.tar.gz`` or ``.tgz`` is searched for name.
        checksum_url: the published sha256 (a bare digest, or lines of digest and file name).
        sha256: digests by architecture that were checked in, which win over ``checksum_url``.
    """

    name: str
    group: str
    package: str
    version_args: tuple[str, ...]
    accepts: Callable[[Version], bool]
    url: str
    checksum_url: str
    sha256: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Group:
    """Programs that one ``go build`` makes together.

    Attributes:
        minutes: rough cold build time on two cores, for the progress line.
        ldflags: linker flags; they stamp the version that the programs report.
    """

    name: str
    module: str
    version: str
    ldflags: str
    minutes: float

    @property
    def sources(self) -> Path:
        """The folder with go.mod and go.sum."""
        return GO_SOURCES / self.name


def architecture() -> str:
    """The machine as Go and the release downloads spell it."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def parse_version(text: str) -> Version | None:
    """The first dotted number in a program's version output."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else None


def _same_minor(version: str) -> Callable[[Version], bool]:
    wanted = parse_version(version)
    assert wanted is not None
    return lambda found: found[:2] == wanted[:2]


def _at_least(major: int, minor: int) -> Callable[[Version], bool]:
    return lambda found: found[0] == major and found[1] >= minor


def _x(package: str, **values: str) -> str:
    return " ".join(f"-X {package}.{key}={value}" for key, value in values.items())


def _kubernetes_ldflags() -> str:
    major, minor, _ = KUBERNETES_VERSION.split(".")
    stamp = {"gitVersion": f"v{KUBERNETES_VERSION}", "gitMajor": major, "gitMinor": minor}
    return " ".join(
        [
            "-s -w",
            _x("k8s.io/component-base/version", **stamp),
            _x("k8s.io/client-go/pkg/version", **stamp),
        ]
    )


def _helm_ldflags() -> str:
    # Without these Helm believes that it renders for Kubernetes 1.20.
    major, minor, _ = KUBERNETES_VERSION.split(".")
    versions = {"k8sVersionMajor": major, "k8sVersionMinor": minor}
    return " ".join(
        [
            "-s -w",
            _x("helm.sh/helm/v3/pkg/chartutil", **versions),
            _x("helm.sh/helm/v3/pkg/lint/rules", **versions),
            _x("helm.sh/helm/v3/internal/version", version=f"v{HELM_VERSION}"),
        ]
    )


GROUPS: dict[str, Group] = {
    group.name: group
    for group in (
        Group(
            name="kubernetes",
            module="k8s.io/kubernetes",
            version=f"v{KUBERNETES_VERSION}",
            ldflags=_kubernetes_ldflags(),
            minutes=10,
        ),
        Group(
            name="etcd",
            module="go.etcd.io/etcd/server/v3",
            version=f"v{ETCD_VERSION}",
            ldflags="-s -w",
            minutes=1,
        ),
        Group(
            name="helm",
            module="helm.sh/helm/v3",
            version=f"v{HELM_VERSION}",
            ldflags=_helm_ldflags(),
            minutes=2,
        ),
        Group(
            name="crictl",
            module="sigs.k8s.io/cri-tools",
            version=f"v{CRICTL_VERSION}",
            ldflags=f"-s -w -X sigs.k8s.io/cri-tools/pkg/version.Version=v{CRICTL_VERSION}",
            minutes=1,
        ),
        Group(
            name="coredns",
            module="github.com/coredns/coredns",
            version=f"v{COREDNS_VERSION}",
            ldflags="-s -w",
            minutes=2,
        ),
        Group(
            name="kubeconform",
            module="github.com/yannh/kubeconform",
            version=f"v{KUBECONFORM_VERSION}",
            ldflags=f"-s -w -X main.version=v{KUBECONFORM_VERSION}",
            minutes=1,
        ),
    )
}


def _kubernetes(name: str) -> Tool:
    url = f"https://dl.k8s.io/release/v{KUBERNETES_VERSION}/bin/linux/{{arch}}/{name}"
    return Tool(
        name=name,
        group="kubernetes",
        package=f"k8s.io/kubernetes/cmd/{name}",
        version_args=("version", "--client") if name == "kubectl" else ("--version",),
        accepts=_same_minor(KUBERNETES_VERSION),
        url=url,
        checksum_url=f"{url}.sha256",
    )


_ETCD = f"https://github.com/etcd-io/etcd/releases/download/v{ETCD_VERSION}"
_HELM = f"https://get.helm.sh/helm-v{HELM_VERSION}-linux-{{arch}}.tar.gz"
_CRI = f"https://github.com/kubernetes-sigs/cri-tools/releases/download/v{CRICTL_VERSION}"
_COREDNS = (
    f"https://github.com/coredns/coredns/releases/download/v{COREDNS_VERSION}/"
    f"coredns_{COREDNS_VERSION}_linux_{{arch}}.tgz"
)
_KUBECONFORM = f"https://github.com/yannh/kubeconform/releases/download/v{KUBECONFORM_VERSION}"

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        _kubernetes("kube-apiserver"),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        _kubernetes("kubelet"),
        _kubernetes("kube-proxy"),
        _kubernetes("kubectl"),
        Tool(
            name="etcd",
            group="etcd",
            package="go.etcd.io/etcd/server/v3",
            version_args=("--version",),
            accepts=_at_least(3, 5),
            url=f"{_ETCD}/etcd-v{ETCD_VERSION}-linux-{{arch}}.tar.gz",
            checksum_url=f"{_ETCD}/SHA256SUMS",
        ),
        Tool(
            name="helm",
            group="helm",
            package="helm.sh/helm/v3/cmd/helm",
            version_args=("version", "--short"),
            accepts=_at_least(3, 16),
            url=_HELM,
            checksum_url=f"{_HELM}.sha256sum",
        ),
        Tool(
            name="crictl",
            group="crictl",
            package="sigs.k8s.io/cri-tools/cmd/crictl",
            version_args=("--version",),
            accepts=_at_least(1, 28),
            url=f"{_CRI}/crictl-v{CRICTL_VERSION}-linux-{{arch}}.tar.gz",
            checksum_url=f"{_CRI}/crictl-v{CRICTL_VERSION}-linux-{{arch}}.tar.gz.sha256",
        ),
        Tool(
            name="coredns",
            group="coredns",
            package="kerf.dev/hack/cluster/coredns",
            version_args=("-version",),
            accepts=_at_least(1, 11),
            url=_COREDNS,
            checksum_url=f"{_COREDNS}.sha256",
        ),
        Tool(
            name="kubeconform",
            group="kubeconform",
            package="github.com/yannh/kubeconform/cmd/kubeconform",
            version_args=("-v",),
            accepts=_at_least(0, 6),
            url=f"{_KUBECONFORM}/kubeconform-linux-{{arch}}.tar.gz",
            checksum_url=f"{_KUBECONFORM}/CHECKSUMS",
        ),
    )
}
