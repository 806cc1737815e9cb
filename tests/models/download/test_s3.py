"""S3 over real HTTP: against moto, which checks signatures and permissions, and against odd answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.models.download.conftest import FILES, QUICK, WANTED, contents
from tests.models.download.s3_server import (
    Bucket,
    Canned,
    Keys,
    check_permissions,
    running_canned,
    running_moto,
)

from kerf_runtime.config.source import ModelSource
from kerf_runtime.errors import ConfigError, DownloadError, SourceError
from kerf_runtime.models.download import Downloaded, Retry, download
from kerf_runtime.models.download.remote import RemoteFile
from kerf_runtime.models.download.s3 import S3Remote

PART = 5 * 2**20
PARTS = bytes(range(251)) * 50_000  # 12.5 MB, three parts
Pull = Callable[..., Downloaded]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with running_moto() as found:
        for name, content in FILES.items():
            found.put(f"llama/{name}", content)
            found.put(f"llama/deeper/{name}", b"not wanted")
        found.put("public/m.gguf", b"GGUF", acl="public-read")
        found.put("gguf/m.Q4_K.gguf", b"Q4_K" * 1000)
        found.put("gguf/m.Q8_0.gguf", b"Q8_0" * 1000)
        found.put("large/config.json", FILES["config.json"])
        found.put("large/model.safetensors", PARTS, part_bytes=PART)
        yield found


@pytest.fixture
def pull(bucket: Bucket, tmp_path: Path) -> Pull:
    """``pull(prefix=...)`` downloads with the reader's keys, or with others."""

    def pull(
        *,
        keys: Keys | None = bucket.reader,
        environ: dict[str, str] | None = None,
        retry: Retry = QUICK,
        **source: Any,
    ) -> Downloaded:
        variables = {
            "AWS_ENDPOINT_URL": bucket.endpoint,
            **({} if keys is None else keys.environ),
            **(environ or {}),
        }
        wanted = {"s3": {"bucket": bucket.name, "prefix": "llama", **source}}
        return download(
            ModelSource.model_validate(wanted), tmp_path / "models", environ=variables, retry=retry
        )

    return pull


def test_what_the_loader_reads_is_downloaded_and_nothing_else(pull: Pull) -> None:
    found = pull()
    assert contents(found.path) == {name: FILES[name] for name in WANTED}
    assert found.source == "s3://models/llama"
    assert found.revision is None
    assert pull().received == 0


def test_a_slash_at_the_end_of_the_prefix_does_not_matter(pull: Pull) -> None:
    assert contents(pull(prefix="llama/").path) == contents(pull().path)


def test_one_gguf_file_by_its_key(pull: Pull) -> None:
    found = pull(prefix="gguf/m.Q8_0.gguf")
    assert found.path.name == "m.Q8_0.gguf"
    assert found.path.read_bytes() == b"Q8_0" * 1000


def test_the_endpoint_of_the_document_wins(bucket: Bucket, pull: Pull) -> None:
    environ = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    assert pull(environ=environ, endpoint=bucket.endpoint).received > 0


def test_a_public_bucket_needs_no_keys(bucket: Bucket, pull: Pull) -> None:
    check_permissions(bucket.endpoint, False)
    try:
        assert pull(keys=None, prefix="public").received > 0
    finally:
        check_permissions(bucket.endpoint, True)


def test_a_file_of_several_parts_is_verified_by_the_digests_of_its_parts(
    bucket: Bucket, pull: Pull
) -> None:
    assert contents(pull(prefix="large").path)["model.safetensors"] == PARTS
    remote = remote_of(bucket, prefix="large")
    file = next(file for file in remote.list() if file.name == "model.safetensors")
    assert file.etag.endswith("-3")
    found = remote.digest(file)
    assert found is not None
    assert (found.algorithm, found.value, found.part_bytes) == ("md5-parts", file.etag, PART)
    remote.close()


