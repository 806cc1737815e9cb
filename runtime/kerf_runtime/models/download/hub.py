"""The Hugging Face hub or a mirror of it: two requests of its HTTP interface.

    GET /api/models/{repo}/revision/{revision}?blobs=true   the commit, the files, their digests
    GET /{repo}/resolve/{commit}/{path}                     a file, or a redirect to where it is kept

The hub's own client would need 0.9 s to import, keeps a cache in a layout of its own, and does not
compare digests; its environment variables mean the same here.  Every file has a digest: sha256 if it is
stored apart (LFS), else the id of its git blob.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import urllib3

from kerf_runtime.config.source import HuggingFaceSource
from kerf_runtime.errors import ConfigError, SourceError
from kerf_runtime.models.download.remote import Digest, Interrupted, RemoteFile, Stream
from kerf_runtime.models.download.transport import chunks, connections, explain, parse_address

__all__ = ["HubRemote", "hub_is_offline"]

_ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "ON", "YES", "TRUE")
_GIVE_TOKEN = "HF_TOKEN (in a cluster: tokenSecretRef)"


def hub_is_offline(environ: Mapping[str, str]) -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the hub."""
    return environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE


def _token(environ: Mapping[str, str]) -> str | None:
    """The access token: HF_TOKEN, else the file that ``hf auth login`` writes.

    Raises:
        ConfigError: HF_TOKEN cannot be a token.
    """
    token = environ.get("HF_TOKEN", "").strip()
    if not token:
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        home = Path(environ.get("HF_HOME") or cache / "huggingface")
        try:
            token = Path(environ.get("HF_TOKEN_PATH") or home / "token").read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None  # nobody logged in here
    if not token.isascii() or not token.isprintable():
        raise ConfigError("the value cannot be an access token", where="HF_TOKEN")
    return token or None


class HubRemote:
    """One revision of a repository; see ``Remote``."""

    def __init__(self, source: HuggingFaceSource, environ: Mapping[str, str]) -> None:
        self.where = source.address
        self.path = source.path
        self.revision: str | None = None
        self._source = source
        self._token = _token(environ)
        endpoint = source.endpoint or environ.get("HF_ENDPOINT") or _ENDPOINT
        address = parse_address(endpoint, where=None if source.endpoint else "HF_ENDPOINT")
        self._endpoint, self._host = address.geturl(), address.netloc
        self._headers = {"User-Agent": "kerf", "Accept-Encoding": "identity"}
        if self._token is not None:
            self._headers["Authorization"] = f"Bearer {self._token}"
        self._pool = connections(address, environ, redirects=5)
        self._digests: dict[str, Digest] = {}

    def list(self) -> list[RemoteFile]:
        """The files of the wanted folder, or the wanted file; the revision becomes a commit."""
        source = self._source
        revision = quote(source.revision, safe="")
        response = self._get(f"/api/models/{source.repo}/revision/{revision}?blobs=true")
        self._check(response)
        try:
            answer = response.json()
            self.revision = str(answer["sha"])
            entries = [self._entry(item) for item in answer["siblings"]]
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(
                f"{self._endpoint} did not answer as a hub does ({type(error).__name__}: {error})",
                where=self.where,
                hint="The endpoint may be wrong, or a proxy answered instead",
            ) from None
        return [file for file in entries if self._is_wanted(file.name)]

    def _entry(self, item: dict[str, Any]) -> RemoteFile:
        name, blob, stored_apart = str(item["rfilename"]), str(item["blobId"]), item.get("lfs")
        if stored_apart:
            self._digests[name] = Digest("sha256", str(stored_apart["sha256"]))
        else:
            self._digests[name] = Digest("git", blob)
        return RemoteFile(name, int(item["size"]), self._digests[name].value)

    def _is_wanted(self, name: str) -> bool:
        folder = str(PurePosixPath(name).parent)
        return name == self.path or folder == (self.path or ".")

    def digest(self, file: RemoteFile) -> Digest | None:
        """What the file must hash to."""
        return self._digests[file.name]

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[Stream]:
        """The content of a file from byte ``offset`` on."""
        path = f"/{self._source.repo}/resolve/{self.revision}/{quote(file.name)}"
        more = {"Range": f"bytes={offset}-"} if offset else {}
        response = self._get(path, more, stream=True)
        try:
            self._check(response, file)
            begins = offset if response.status == 206 else 0
            yield Stream(begins, chunks(response, self._host))
        finally:
            response.close()  # what was not read would have to be, before the connection is used again

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def _get(
        self, path: str, headers: Mapping[str, str] = {}, *, stream: bool = False
    ) -> urllib3.BaseHTTPResponse:
        try:
            return self._pool.request(
                "GET",
                self._endpoint + path,
                headers={**self._headers, **headers},
                preload_content=not stream,
            )
        except urllib3.exceptions.HTTPError as error:
            raise explain(error, self._host) from error

    def _check(self, response: urllib3.BaseHTTPResponse, file: RemoteFile | None = None) -> None:
        """Raise what an answer means that is not a success."""
        status = response.status
        if 200 <= status < 300:
            return
        if status in (408, 416, 429) or status >= 500:
            after = response.headers.get("Retry-After", "")
            raise Interrupted(
                f"the hub answered {status} {response.reason}",
                retry_after=float(after) if after.isdigit() else None,
            )
        what, hint = self._refusal(response, file)
        raise SourceError(what, where=self.where, hint=hint)

    def _refusal(
        self, response: urllib3.BaseHTTPResponse, file: RemoteFile | None
    ) -> tuple[str, str]:
        """What is the matter, and what to do about it."""
        status, code = response.status, response.headers.get("X-Error-Code", "")
        repo, page = self._source.repo, f"{self._endpoint}/{self._source.repo}"
        if code == "GatedRepo" or (status == 403 and b"gated" in response.data.lower()):
            if self._token is None:
                return (
                    f"{status}: the repository is gated and there is no token",
                    f"Accept its conditions at {page} and set {_GIVE_TOKEN}",
                )
            return (
                f"{status}: the repository is gated and the owner of the token has no access",
                f"Accept its conditions at {page} with the token's account",
            )
        if status == 401 and self._token is None:
            return (
                f"401: there is no repository {repo}, or it is private and there is no token",
                f"Correct the name, or set {_GIVE_TOKEN}",
            )
        if status == 401:
            return (
                "401: the hub does not accept the token",
                f"It may have expired or been revoked: make a new one and set {_GIVE_TOKEN}",
            )
        if status == 403:
            return (
                f"403: the token may not read {repo}",
                "Give it permission to read the contents of this repository",
            )
        if status == 404 and file is not None:
            return (
                f"404: {file.name} is listed and not there",
                "The hub or the mirror of it is incomplete",
            )
        if status == 404 and code == "RevisionNotFound":
            return (
                f"404: the repository has no revision {self._source.revision}",
                f"Its branches and tags are at {page}/refs",
            )
        if status == 404:
            return (
                f"404: there is no repository {repo}, or the token does not see it",
                "Correct the name: it is ORGANISATION/NAME",
            )
        said = response.headers.get("X-Error-Message") or response.reason
        return f"the hub answered {status}: {said}", f"See {page}"
