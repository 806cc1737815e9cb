"""One hierarchy of errors; each says what, where and what to do, also across a process border."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime import errors
from kerf_runtime.errors import KerfError

CLASSES = [getattr(errors, name) for name in errors.__all__]

EXIT_CODES = {
    "KerfError": 1,
    "ConfigError": 2,
    "RequestError": 2,
    "ModelError": 3,
    "SourceError": 3,
    "CompileError": 4,
    "GraphBreakError": 4,
    "NumericalGateError": 4,
    "CacheError": 5,
    "CaptureError": 6,
    "CaptureMemoryError": 6,
    "EngineError": 7,
    "OverloadedError": 7,
    "DownloadError": 8,
}
HTTP_STATUS = {"ConfigError": 400, "RequestError": 400, "OverloadedError": 429}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_exit_codes_and_http_statuses_are_the_documented_ones(cls):
    assert issubclass(cls, KerfError)
    assert cls.exit_code == EXIT_CODES[cls.__name__]
    assert cls.http_status == HTTP_STATUS.get(cls.__name__, 500)


def test_every_class_is_documented_exported_and_in_the_table():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, KerfError)
    }
    assert defined == set(errors.__all__) == set(EXIT_CODES)
    for name in defined:
        assert name in errors.__doc__


@pytest.mark.parametrize(
    ("where", "hint", "text"),
    [
        (None, None, "it broke"),
        ("file.yaml", None, "file.yaml: it broke"),
        (None, "Mend it", "it broke. Mend it"),
        ("file.yaml", "Mend it", "file.yaml: it broke. Mend it"),
    ],
)
def test_the_text_is_where_what_and_hint(where, hint, text):
    assert str(KerfError("it broke", where=where, hint=hint)) == text


@given(
    st.sampled_from(CLASSES),
    st.text(),
    st.none() | st.text(min_size=1),
    st.none() | st.text(min_size=1),
)
def test_an_error_survives_pickling_whole(cls, what, where, hint):
    error = pickle.loads(pickle.dumps(cls(what, where=where, hint=hint)))
    assert type(error) is cls
    assert (error.what, error.where, error.hint) == (what, where, hint)
    assert str(error) == str(cls(what, where=where, hint=hint))


def test_an_error_without_an_explanation_cannot_be_made():
    with pytest.raises(TypeError):
        KerfError()