def remote_of(bucket: Bucket, **source: str) -> S3Remote:
    wanted = ModelSource.model_validate({"s3": {"bucket": bucket.name, **source}}).s3
    assert wanted is not None
    return S3Remote(wanted, {"AWS_ENDPOINT_URL": bucket.endpoint, **bucket.reader.environ})


def test_a_file_is_read_from_any_byte_on(bucket: Bucket) -> None:
    remote = remote_of(bucket, prefix="llama")
    file = next(file for file in remote.list() if file.name == "model.safetensors")
    with remote.open(file, 1_000_000) as stream:
        assert stream.offset == 1_000_000
        assert b"".join(stream.chunks) == FILES["model.safetensors"][1_000_000:]
    remote.close()


def test_a_download_goes_on_where_the_last_one_ended(pull: Pull, tmp_path: Path) -> None:
    whole = pull()
    weights, size = FILES["model.safetensors"], len(FILES["model.safetensors"])
    (whole.path / "model.safetensors").rename(whole.path / "model.safetensors.part")
    (whole.path / "model.safetensors.part").write_bytes(weights[: size - 1000])
    again = pull()
    assert again.received == 1000
    assert (again.path / "model.safetensors").read_bytes() == weights


def test_a_file_that_changes_meanwhile_is_noticed(bucket: Bucket) -> None:
    remote = remote_of(bucket, prefix="llama")
    stale = RemoteFile("config.json", len(FILES["config.json"]), "0" * 32)
    with pytest.raises(DownloadError, match="a file changed while it was downloaded"):  # noqa: SIM117
        with remote.open(stale, 0):
            pass
    remote.close()


def refused(pull: Pull, **arguments: Any) -> str:
    with pytest.raises(SourceError) as raised:
        pull(**arguments)
    assert raised.value.exit_code == 3
    assert raised.value.hint
    return str(raised.value)


def test_a_key_that_nobody_knows(pull: Pull) -> None:
    message = refused(pull, keys=Keys("AKIAXXXXXXXXXXXXXXXX", "x" * 40))
    assert "does not know the access key" in message
    assert "credentialsSecretRef" in message


def test_a_secret_that_is_wrong(bucket: Bucket, pull: Pull) -> None:
    message = refused(pull, keys=Keys(bucket.reader.access, "x" * 40))
    assert "403: the secret key does not belong to the access key" in message
    assert "x" * 40 not in message


def test_a_user_who_may_not_read_the_bucket(bucket: Bucket, pull: Pull) -> None:
    message = refused(pull, keys=bucket.stranger)
    assert message == (
        "s3://models/llama: 403: the credentials may not read the bucket. "
        "Allow them s3:ListBucket and s3:GetObject"
    )


def test_a_bucket_that_does_not_exist(pull: Pull) -> None:
    assert "404: there is no bucket other" in refused(pull, bucket="other")


def test_a_prefix_below_which_there_is_nothing(pull: Pull) -> None:
    assert "s3://models/mistral: there are no files" in refused(pull, prefix="mistral")


def test_a_key_that_does_not_exist(pull: Pull) -> None:
    assert "there is nothing at m.gguf" in refused(pull, prefix="gguf/m.gguf")


def test_a_folder_of_several_gguf_files(pull: Pull) -> None:
    message = refused(pull, prefix="gguf")
    assert "there are 2 GGUF files: m.Q4_K.gguf, m.Q8_0.gguf" in message


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://127.0.0.1:9", "127.0.0.1:9 refuses the connection (tried 3 times)"),
        ("http://nowhere.invalid", "the name of nowhere.invalid cannot be resolved"),
    ],
)
def test_a_storage_that_cannot_be_reached(pull: Pull, address: str, words: str) -> None:
    with pytest.raises(DownloadError) as raised:
        pull(endpoint=address)
    assert words in str(raised.value)
    assert raised.value.exit_code == 8


