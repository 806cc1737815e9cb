"""Switches and the log level from the environment; what is neither is refused with what to write."""

from __future__ import annotations

import pytest

from kerf_runtime.environment import is_on, log_level
from kerf_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "on"), [({}, False), ({"X": ""}, False), ({"X": "0"}, False), ({"X": "1"}, True)]
)
def test_a_switch_is_on_at_1_and_off_at_0_or_nothing(environ, on):
    assert is_on(environ, "X") is on


@pytest.mark.parametrize("text", ["true", "yes", "on", "2", " 1", "false"])
def test_a_switch_that_is_neither_on_nor_off_is_refused_with_what_to_write(text):
    with pytest.raises(
        ConfigError, match=r"X: .* is neither on nor off\. Write 1 for on, 0 for off"
    ):
        is_on({"X": text}, "X")


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, "INFO"),
        ({"KERF_LOG_LEVEL": ""}, "INFO"),
        ({"KERF_LOG_LEVEL": "debug"}, "DEBUG"),
        ({"KERF_LOG_LEVEL": "CRITICAL"}, "CRITICAL"),
    ],
)
def test_the_log_level_is_info_or_what_is_written_in_any_case(environ, level):
    assert log_level(environ) == level


@pytest.mark.parametrize("text", ["bogus", "10", "INFO ", "notset"])
def test_a_log_level_that_there_is_not_is_refused_with_those_that_there_are(text):
    with pytest.raises(ConfigError, match=r"KERF_LOG_LEVEL: .* is no log level.*DEBUG, INFO, W"):
        log_level({"KERF_LOG_LEVEL": text})
