"""The hub over real HTTP: what is downloaded, and what each refusal says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.models.download.conftest import FILES, REPO, WANTED, Pull, contents
from tests.models.download.hub_server import COMMIT, TOKEN, Hub, Repository

from kerf_runtime.errors import ConfigError, DownloadError, SourceError


def test_what_the_loader_reads_is_downloaded_and_nothing_else(hub: Hub, pull: Pull) -> None:
    found = pull()
    assert contents(found.path) == {name: FILES[name] for name in WANTED}
    assert sorted(hub.downloads()) == sorted(WANTED)
    assert found.revision == COMMIT
    assert found.received == found.size == sum(len(FILES[name]) for name in WANTED)
    assert found.warning is None


def test_a_second_time_nothing_is_downloaded(hub: Hub, pull: Pull) -> None:
    first = pull()
    hub.requests.clear()
    second = pull()
    assert (second.path, second.received) == (first.path, 0)
    assert [path.partition("?")[0] for path, _ in hub.requests] == [
        f"/api/models/{REPO}/revision/main"
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10000], ids=["empty", "cut", "list", "deep"])
def test_a_download_whose_list_cannot_be_read_is_made_again(pull: Pull, text: str) -> None:
    first = pull()
    (first.path / ".kerf-files.json").write_text(text)
    assert contents(pull().path) == {name: FILES[name] for name in WANTED}


def test_a_commit_that_is_here_needs_nobody_to_be_asked(hub: Hub, pull: Pull) -> None:
    first = pull(revision=COMMIT)
    hub.requests.clear()
    second = pull(revision=COMMIT)
    assert (second.path, second.warning) == (first.path, None)
    assert hub.requests == []
    (first.path / "tokenizer.json").unlink()
    assert pull(revision=COMMIT).received == len(FILES["tokenizer.json"])


def test_files_are_taken_from_the_commit_that_was_listed(hub: Hub, pull: Pull) -> None:
    pull()
    assert all(f"/resolve/{COMMIT}/" in path for path, _ in hub.requests if "/resolve/" in path)


def test_a_folder_inside_the_repository(hub: Hub, pull: Pull) -> None:
    inside = {f"small/{name}": content for name, content in FILES.items()}
    hub.repositories[REPO].files = {**FILES, **inside, "small/deeper/config.json": b"{}"}
    found = pull(path="small")
    assert found.path.name == "small"
    assert contents(found.path) == {name: FILES[name] for name in WANTED}


def test_one_gguf_file_of_many(hub: Hub, pull: Pull) -> None:
    hub.repositories[REPO].files = {f"m.{kind}.gguf": kind.encode() for kind in ("Q4_K", "Q8_0")}
    found = pull(path="m.Q8_0.gguf")
    assert found.path.read_bytes() == b"Q8_0"
    assert hub.downloads() == ["m.Q8_0.gguf"]


def test_the_token_is_sent_to_the_hub_and_never_to_where_a_redirect_leads(
    hub: Hub, pull: Pull
) -> None:
    hub.repositories[REPO].private = True
    pull(token=f"{TOKEN}\n")  # as `echo ... | kubectl create secret` leaves it
    assert all(headers["Authorization"] == f"Bearer {TOKEN}" for _, headers in hub.requests)
    assert len(hub.kept) == 1
    assert "Authorization" not in hub.kept[0][1]


def test_the_token_of_a_login_is_used(hub: Hub, pull: Pull, tmp_path: Path) -> None:
    hub.repositories[REPO].private = True
    (tmp_path / "token").write_text(TOKEN)
    assert pull().received > 0


def test_the_endpoint_of_the_document_wins(hub: Hub, pull: Pull) -> None:
    environ = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert pull(environ=environ, endpoint=f"{hub.endpoint}/").received > 0


def test_a_branch_with_a_slash_is_one_revision(hub: Hub, pull: Pull) -> None:
    hub.repositories[REPO].revisions = ("refs/pr/1",)
    assert pull(revision="refs/pr/1").received > 0


def refused(pull: Pull, **arguments: str) -> str:
    with pytest.raises(SourceError) as raised:
        pull(**arguments)
    assert raised.value.exit_code == 3
    assert raised.value.hint
    assert TOKEN not in str(raised.value)
    return str(raised.value)


def test_401_without_a_token_says_that_one_may_be_needed(hub: Hub, pull: Pull) -> None:
    hub.repositories[REPO].private = True
    message = refused(pull)
    assert message.startswith(f"hub {REPO}@main: 401: there is no repository {REPO}, or it is priv")
    assert "HF_TOKEN (in a cluster: tokenSecretRef)" in message


def test_401_with_a_token_says_that_it_is_not_accepted(pull: Pull) -> None:
    message = refused(pull, token="hf_old")
    assert "401: the hub does not accept the token" in message
    assert "expired" in message
    assert "hf_old" not in message


def test_403_of_a_gated_repository_says_where_to_accept_its_conditions(
    hub: Hub, pull: Pull
) -> None:
    hub.repositories[REPO].gated, hub.granted = True, False
    message = refused(pull, token=TOKEN)
    assert "403: the repository is gated and the owner of the token has no access" in message
    assert f"Accept its conditions at {hub.endpoint}/{REPO}" in message


def test_a_gated_repository_without_a_token_asks_for_one(hub: Hub, pull: Pull) -> None:
    hub.repositories[REPO].gated = True
    assert "401: the repository is gated and there is no token" in refused(pull)


def test_403_otherwise_is_about_the_permissions_of_the_token(hub: Hub, pull: Pull) -> None:
    hub.repositories[REPO].private, hub.granted = True, False
    assert f"403: the token may not read {REPO}" in refused(pull, token=TOKEN)


def test_404_of_a_repository(pull: Pull) -> None:
    assert "404: there is no repository org/other" in refused(pull, repo="org/other", token=TOKEN)


def test_404_of_a_revision(hub: Hub, pull: Pull) -> None:
    message = refused(pull, revision="v2")
    assert "404: the repository has no revision v2" in message
    assert f"{hub.endpoint}/{REPO}/refs" in message


def test_404_of_a_path(pull: Pull) -> None:
    assert "there is nothing at small/model.gguf" in refused(pull, path="small/model.gguf")


def test_404_of_a_file_that_was_listed(hub: Hub, pull: Pull) -> None:
    class Vanishing(dict[str, bytes]):
        def __contains__(self, name: object) -> bool:
            return name != "tokenizer.json"

    hub.repositories[REPO].files = Vanishing(FILES)
    assert "404: tokenizer.json is listed and not there" in refused(pull)


def test_a_refusal_of_another_kind_is_passed_on(hub: Hub, pull: Pull) -> None:
    hub.faults.statuses = [451]
    assert "the hub answered 451" in refused(pull)


def test_a_page_that_is_no_answer_of_a_hub_is_told(hub: Hub, pull: Pull) -> None:
    hub.faults.statuses = [200]  # with a body that is no JSON, as a portal's
    assert "did not answer as a hub does" in refused(pull)


def test_a_repository_without_a_checkpoint(hub: Hub, pull: Pull) -> None:
    hub.repositories["org/data"] = Repository({"data.csv": b"1"})
    assert "there is no checkpoint; found data.csv" in refused(pull, repo="org/data")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def unreachable(pull: Pull, endpoint: str) -> str:
    with pytest.raises(DownloadError) as raised:
        pull(environ={"HF_ENDPOINT": endpoint})
    assert raised.value.exit_code == 8
    assert "Check the network" in str(raised.value)
    return str(raised.value)


def test_a_refused_connection_says_who_refused_it(pull: Pull) -> None:
    port = closed_port()
    message = unreachable(pull, f"http://127.0.0.1:{port}")
    assert f"127.0.0.1:{port} refuses the connection (tried 3 times)" in message


def test_a_name_that_cannot_be_resolved_asks_for_a_network(pull: Pull) -> None:
    message = unreachable(pull, "http://nowhere.invalid")
    assert "the name of nowhere.invalid cannot be resolved" in message


def test_a_proxy_is_used(hub: Hub, pull: Pull, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[REPO].lfs = frozenset()
    monkeypatch.setenv("http_proxy", hub.endpoint)
    pull(environ={"HF_ENDPOINT": "http://hub.invalid"})
    assert all(path.startswith("http://hub.invalid/") for path, _ in hub.requests)


def test_a_repository_that_was_renamed_is_followed(hub: Hub, pull: Pull) -> None:
    hub.repositories[REPO].private = True
    hub.renamed["old/name"] = REPO
    assert pull(repo="old/name", token=TOKEN).received > 0


def test_a_server_that_speaks_no_tls(hub: Hub, pull: Pull) -> None:
    message = unreachable(pull, hub.endpoint.replace("http:", "https:"))
    assert "the TLS connection to 127.0.0.1" in message


def test_a_server_that_is_busy_is_asked_again(hub: Hub, pull: Pull) -> None:
    hub.faults.statuses = [503, 429]
    assert pull().received > 0


def test_a_server_that_stays_down_is_given_up(hub: Hub, pull: Pull) -> None:
    hub.faults.statuses = [502] * 3
    assert "answered 502 Bad Gateway (tried 3 times)" in unreachable(pull, hub.endpoint)


@pytest.mark.parametrize("address", ["hub.example", "ftp://hub.example", "http://", "http://[::"])
def test_an_endpoint_that_is_no_address_is_a_wrong_variable(pull: Pull, address: str) -> None:
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        pull(environ={"HF_ENDPOINT": address})


@pytest.mark.parametrize("token", ["hf_ü", "a\nb"])
def test_a_token_that_cannot_be_one_is_a_wrong_variable(pull: Pull, token: str) -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        pull(token=token)


def test_offline_mode_uses_what_is_here_and_asks_nobody(hub: Hub, pull: Pull) -> None:
    first = pull()
    hub.requests.clear()
    second = pull(environ={"HF_HUB_OFFLINE": "1"})
    assert second.path == first.path
    assert second.warning == "HF_HUB_OFFLINE is set"
    assert hub.requests == []


def test_offline_mode_without_a_download_says_what_to_do(pull: Pull) -> None:
    with pytest.raises(DownloadError, match="the model is not here and HF_HUB_OFFLINE is set"):
        pull(environ={"HF_HUB_OFFLINE": "1"})
