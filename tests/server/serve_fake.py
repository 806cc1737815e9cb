"""Runs ``lifecycle.serve`` over the fake engine in a process of its own, for tests of signals and failures.

With ``process`` the engine is a scripted one in a process, whose steps may take three seconds.

Says the address, then ``ready``, then ``asked`` for every request, then the name of the error that
ended it, if one did; with ``slow-texts`` also ``tokenising`` at every long text.  Commands on standard input: ``fail`` makes the engine fail, ``release`` lets held requests go on.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

from tests.engine.scripted import run_scripted_engine
from tests.server.fakes import ByteTokenizer, FakeClient

from kerf_runtime.engine import process
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.client import EngineClient
from kerf_runtime.engine.messages import AddRequest, Failed
from kerf_runtime.errors import KerfError, ModelError
from kerf_runtime.server.lifecycle import bind, serve
from kerf_runtime.server.state import ServerSettings


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class SlowTokenizer(ByteTokenizer):
    """Takes a second for long texts, of which it keeps a few tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 4096:
            say("tokenising")
            time.sleep(1)
        return super().encode(text[:8], add_special_tokens)


def main() -> int:
    def reply(request: AddRequest) -> str:
        say("asked")
        return "Hello"

    hold = threading.Event()
    options = set(sys.argv[1:])
    fake = FakeClient(reply=reply, hold=hold, start_seconds=60 if "slow" in options else 0.05)
    process._main = run_scripted_engine
    args = EngineArgs(document={}, model_path=Path("/nowhere"))
    client = EngineClient(args, stall_seconds=3) if "process" in options else fake

    def commands() -> None:
        for line in sys.stdin:
            if line.strip() == "fail":
                fake.failed = Failed(kind="CaptureError", what="out of memory", hint="Lower it")
            elif line.strip() == "release":
                hold.set()

    def load() -> ByteTokenizer:
        if "no-tokenizer" in options:
            raise ModelError("no tokenizer", where="/model")
        return SlowTokenizer() if "slow-texts" in options else ByteTokenizer()

    threading.Thread(target=commands, daemon=True).start()
    listener = bind("127.0.0.1", 0)
    host, port = listener.getsockname()
    say(f"{host}:{port}")
    settings = ServerSettings(
        served_name="tiny", drain_seconds=3 if "drain3" in options else 30, drain_lag_seconds=0.3
    )
    try:
        asyncio.run(serve(client, load, settings, listener, on_ready=lambda _: say("ready")))
    except KerfError as error:
        say(type(error).__name__)
        return error.exit_code
    assert client is not fake or fake.closed
    return 0


if __name__ == "__main__":
    sys.exit(main())
