"""Requests of both APIs with as little as they need, and the errors that answer them."""

from __future__ import annotations

__all__ = ["chat", "complete", "error_of"]


def complete(http, **fields):
    return http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", **fields})


def chat(http, **fields):
    fields.setdefault("messages", [{"role": "user", "content": "Hi"}])
    return http.post("/v1/chat/completions", json={"model": "tiny", **fields})


def error_of(response, status, param=None):
    """The error object of a refusal, checked for OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param
    return error