def test_without_a_network_the_last_download_is_used(pull: Pull) -> None:
    first = pull()
    second = pull(environ={"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    assert second.path == first.path
    assert "refuses the connection" in str(second.warning)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_of_the_credentials_is_a_wrong_environment(pull: Pull, name: str) -> None:
    with pytest.raises(ConfigError, match="only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS"):
        pull(keys=None, environ={name: "x"})


@pytest.mark.parametrize("address", ["minio:9000", "http://", "http://minio/path", "ftp://minio"])
def test_an_endpoint_that_is_no_address_is_a_wrong_variable(pull: Pull, address: str) -> None:
    with pytest.raises(ConfigError, match=r"^AWS_ENDPOINT_URL: .*address"):
        pull(environ={"AWS_ENDPOINT_URL": address})


@pytest.fixture
def canned() -> Iterator[Canned]:
    with running_canned() as found:
        yield found


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("ExpiredToken", 400, "403: the session has expired (ExpiredToken)"),
        ("InvalidToken", 400, "the session has expired (InvalidToken)"),
        ("AuthorizationHeaderMalformed", 400, "the bucket is in another region (Told by Auth"),
        ("RequestTimeTooSkewed", 403, "the clock of this machine is wrong"),
        ("AllAccessDisabled", 403, "answered AllAccessDisabled: Told by AllAccessDisabled"),
    ],
)
def test_other_refusals(canned: Canned, pull: Pull, code: str, status: int, words: str) -> None:
    canned.error = (code, status)
    assert words in refused(pull, endpoint=canned.endpoint)


def test_a_bucket_that_is_not_public_asks_for_keys(canned: Canned, pull: Pull) -> None:
    canned.error = ("AccessDenied", 403)
    message = refused(pull, endpoint=canned.endpoint, keys=None)
    assert "403: the bucket is not public, and there are no credentials" in message
    assert "Authorization" not in canned.requests[0][1]


def test_a_refusal_without_an_explanation_is_one_too(canned: Canned, pull: Pull) -> None:
    canned.page, canned.page_status = b"Forbidden", 403
    message = refused(pull, endpoint=canned.endpoint)
    assert "403: the credentials may not read the bucket" in message


def test_a_gateway_that_fails_is_asked_again(canned: Canned, pull: Pull) -> None:
    canned.page, canned.page_status = b"Bad Gateway", 502
    with pytest.raises(DownloadError, match=r"answered 502 \(tried 3 times\)"):
        pull(endpoint=canned.endpoint)


@pytest.mark.parametrize("code", ["SlowDown", "InternalError", "ServiceUnavailable"])
def test_a_storage_that_is_busy_is_asked_again(canned: Canned, pull: Pull, code: str) -> None:
    canned.error = (code, 503)
    with pytest.raises(DownloadError, match=rf"answered {code}.* \(tried 3 times\)"):
        pull(endpoint=canned.endpoint)
    assert len(canned.requests) == 3


@pytest.mark.parametrize("page", [b"<html>Log in<br></html>", b"", b"{}"])
def test_a_page_that_is_no_answer_of_s3_is_told(canned: Canned, pull: Pull, page: bytes) -> None:
    canned.page = page
    assert "did not answer as S3 does" in refused(pull, endpoint=canned.endpoint)


GGUF = b"GGUF" * 1000


def serve_file(canned: Canned, etag: str) -> None:
    canned.files, canned.etags = {"m.gguf": GGUF}, {"m.gguf": etag}


def test_a_broken_connection_is_taken_up_where_it_broke(canned: Canned, pull: Pull) -> None:
    serve_file(canned, hashlib.md5(GGUF).hexdigest())
    canned.breaks = 2
    found = pull(endpoint=canned.endpoint, prefix=None)
    assert found.path.joinpath("m.gguf").read_bytes() == GGUF
    asked = [headers.get("Range") for path, headers in canned.requests if "/m.gguf" in path]
    assert asked == [None, "bytes=2000-", "bytes=3000-"]
    assert all(
        headers["If-Match"].strip('"') == canned.etags["m.gguf"]
        for path, headers in canned.requests
        if "/m.gguf" in path
    )


