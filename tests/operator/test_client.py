"""Requests of the client, and what its errors tell."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.operator.fakeserver import FakeServer, fake_server

from kerf_operator.actions import Apply, Create, Delete
from kerf_operator.client import Client, Connection, connect
from kerf_operator.errors import ApiError, ClusterError
from kerf_operator.execute import execute

MANIFEST: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "j", "namespace": "team"},
}


def kubeconfig(folder: Path, server: str, token: str | None = None) -> Path:
    path = folder / "config"
    user = f"{{token: {token}}}" if token else "{}"
    path.write_text(
        "{apiVersion: v1, kind: Config, current-context: c,"
        f" clusters: [{{name: c, cluster: {{server: '{server}'}}}}],"
        f" users: [{{name: c, user: {user}}}],"
        " contexts: [{name: c, context: {cluster: c, user: c}}]}"
    )
    return path


def client_of(fake: FakeServer, folder: Path, token: str | None = None, **options: Any) -> Client:
    return Client(connect(kubeconfig(folder, fake.url, token)), **options)


def refuse(status: int, reason: str, message: str = "no") -> Any:
    return lambda request: (status, {"kind": "Status", "reason": reason, "message": message})


def test_apply_names_its_manager_and_forces(tmp_path: Path) -> None:
    with fake_server(lambda request: (200, {"ok": True})) as fake:
        client = client_of(fake, tmp_path, "secret")
        client.apply(MANIFEST, manager="kerf-operator", subresource="status")
    request = fake.requests[0]
    assert request.method == "PATCH"
    assert request.path == (
        "/apis/batch/v1/namespaces/team/jobs/j/status?fieldManager=kerf-operator&force=true"
    )
    assert request.headers["Content-Type"] == "application/apply-patch+yaml"
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.body == MANIFEST


def test_lists_are_selected_by_the_server_and_items_know_their_kind(tmp_path: Path) -> None:
    with fake_server(lambda request: (200, {"items": [{"metadata": {"name": "p"}}]})) as fake:
        pods = client_of(fake, tmp_path).list("Pod", namespace="team", labels={"a": "b"})
    assert fake.requests[0].path == "/api/v1/namespaces/team/pods?labelSelector=a%3Db"
    assert pods == [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}]


def test_a_missing_object_is_none_and_not_an_error(tmp_path: Path) -> None:
    with fake_server(refuse(404, "NotFound")) as fake:
        client = client_of(fake, tmp_path)
        assert client.get("Pod", "p", namespace="team") is None
        client.delete("Pod", "p", namespace="team", uid="u")
    assert fake.requests[1].body["preconditions"] == {"uid": "u"}


def test_every_request_is_counted(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    with fake_server(refuse(403, "Forbidden")) as fake:
        client = client_of(fake, tmp_path, observer=lambda verb, code: seen.append((verb, code)))
        with pytest.raises(ApiError, match="Forbidden"):
            client.create(MANIFEST)
    nobody = client_of(fake, tmp_path, observer=lambda verb, code: seen.append((verb, code)))
    with pytest.raises(ApiError) as unreachable:
        nobody.get("Pod", "p", namespace="team")
    assert unreachable.value.transient
    assert seen == [("create", 403), ("get", 0)]


@pytest.mark.parametrize(
    ("code", "reason", "message", "trait"),
    [
        (409, "AlreadyExists", "", "already_exists"),
        (409, "Conflict", "", "conflict"),
        (404, "NotFound", "", "not_found"),
        (429, "TooManyRequests", "", "transient"),
        (503, "ServiceUnavailable", "", "transient"),
    ],
)
def test_errors_know_what_they_are(code: int, reason: str, message: str, trait: str) -> None:
    error = ApiError(verb="get", target="/x", code=code, reason=reason, message=message)
    traits = {"already_exists", "conflict", "not_found", "transient"}
    assert {name for name in traits if getattr(error, name)} == {trait}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_names_cannot_leave_their_place_in_the_path(tmp_path: Path) -> None:
    with fake_server(lambda request: (200, {})) as fake:
        client_of(fake, tmp_path).get("Pod", "../../secrets/x", namespace="team")
    assert fake.requests[0].path == "/api/v1/namespaces/team/pods/..%2F..%2Fsecrets%2Fx"


def test_without_a_cluster_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="--kubeconfig"):
        connect(tmp_path / "missing")


def test_a_token_is_read_anew_for_every_request() -> None:
    class Configuration:
        host = "http://x"
        tokens = iter(["Bearer one", "Bearer two"])

        def auth_settings(self) -> dict[str, Any]:
            return {"BearerToken": {"value": next(self.tokens)}}

    connection = Connection(Configuration())
    assert [connection.bearer(), connection.bearer()] == ["Bearer one", "Bearer two"]


class TestExecute:
    """Carrying out a plan."""

    delete = Delete("Pod", "team", "p", "u")

    def test_it_stops_at_the_first_refusal_and_reports_it(self, tmp_path: Path) -> None:
        with fake_server(refuse(422, "Invalid", "spec.x: wrong")) as fake:
            failures = execute(client_of(fake, tmp_path), [Apply(MANIFEST), self.delete])
        assert len(fake.requests) == 1
        assert [(f.kind, f.name, f.code, f.message) for f in failures] == [
            ("Job", "j", 422, "spec.x: wrong")
        ]

    def test_a_job_that_exists_already_is_fine(self, tmp_path: Path) -> None:
        with fake_server(refuse(409, "AlreadyExists")) as fake:
            assert execute(client_of(fake, tmp_path), [Create(MANIFEST)]) == []

    def test_an_object_that_was_made_anew_is_not_deleted(self, tmp_path: Path) -> None:
        with fake_server(refuse(409, "Conflict")) as fake:
            assert execute(client_of(fake, tmp_path), [self.delete]) == []

    def test_an_api_server_in_trouble_ends_the_reconcile(self, tmp_path: Path) -> None:
        with fake_server(refuse(503, "ServiceUnavailable")) as fake, pytest.raises(ApiError):
            execute(client_of(fake, tmp_path), [Apply(MANIFEST)])
