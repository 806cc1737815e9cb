"""The engine's message loop, with a core that is a script."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import zmq

from kerf_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Alive,
    EngineMessage,
    Outputs,
    Refused,
    SamplingParams,
    ServerMessage,
    Shutdown,
    Stats,
    TokenOutput,
)
from kerf_runtime.engine.process import EngineLoop
from kerf_runtime.engine.silence import ALIVE_SECONDS
from kerf_runtime.errors import RequestError


class ScriptedCore:
    """Counts every request down to its last token."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.fails = False

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def add(self, request: AddRequest) -> None:
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty", where="prompt")
        self.left[request.request_id] = request.params.max_tokens

    def abort(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def step(self) -> list[TokenOutput]:
        if self.fails:
            raise RuntimeError("the step failed")
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            done = self.left[name] == 0
            outputs.append(TokenOutput(name, [self.left[name]], "length" if done else None))
            if done:
                del self.left[name]
        return outputs

    captures_pending = False

    def capture_next(self) -> None:
        raise AssertionError("nothing is pending")

    def report(self) -> dict[str, Any]:
        return {}

    def stats(self) -> dict[str, Any]:
        return {"running": len(self.left)}


def play(core: ScriptedCore, *messages: ServerMessage) -> list[EngineMessage]:
    """Run the loop over messages that are all there from the start."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, outside = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://requests")
    outside.connect("inproc://requests")
    pending = deque(messages)
    sent: list[EngineMessage] = []

    def deliver() -> None:
        while pending:
            outside.send(msgspec.msgpack.encode(pending.popleft()))

    def send(message: EngineMessage) -> None:
        sent.append(message)
        if isinstance(message, Stats) and not core.has_work and len(sent) > 1:
            outside.send(msgspec.msgpack.encode(Shutdown()))

    deliver()
    try:
        EngineLoop(core, inbox, send).run()
    finally:
        context.destroy(linger=0)
    return sent


def add(name: str, tokens: int) -> AddRequest:
    return AddRequest(name, [1], SamplingParams(max_tokens=tokens))


def test_numbers_are_sent_before_anything_else() -> None:
    assert play(ScriptedCore(), add("a", 1))[0] == Stats({"running": 0})


def test_tokens_are_sent_step_by_step_and_numbers_when_the_work_is_done() -> None:
    sent = play(ScriptedCore(), add("a", 2), add("b", 1))
    assert [m.outputs for m in sent if isinstance(m, Outputs)] == [
        [TokenOutput("a", [1], None), TokenOutput("b", [0], "length")],
        [TokenOutput("a", [0], "length")],
    ]
    assert sent[-1] == Stats({"running": 0})


def test_a_refused_request_is_answered_by_its_reason() -> None:
    sent = play(ScriptedCore(), AddRequest("a", [], SamplingParams(max_tokens=1)), add("b", 1))
    assert Refused("a", "the prompt is empty", "prompt", None) in sent
    assert Outputs([TokenOutput("b", [0], "length")]) in sent


def test_an_abort_takes_effect_before_the_next_step() -> None:
    sent = play(ScriptedCore(), add("a", 5), AbortRequest("a"), AbortRequest("unknown"))
    assert not [m for m in sent if isinstance(m, Outputs)]


def test_an_idle_loop_says_every_second_that_it_is_alive() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, outside = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://requests")
    outside.connect("inproc://requests")
    now, said = 100.0, []

    def clock() -> float:
        """Every look at it takes a while: idle rounds of the loop are a quarter of a real second."""
        nonlocal now
        now += 0.3
        assert now < 110, "the loop said nothing"
        return now

    def send(message: EngineMessage) -> None:
        said.append((type(message), now))
        if len(said) == 3:
            outside.send(msgspec.msgpack.encode(Shutdown()))

    try:
        EngineLoop(ScriptedCore(), inbox, send, clock).run()
    finally:
        context.destroy(linger=0)
    kinds, times = zip(*said, strict=True)
    assert kinds == (Stats, Alive, Alive)
    assert all(ALIVE_SECONDS <= b - a < ALIVE_SECONDS + 0.7 for a, b in pairwise(times))


def test_shutdown_leaves_the_rest_undone() -> None:
    assert play(ScriptedCore(), add("a", 5), Shutdown()) == [Stats({"running": 0})]


def test_a_failing_step_is_not_swallowed() -> None:
    core = ScriptedCore()
    core.fails = True
    with pytest.raises(RuntimeError, match="the step failed"):
        play(core, add("a", 1))
