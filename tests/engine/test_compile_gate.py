"""The engine process may compile while it starts, and not any more once it has.

The process is real; its core only says what it finds.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kerf_runtime.compilation.counters import compile_gate
from kerf_runtime.engine import core, process
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.client import EngineClient
from kerf_runtime.engine.messages import Started
from kerf_runtime.engine.phases import Progress


class TellsTheGate:
    """A core whose report says when the gate was open."""

    has_work = captures_pending = False

    def __init__(self, args: EngineArgs, *, spawned: float) -> None:
        self._open: dict[str, Any] = {"before": compile_gate.open}

    def startup(self, progress: Progress) -> None:
        self._open["during"] = compile_gate.open

    def started_message(self) -> Started:
        return Started(128, 2000, (2,), {**self._open, "after": compile_gate.open})

    def stats(self) -> dict[str, Any]:
        return {}

    def report(self) -> dict[str, Any]:
        return {}


_main = process._main


def run_engine(args: EngineArgs, addresses: process.Addresses, spawned: float) -> None:
    """In place of ``process._main`` in the spawned process."""
    core.EngineCore = TellsTheGate  # type: ignore[misc,assignment]
    _main(args, addresses, spawned)


def test_the_compile_gate_is_open_during_start_up_and_closed_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_main", run_engine)

    async def start() -> dict[str, Any]:
        client = EngineClient(EngineArgs(document={}, model_path=Path("/nowhere")))
        await client.start()
        try:
            return (await asyncio.wait_for(client.wait_started(), 60)).report
        finally:
            await client.close()

    assert asyncio.run(start()) == {"before": True, "during": True, "after": False}
