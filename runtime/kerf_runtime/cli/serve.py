"""``kerf serve`` and ``kerf run``: the engine process with the HTTP server in front of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerf_runtime.cli.options import (
    cache_dir_option,
    default_cache_dir,
    document_options,
    engine_args,
    json_option,
    model_path_option,
)
from kerf_runtime.cli.output import echo_json

if TYPE_CHECKING:
    from kerf_runtime.config import ModelDeploymentDocument
    from kerf_runtime.engine.args import EngineArgs
    from kerf_runtime.engine.messages import Phase
    from kerf_runtime.server.state import ServerState

__all__ = ["run", "serve"]


def _server_options(command: Any) -> Any:
    for decorate in (
        json_option,
        click.option(
            "--debug-dump-path",
            type=click.Path(path_type=Path, file_okay=False),
            help="Write graphs and generated code there.",
        ),
        click.option(
            "--port",
            default=8000,
            show_default=True,
            type=click.IntRange(0, 65535),
            help="Port to listen on; 0 takes a free one.",
        ),
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="Address to listen on."
        ),
        cache_dir_option,
        model_path_option,
        document_options,
    ):
        command = decorate(command)
    return command


@click.command()
@_server_options
def run(
    file: Path | None,
    overrides: tuple[str, ...],
    model_path: Path | None,
    cache_dir: Path | None,
    host: str,
    port: int,
    debug_dump_path: Path | None,
    as_json: bool,
) -> None:
    """Compile if needed, then serve: the one command to start with.

    The compiled model is kept in --cache-dir (default: kerf in your cache folder), so that the next
    start compiles nothing.
    """
    from kerf_runtime.cli.document import read_document
    from kerf_runtime.cli.model import find_model

    document = read_document(file, overrides)
    args = engine_args(
        document,
        model_path=find_model(document, model_path, as_json=as_json),
        cache_dir=cache_dir or default_cache_dir(),
        debug_dump_path=debug_dump_path,
    )
    _serve(document, args, host=host, port=port, as_json=as_json)


@click.command()
@_server_options
@click.option(
    "--cache-read-only",
    is_flag=True,
    help="Never write to the cache; what is missing is compiled for this process only.",
)
def serve(
    file: Path | None,
    overrides: tuple[str, ...],
    model_path: Path | None,
    cache_dir: Path | None,
    host: str,
    port: int,
    debug_dump_path: Path | None,
    cache_read_only: bool,
    as_json: bool,
) -> None:
    """Serve a model as pods do: no cache unless --cache-dir names one."""
    from kerf_runtime.cli.document import read_document
    from kerf_runtime.cli.model import find_model

    document = read_document(file, overrides)
    args = engine_args(
        document,
        model_path=find_model(document, model_path, as_json=as_json),
        cache_dir=cache_dir,
        cache_read_only=cache_read_only,
        debug_dump_path=debug_dump_path,
    )
    _serve(document, args, host=host, port=port, as_json=as_json)


def _serve(
    document: ModelDeploymentDocument, args: EngineArgs, *, host: str, port: int, as_json: bool
) -> None:
    import asyncio

    from kerf_runtime.cli.progress import open_progress
    from kerf_runtime.engine.client import EngineClient
    from kerf_runtime.models import load_tokenizer
    from kerf_runtime.server.environment import api_key, request_seconds, stall_seconds
    from kerf_runtime.server.lifecycle import bind
    from kerf_runtime.server.lifecycle import serve as serve_http
    from kerf_runtime.server.state import ServerSettings

    key, limit = api_key(os.environ), request_seconds(os.environ)
    client = EngineClient(args, stall_seconds=stall_seconds(os.environ))
    listener = bind(host, port)
    shown_host = f"[{host}]" if ":" in host else host
    url = f"http://{shown_host}:{listener.getsockname()[1]}"
    engine = document.spec.engine
    settings = ServerSettings(
        served_name=document.served_name,
        max_num_seqs=engine.max_num_seqs,
        max_queue_len=engine.max_queue_len,
        drain_seconds=document.spec.drain_seconds,
        api_key=key,
        request_seconds=limit,
    )
    progress = open_progress(as_json=as_json)

    def on_phase(phase: Phase) -> None:
        progress(phase.name, phase.detail, phase.fraction)

    def on_ready(state: ServerState) -> None:
        progress.finish()
        progress.__exit__(None, None, None)
        _announce(state, url, as_json=as_json)

    if as_json:
        echo_json({"event": "listening", "url": url})
    else:
        click.echo(f"kerf: {document.served_name} on {url} (loading)", err=True)
    with progress:
        asyncio.run(
            serve_http(
                client,
                lambda: load_tokenizer(args.model_path),
                settings,
                listener,
                on_phase=on_phase,
                on_ready=on_ready,
            )
        )


def _announce(state: ServerState, url: str, *, as_json: bool) -> None:
    """Say that requests can come, and what the start-up found."""
    from kerf_runtime.server.status import debug_report

    report = debug_report(state)
    cache, counters = report["cache"], report["counters"]
    if as_json:
        keys = ("cache", "counters", "startup", "served_name")
        echo_json({"event": "ready", "url": url, **{key: report[key] for key in keys}})
        return
    click.echo(
        f"kerf: ready on {url} after {report['startup']['ready']:.1f} s; "
        f"cache {cache['result']} ({cache['reason']}), {counters['dynamo_traces']} traces, "
        f"{counters['inductor_compilations']} compilations, "
        f"{report['graphs']['captured']} {report['graphs']['backend']} graphs"
    )
    for change in report["effective"]["changes"]:
        click.echo(
            f"kerf: {change['field']} {change['requested']} -> {change['effective']} "
            f"({change['reason']}: {change['message']})"
        )
