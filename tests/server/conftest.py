"""Servers over the fake engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from tests.server.fakes import FakeClient, running_server

Serve = Callable[..., httpx.Client]


@pytest.fixture(scope="session")
def plain_server() -> Iterator[httpx.Client]:
    """One server for all tests that change nothing: starting one takes a third of a second."""
    with (
        running_server(FakeClient().make_ready()) as (url, _),
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield http


@pytest.fixture
def serve(plain_server: httpx.Client) -> Iterator[Serve]:
    """``serve(client, **settings)``: an HTTP client of a running server, with ``.state`` added.

    Without arguments it is the shared one.
    """
    with ExitStack() as stack:

        def start(client: FakeClient | None = None, **settings: Any) -> httpx.Client:
            if client is None and not settings:
                return plain_server
            url, state = stack.enter_context(
                running_server(client or FakeClient().make_ready(), **settings)
            )
            http = stack.enter_context(httpx.Client(base_url=url, timeout=20))
            http.state = state  # type: ignore[attr-defined]
            return http

        yield start
