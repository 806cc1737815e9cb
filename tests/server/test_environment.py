"""The server's key and patience from the environment."""

from __future__ import annotations

import pytest

from kerf_runtime.errors import ConfigError
from kerf_runtime.server.environment import api_key, request_seconds, stall_seconds


def test_without_variables_there_is_no_key_and_no_limit():
    assert api_key({}) is None
    assert api_key({"KERF_API_KEY": "", "KERF_API_KEY_FILE": ""}) is None
    assert request_seconds({"KERF_REQUEST_SECONDS": ""}) is None
    assert stall_seconds({}) == 600


def test_a_key_comes_from_the_variable_or_from_a_file_without_its_last_line_end(tmp_path):
    path = tmp_path / "key"
    path.write_text("from-file\n")
    assert api_key({"KERF_API_KEY": "direct"}) == "direct"
    assert api_key({"KERF_API_KEY_FILE": str(path)}) == "from-file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"\xff", "it is no text"),
        ("schlüssel".encode(), "an HTTP header cannot carry"),
        (b"two\nlines", "an HTTP header cannot carry"),
    ],
)
def test_a_file_without_a_usable_key_is_refused(tmp_path, content, message):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        api_key({"KERF_API_KEY_FILE": str(path)})
    assert str(path) in str(caught.value)


def test_a_missing_file_and_two_sources_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        api_key({"KERF_API_KEY_FILE": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="both KERF_API_KEY and KERF_API_KEY_FILE"):
        api_key({"KERF_API_KEY": "a", "KERF_API_KEY_FILE": "b"})


def test_a_limit_is_a_positive_number_of_seconds():
    assert request_seconds({"KERF_REQUEST_SECONDS": "2.5"}) == 2.5
    assert stall_seconds({"KERF_STALL_SECONDS": "3600"}) == 3600


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_another_limit_is_refused(text):
    for read, name in (
        (request_seconds, "KERF_REQUEST_SECONDS"),
        (stall_seconds, "KERF_STALL_SECONDS"),
    ):
        with pytest.raises(ConfigError, match=f"{name}.*no positive number of seconds"):
            read({name: text})
