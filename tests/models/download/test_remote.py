"""Digests that are computed piece by piece are those of the whole."""

from __future__ import annotations

import hashlib
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.models.download.remote import Digest, Hasher


def value(digest: Digest, pieces: list[bytes]) -> str:
    hasher = Hasher(digest, sum(map(len, pieces)))
    for piece in pieces:
        hasher.update(piece)
    return hasher.value()


PIECES = st.lists(st.binary(max_size=40), max_size=12)


@given(PIECES)
@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_a_plain_digest(algorithm: str, pieces: list[bytes]) -> None:
    expected = hashlib.new(algorithm, b"".join(pieces)).hexdigest()
    assert value(Digest(algorithm, ""), pieces) == expected


def test_the_digest_of_a_git_blob_is_what_git_says() -> None:
    content = b"a line\nand another\n"
    said = subprocess.run(
        ["git", "hash-object", "--stdin"], input=content, capture_output=True, check=True
    )
    assert value(Digest("git", ""), [content[:5], content[5:]]) == said.stdout.decode().strip()


@given(PIECES.filter(any), st.integers(1, 50))
def test_the_digest_of_parts_is_that_of_the_digests_of_the_parts(
    pieces: list[bytes], part_bytes: int
) -> None:
    whole = b"".join(pieces)
    parts = [whole[at : at + part_bytes] for at in range(0, len(whole), part_bytes)]
    joined = b"".join(hashlib.md5(part).digest() for part in parts)
    expected = f"{hashlib.md5(joined).hexdigest()}-{len(parts)}"
    assert value(Digest("md5-parts", "", part_bytes=part_bytes), pieces) == expected