def test_a_damaged_file_is_downloaded_again(canned: Canned, pull: Pull) -> None:
    serve_file(canned, hashlib.md5(GGUF).hexdigest())
    canned.flip = 1
    assert pull(endpoint=canned.endpoint, prefix=None).path.joinpath("m.gguf").read_bytes() == GGUF
    assert len(canned.requests) == 3


def test_an_etag_that_is_no_digest_is_recognised_by_two_equal_downloads(
    canned: Canned, pull: Pull
) -> None:
    serve_file(canned, "0" * 32)
    assert pull(endpoint=canned.endpoint, prefix=None).path.joinpath("m.gguf").read_bytes() == GGUF
    assert len(canned.requests) == 3


@pytest.mark.parametrize(
    "headers",
    [
        {"x_amz_server_side_encryption": "aws:kms"},
        {"x_amz_server_side_encryption_customer_algorithm": "AES256"},
    ],
)
def test_the_etag_of_an_encrypted_file_is_no_digest(
    canned: Canned, pull: Pull, headers: dict[str, str]
) -> None:
    serve_file(canned, "0" * 32)
    canned.headers = headers
    assert pull(endpoint=canned.endpoint, prefix=None).received == len(GGUF)
    assert len(canned.requests) == 2


def test_a_storage_that_knows_no_parts_is_taken_at_its_size(canned: Canned, pull: Pull) -> None:
    serve_file(canned, "0" * 32 + "-7")
    canned.knows_parts = False
    assert pull(endpoint=canned.endpoint, prefix=None).received == len(GGUF)


@pytest.mark.parametrize("etag", ["", "0" * 32 + "-7", "W-anything"])
def test_an_etag_of_which_nothing_is_known_compares_nothing(
    canned: Canned, pull: Pull, etag: str
) -> None:
    serve_file(canned, etag)
    assert pull(endpoint=canned.endpoint, prefix=None).received == len(GGUF)


def test_temporary_credentials_send_their_session(canned: Canned, pull: Pull) -> None:
    serve_file(canned, "")
    pull(endpoint=canned.endpoint, prefix=None, environ={"AWS_SESSION_TOKEN": "session"})
    sent = {name.lower(): value for name, value in canned.requests[0][1].items()}
    assert sent["x-amz-security-token"] == "session"
    assert "/us-east-1/s3/aws4_request" in sent["authorization"]


def test_without_keys_the_role_of_a_container_is_asked_for_some(
    canned: Canned, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_file(canned, "")
    variable, address = "AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{canned.endpoint}/credentials"
    monkeypatch.setenv(variable, address)
    pull(endpoint=canned.endpoint, prefix=None, keys=None, environ={variable: address})
    signed = canned.requests[-1][1]["Authorization"]
    assert "Credential=ASIAROLE/" in signed


@pytest.mark.parametrize(
    ("endpoint", "environ", "region"),
    [
        (None, {}, None),
        ("https://s3.eu-west-1.amazonaws.com", {}, None),
        ("https://minio.test", {}, "us-east-1"),
        ("https://minio.test", {"AWS_REGION": "eu-west-1"}, "eu-west-1"),
    ],
)
def test_only_aws_is_asked_for_the_region_of_a_bucket(
    endpoint: str | None, environ: dict[str, str], region: str | None
) -> None:
    source = ModelSource.model_validate({"s3": {"bucket": "models", "endpoint": endpoint}}).s3
    assert source is not None
    remote = S3Remote(source, environ)
    assert remote.region == region
    remote.close()


def test_requests_are_signed_for_the_region_of_the_document(canned: Canned, pull: Pull) -> None:
    serve_file(canned, "")
    pull(endpoint=canned.endpoint, prefix=None, region="eu-west-1")
    assert "/eu-west-1/s3/aws4_request" in canned.requests[0][1]["Authorization"]
