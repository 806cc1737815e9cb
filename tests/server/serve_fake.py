"""Runs ``lifecycle.serve`` over the fake engine in a process of its own, for tests of signals and failures.

Says the address, then ``ready``, then ``asked`` for every request, then the name of the error that
ended it, if one did; with ``held-texts`` also ``tokenising`` at every long text.

Nothing here ends by the clock where a test looks at what comes before the end.  Commands on standard input:
``fail`` makes the engine fail, ``release`` lets held requests and texts go on and a failed server end,
``give-up`` takes the patience with a silent engine away.

With ``process`` the engine is a scripted one in a process: silent for a moment it is stalled, and failed
only after ten minutes.  With ``drain1`` draining takes no more than a second, with ``lag`` a server that is
asked to end by SIGTERM serves on.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

from tests.engine.scripted import run_scripted_engine
from tests.server.fakes import ByteTokenizer, FakeClient

from kerf_runtime.engine import process, silence
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.client import EngineClient
from kerf_runtime.engine.messages import AddRequest, Failed
from kerf_runtime.errors import KerfError, ModelError
from kerf_runtime.server import lifecycle
from kerf_runtime.server.lifecycle import bind, serve
from kerf_runtime.server.state import ServerSettings


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class HeldTokenizer(ByteTokenizer):
    """Tokenises long texts, to a few tokens, once ``go`` is set."""

    def __init__(self, go: threading.Event) -> None:
        super().__init__()
        self._go = go

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 4096:
            say("tokenising")
            self._go.wait()
        return super().encode(text[:8], add_special_tokens)


def main() -> int:
    def reply(request: AddRequest) -> str:
        say("asked")
        return "Hello"

    hold = threading.Event()
    options = set(sys.argv[1:])
    fake = FakeClient(reply=reply, hold=hold, start_seconds=3600 if "slow" in options else 0.05)
    process._main = run_scripted_engine
    silence._STALLED_SHARE = 0.001
    args = EngineArgs(document={}, model_path=Path("/nowhere"))
    client = EngineClient(args) if "process" in options else fake

    async def until_released() -> None:
        await asyncio.to_thread(hold.wait)

    lifecycle._answer_a_moment_longer = until_released

    def commands() -> None:
        for line in sys.stdin:
            if line.strip() == "fail":
                fake.failed = Failed(kind="CaptureError", what="out of memory", hint="Lower it")
            elif line.strip() == "release":
                hold.set()
            elif line.strip() == "give-up":
                client._silence.limit = 1.0

    def load() -> ByteTokenizer:
        if "no-tokenizer" in options:
            raise ModelError("no tokenizer", where="/model")
        return HeldTokenizer(hold) if "held-texts" in options else ByteTokenizer()

    threading.Thread(target=commands, daemon=True).start()
    listener = bind("127.0.0.1", 0)
    host, port = listener.getsockname()
    say(f"{host}:{port}")
    settings = ServerSettings(
        served_name="tiny",
        drain_seconds=1 if "drain1" in options else 3600,
        drain_lag_seconds=3600 if "lag" in options else 0.3,
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
