"""S3, and storages that speak its protocol: MinIO, Ceph, Cloudflare R2 and others.

The ``minio`` client signs requests and reads lists.  A file is compared with its ETag, which is the md5
of the content, or for a multipart upload of the md5s of its parts (their size is asked for); storages
that make ETags otherwise are recognised by two downloads being equal.  A file that changes while it is
downloaded is noticed (``If-Match``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import SplitResult
from xml.etree.ElementTree import ParseError

import urllib3

from kerf_runtime.config.source import S3Source
from kerf_runtime.errors import ConfigError, DownloadError, SourceError
from kerf_runtime.models.download.remote import Digest, Interrupted, RemoteFile, Stream
from kerf_runtime.models.download.transport import chunks, connections, explain, parse_address

__all__ = ["S3Remote"]

T = TypeVar("T")
_AWS = "https://s3.amazonaws.com"
_ROLE_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_GIVE_KEYS = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (in a cluster: credentialsSecretRef)"
_TRANSIENT = (
    "InternalError",
    "ServiceUnavailable",
    "SlowDown",
    "RequestTimeout",
    "OperationAborted",
)
_CHANGED = {
    "PreconditionFailed": "a file changed while it was downloaded",
    "NoSuchKey": "a file was removed while it was downloaded",
}
_OTHER_REGION = (
    "the bucket is in another region ({said})",
    "Set model.source.s3.region or AWS_REGION",
)
_EXPIRED = ("403: the session has expired ({code})", "Get new temporary credentials")
_REFUSALS = {
    "NoSuchBucket": ("404: there is no bucket {bucket}", "Correct model.source.s3.bucket"),
    "InvalidAccessKeyId": ("403: {address} does not know the access key", _GIVE_KEYS),
    "SignatureDoesNotMatch": ("403: the secret key does not belong to the access key", _GIVE_KEYS),
    "AccessDenied": (
        "403: the credentials may not read the bucket",
        "Allow them s3:ListBucket and s3:GetObject",
    ),
    "ExpiredToken": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "IllegalLocationConstraintException": _OTHER_REGION,
    "PermanentRedirect": _OTHER_REGION,
    "RequestTimeTooSkewed": (
        "403: the clock of this machine is wrong",
        "Set it; requests are signed with the time",
    ),
}
_PRIVATE = ("403: the bucket is not public, and there are no credentials", _GIVE_KEYS)
_UNKNOWN = ("{address} answered {code}: {said}", "See the log of the storage")


class S3Remote:
    """A folder of a bucket, or one GGUF file; see ``Remote``.

    Attributes:
        region: what requests are signed for; None for whatever AWS says of the bucket.
    """

    def __init__(self, source: S3Source, environ: Mapping[str, str]) -> None:
        from minio import Minio
        from minio.credentials import IamAwsProvider

        self.where = source.address
        self.path = source.file
        self.revision: str | None = None
        self._bucket = source.bucket
        self._prefix = source.folder if source.file is None else source.folder.rpartition("/")[0]
        self._prefix += "/" if self._prefix else ""
        endpoint = _endpoint(source, environ)
        self._address = endpoint.netloc
        self.region = _region(source, environ, endpoint.hostname or "")
        key, secret, session = _keys(environ)
        has_role = key is None and any(environ.get(name) for name in _ROLE_VARIABLES)
        self._has_credentials = key is not None or has_role
        self._pool = connections(endpoint, environ, redirects=0)
        self._client = Minio(
            self._address,
            access_key=key,
            secret_key=secret,
            session_token=session,
            credentials=IamAwsProvider() if has_role else None,
            secure=endpoint.scheme == "https",
            region=self.region,
            http_client=self._pool,
        )

    def list(self) -> list[RemoteFile]:
        """The files of the wanted folder, or the wanted file."""
        prefix = self._prefix + (self.path or "")
        found = self._ask(lambda: list(self._client.list_objects(self._bucket, prefix=prefix)))
        files = [
            RemoteFile(str(item.object_name)[len(self._prefix) :], int(item.size), item.etag or "")
            for item in found
            if not item.is_dir
        ]
        return [file for file in files if file.name and self.path in (None, file.name)]

    def digest(self, file: RemoteFile) -> Digest | None:
        """What the ETag says that the file hashes to; for a multipart upload its part size is asked for."""
        if re.fullmatch(r"[0-9a-f]{32}", file.etag):
            return Digest("md5", file.etag, certain=False)
        parts = re.fullmatch(r"[0-9a-f]{32}-([0-9]+)", file.etag)
        if parts is None:
            return None
        try:
            first = self._ask(
                lambda: self._client.stat_object(
                    self._bucket, self._prefix + file.name, extra_query_params={"partNumber": "1"}
                )
            )
        except SourceError:
            return None  # the storage does not know parts; what it refuses it refuses in open, too
        size = first.size or 0
        if size == 0 or -(-file.size // size) != int(parts[1]):
            return None  # it knows them and does not tell, or they are not equal
        return Digest("md5-parts", file.etag, part_bytes=size, certain=False)

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[Stream]:
        """The content of a file from byte ``offset`` on."""
        response = self._ask(
            lambda: self._client.get_object(
                self._bucket,
                self._prefix + file.name,
                offset=offset,
                request_headers={"If-Match": f'"{file.etag}"'} if file.etag else None,
            )
        )
        try:
            begins = offset if response.status == 206 else 0
            encryption = response.headers.get("x-amz-server-side-encryption", "")
            with_customer_key = (
                "x-amz-server-side-encryption-customer-algorithm" in response.headers
            )
            has_digest = not encryption.startswith("aws:kms") and not with_customer_key
            yield Stream(begins, chunks(response, self._address), has_digest)
        finally:
            response.close()
            response.release_conn()

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def _ask(self, request: Callable[[], T]) -> T:
        """The answer to a request; raises what another answer means."""
        from minio.error import InvalidResponseError, S3Error, ServerError

        try:
            return request()
        except S3Error as error:
            said = (error.message or "").rstrip(".")
            raise self._refusal(error.code or "", said) from error
        except ServerError as error:
            raise Interrupted(f"{self._address} answered {error.status_code}") from error
        except (InvalidResponseError, ParseError, ValueError) as error:
            status = re.search(r"Response code: ([0-9]+)", str(error))
            if status is not None and status[1] in ("401", "403"):
                raise self._refusal("AccessDenied", "") from error
            if status is not None and status[1] >= "500":
                raise Interrupted(f"{self._address} answered {status[1]}") from error
            raise SourceError(
                f"{self._address} did not answer as S3 does: {str(error)[:200]}",
                where=self.where,
                hint="The endpoint may be wrong, or a proxy answered instead",
            ) from error
        except urllib3.exceptions.HTTPError as error:
            raise explain(error, self._address) from error

    def _refusal(self, code: str, said: str) -> Exception:
        """What an error code of S3 means, and what to do about it."""
        if code in _TRANSIENT:
            return Interrupted(f"{self._address} answered {code}: {said}")
        if code in _CHANGED:
            return DownloadError(
                _CHANGED[code], where=self.where, hint="The next try takes the new files"
            )
        what, hint = _REFUSALS.get(code, _UNKNOWN)
        if code == "AccessDenied" and not self._has_credentials:
            what, hint = _PRIVATE
        what = what.format(bucket=self._bucket, address=self._address, code=code, said=said)
        return SourceError(what, where=self.where, hint=hint)


def _region(source: S3Source, environ: Mapping[str, str], host: str) -> str | None:
    """The region to sign for; None lets AWS tell the bucket's."""
    given = source.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if given or host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return given or None
    return "us-east-1"  # what storages call their only region


def _endpoint(source: S3Source, environ: Mapping[str, str]) -> SplitResult:
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    found = next((name for name in variables if environ.get(name)), None)
    text = source.endpoint or (environ[found] if found else _AWS)
    address = parse_address(text, where=found)
    if address.path:
        raise ConfigError(f"the address of a storage has no path: {text}", where=found)
    return address


def _keys(environ: Mapping[str, str]) -> tuple[str | None, str | None, str | None]:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    key, secret, session = (environ.get(name, "").strip() or None for name in names)
    if (key is None) != (secret is None):
        raise ConfigError(
            "only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set",
            where="environment",
            hint="Set both, or neither for a public bucket",
        )
    return key, secret, session
