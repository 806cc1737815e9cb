"""Certificates and kubeconfigs: one CA per instance, made in a quarter of a second.

Everything is signed by a CA of the instance's own whose key never leaves the state folder; the
front proxy has a second CA, because the API server trusts whoever it signs to name any user.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hack.cluster.instance import Instance

__all__ = ["create_pki", "write_kubeconfig"]

VALID = datetime.timedelta(days=3650)
COMPONENTS = ("admin", "controller-manager", "scheduler", "kubelet", "proxy")


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def create_pki(instance: Instance) -> None:
    """Write every certificate, key and kubeconfig of an instance, unless they exist."""
    done = instance.pki / "complete"
    if done.exists():
        return
    folder = instance.pki
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    ca = _authority(folder, "ca", f"kerf-{instance.name}-ca")
    front_proxy = _authority(folder, "front-proxy-ca", f"kerf-{instance.name}-front-proxy-ca")

    hosts = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    hosts.append("kubernetes.default.svc.cluster.local")
    api = [*hosts, "127.0.0.1", instance.node_ip, instance.api_service_ip]
    _server(folder, ca, "apiserver", "kube-apiserver", api)
    local = ["localhost", "127.0.0.1"]
    _server(folder, ca, "controller-manager-serving", "kube-controller-manager", local)
    _server(folder, ca, "scheduler-serving", "kube-scheduler", local)
    node = instance.node_name
    _server(folder, ca, "kubelet-serving", node, [node, instance.node_ip, "127.0.0.1"])

    _client(folder, ca, "apiserver-kubelet-client", "kube-apiserver", "system:masters")
    _client(folder, front_proxy, "front-proxy-client", "front-proxy-client")
    _client(folder, ca, "admin", "kerf-admin", "system:masters")
    _client(folder, ca, "controller-manager", "system:kube-controller-manager")
    _client(folder, ca, "scheduler", "system:kube-scheduler")
    _client(folder, ca, "kubelet", f"system:node:{node}", "system:nodes")
    _client(folder, ca, "proxy", "system:kube-proxy")

    signer = ec.generate_private_key(ec.SECP256R1())
    _write(folder / "service-account.key", _private(signer))
    _write(
        folder / "service-account.pub",
        signer.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    )
    for name in COMPONENTS:
        target = instance.kubeconfig if name == "admin" else kubeconfig(instance, name)
        write_kubeconfig(
            target,
            instance,
            {
                "client-certificate-data": _encoded(folder / f"{name}.crt"),
                "client-key-data": _encoded(folder / f"{name}.key"),
            },
        )
    done.touch()


def kubeconfig(instance: Instance, name: str) -> Path:
    """The kubeconfig of one component."""
    return instance.state / f"{name}.kubeconfig"


def write_kubeconfig(target: Path, instance: Instance, user: dict[str, str]) -> None:
    """Write a kubeconfig for processes on this machine; ``user`` is its ``users[0].user``."""
    cluster = {
        "server": f"https://127.0.0.1:{instance.port('api')}",
        "certificate-authority-data": _encoded(instance.pki / "ca.crt"),
    }
    name = f"kerf-{instance.name}"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    # JSON is YAML, and needs no care about quoting.
    _write(target, json.dumps(document, indent=2).encode())


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _authority(folder: Path, name: str, common_name: str) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(common_name)
    usage = _usage(sign=True)
    certificate = (
        _builder(subject, subject, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _store(folder, name, certificate, key)
    return _Authority(certificate, key)


def _server(folder: Path, ca: _Authority, name: str, common_name: str, hosts: list[str]) -> None:
    alternative = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    _leaf(folder, ca, name, _name(common_name), ExtendedKeyUsageOID.SERVER_AUTH, alternative)


def _client(
    folder: Path, ca: _Authority, name: str, common_name: str, organization: str | None = None
) -> None:
    subject = _name(common_name, organization)
    _leaf(folder, ca, name, subject, ExtendedKeyUsageOID.CLIENT_AUTH, None)


def _leaf(
    folder: Path,
    ca: _Authority,
    name: str,
    subject: x509.Name,
    purpose: x509.ObjectIdentifier,
    alternative: x509.SubjectAlternativeName | None,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(subject, ca.certificate.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    )
    if alternative is not None:
        builder = builder.add_extension(alternative, critical=False)
    _store(folder, name, builder.sign(ca.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A clock that was set back a little must not make a new certificate invalid.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + VALID)
    )


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_encipherment=not sign,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str, organization: str | None = None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _store(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    _write(folder / f"{name}.key", _private(key))
    _write(folder / f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first moment on."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
