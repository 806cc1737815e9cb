"""Load from several processes: how it is dealt out, and that every request is asked once."""

from __future__ import annotations

import pytest
from benchmarks.clients import shares, warm_clients
from tests.server.fakes import FakeClient, running_server

from kerf_runtime.cli.load import Load, Target
from kerf_runtime.errors import EngineError


@pytest.mark.parametrize(
    ("total", "parts", "expected"), [(256, 8, [32] * 8), (7, 3, [3, 2, 2]), (2, 1, [2])]
)
def test_shares_differ_by_one_at_most(total, parts, expected):
    assert shares(total, parts) == expected


def test_two_processes_ask_what_one_would_have_asked():
    client = FakeClient(endless=True, max_model_len=400).make_ready()
    load = Load(requests=9, concurrency=4, input_len=8, output_len=3, vocab_size=200)
    with running_server(client) as (url, _):
        target = Target(f"{url}/v1", "tiny")
        with warm_clients(target, load, warm_up=4, processes=2) as send_load:
            assert len(client.seen) == 4
            finished = send_load()
    assert len(client.seen) == 13
    assert len({tuple(request.prompt_token_ids) for request in client.seen}) == 13
    assert [outcome.error for outcome in finished.outcomes] == [None] * 9
    assert sum(outcome.output_tokens for outcome in finished.outcomes) == 27
    assert len(finished.cpu_seconds) == 2
    assert min(finished.cpu_seconds) > 0


def test_a_server_that_refuses_everything_is_an_error_with_its_reason():
    client = FakeClient(max_model_len=400).make_ready()
    load = Load(requests=1, concurrency=1, input_len=8, output_len=3, vocab_size=200)
    with (
        running_server(client) as (url, _),
        pytest.raises(EngineError, match="none of 1 requests was answered: HTTP 404"),
        warm_clients(Target(f"{url}/v1", "other"), load, warm_up=1, processes=1),
    ):
        pass
