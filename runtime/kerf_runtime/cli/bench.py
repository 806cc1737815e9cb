"""``kerf bench``: measure this machine or any server; the measuring itself is in the ``bench_*`` modules."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
from kerf_runtime.errors import ConfigError

if TYPE_CHECKING:
    from kerf_runtime.cli.progress import PhaseProgress
    from kerf_runtime.config import ModelDeploymentDocument

__all__ = ["bench"]

_OUTPUT = click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the result there as JSON, for benchmarks/results.",
)


@click.group()
def bench() -> None:
    """Measure this machine.  Results go to benchmarks/results with --output."""


def _read(
    file: Path | None, overrides: tuple[str, ...], model_path: Path | None, *, as_json: bool
) -> tuple[ModelDeploymentDocument, Path]:
    """The document and the folder of its model, which is downloaded if need be."""
    from kerf_runtime.cli.document import read_document
    from kerf_runtime.cli.model import find_model

    document = read_document(file, overrides)
    model_path = find_model(document, model_path, as_json=as_json)
    return document, engine_args(document, model_path=model_path, cache_dir=None).model_path


@bench.command("latency")
@document_options
@model_path_option
@click.option(
    "--batch",
    "batches",
    multiple=True,
    type=click.IntRange(1),
    help="Sequences; repeatable. Default: 1 and 8.",
)
@click.option(
    "--prompt-tokens",
    default=128,
    show_default=True,
    type=click.IntRange(2),
    help="Length of every prompt.",
)
@click.option(
    "--output-tokens",
    default=33,
    show_default=True,
    type=click.IntRange(2),
    help="Length of every answer.",
)
@click.option(
    "--repeats", default=5, show_default=True, type=click.IntRange(1), help="After one warm-up."
)
@_OUTPUT
@json_option
def latency(
    file: Path | None,
    overrides: tuple[str, ...],
    model_path: Path | None,
    batches: tuple[int, ...],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Prefill and decode-step times: eager, compiled, and compiled with graphs, in one run."""
    from kerf_runtime.cli.bench_latency import Workload, measure, print_table

    document, model_path = _read(file, overrides, model_path, as_json=as_json)
    workload = Workload(
        batches=batches or (1, 8),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
    )
    result = measure(document, model_path, workload)
    _finish(result, output, as_json=as_json, table=print_table)


@bench.command("startup")
@document_options
@model_path_option
@click.option(
    "--repeats", default=5, show_default=True, type=click.IntRange(1), help="Cold and warm starts."
)
@_OUTPUT
@json_option
def startup(
    file: Path | None,
    overrides: tuple[str, ...],
    model_path: Path | None,
    repeats: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Start-up phases of `kerf serve` with an empty and with a filled compile cache."""
    from kerf_runtime.cli.bench_startup import measure, print_table

    document, model_path = _read(file, overrides, model_path, as_json=as_json)
    result = measure(document, model_path, repeats=repeats)
    _finish(result, output, as_json=as_json, table=print_table)


@bench.command("capture")
@document_options
@model_path_option
@click.option(
    "--repeats", default=3, show_default=True, type=click.IntRange(1), help="Starts that count."
)
@_OUTPUT
@json_option
def capture(
    file: Path | None,
    overrides: tuple[str, ...],
    model_path: Path | None,
    repeats: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time and memory of recording every graph, per captured size, in fresh processes."""
    from kerf_runtime.cli.bench_capture import measure, print_table

    document, model_path = _read(file, overrides, model_path, as_json=as_json)
    result = measure(document, model_path, repeats=repeats)
    _finish(result, output, as_json=as_json, table=print_table)


@bench.command("throughput")
@click.option(
    "--base-url",
    help="Any OpenAI-compatible server, such as http://127.0.0.1:8000/v1. Default: a server of the document "
    "is started.",
)
@click.option("--model", help="Name of the model. Default: the first that the server lists.")
@click.option(
    "--endpoint",
    default="completions",
    show_default=True,
    type=click.Choice(["completions", "chat"]),
    help="Which API to use.",
)
@click.option(
    "--num-requests",
    "--num-prompts",
    "requests",
    default=200,
    show_default=True,
    type=click.IntRange(1),
    help="Requests that count.",
)
@click.option(
    "--concurrency",
    "--max-concurrency",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    help="Most requests at a time.",
)
@click.option(
    "--request-rate",
    "rate",
    type=click.FloatRange(0, min_open=True),
    help="Mean arrivals per second, at random moments. Default: as soon as there is room.",
)
@click.option(
    "--input-len",
    default=128,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of a prompt: about, or exactly with --vocab-size.",
)
@click.option(
    "--output-len",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of an answer.",
)
@click.option(
    "--range-ratio",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Lengths are drawn from (1 - RATIO) times the length to the length.",
)
@click.option(
    "--prefix-len",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Tokens that all prompts begin with, of --input-len.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(1),
    help="Send random token ids below this instead of random words.",
)
@click.option("--seed", default=0, show_default=True, help="The same seed plans the same requests.")
@click.option(
    "--warm-up", default=1, show_default=True, type=click.IntRange(0), help="Requests before those."
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for answers of the full length; not every server knows how.",
)
@click.option(
    "--request-timeout",
    "seconds",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds that a request may take.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Default: OPENAI_API_KEY, if it is set.")
@document_options
@model_path_option
@cache_dir_option
@_OUTPUT
@json_option
def throughput(
    base_url: str | None,
    model: str | None,
    endpoint: str,
    requests: int,
    concurrency: int,
    rate: float | None,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    vocab_size: int | None,
    seed: int,
    warm_up: int,
    ignore_eos: bool,
    seconds: float,
    api_key: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
    model_path: Path | None,
    cache_dir: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Rates and latencies of an OpenAI-compatible server under load: this one or any other."""
    from kerf_runtime.cli.bench_throughput import measure, print_table
    from kerf_runtime.cli.load import Load, Target, find_served_model
    from kerf_runtime.cli.progress import open_progress

    chat = endpoint == "chat"
    if chat and vocab_size is not None:
        raise ConfigError("a chat has no token ids", where="--vocab-size", hint="Leave it out")
    if prefix_len >= input_len and prefix_len:
        raise ConfigError(
            f"--prefix-len {prefix_len} leaves nothing of --input-len {input_len} that is a prompt's own",
            where="--prefix-len",
        )
    load = Load(
        requests=requests,
        concurrency=concurrency,
        rate=rate,
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        vocab_size=vocab_size,
        seed=seed,
    )
    with (
        open_progress(as_json=as_json) as progress,
        _server(base_url, file, overrides, model_path, cache_dir, progress, as_json) as url,
    ):
        target = Target(
            base_url=url,
            model=model or find_served_model(url, api_key),
            chat=chat,
            api_key=api_key,
            ignore_eos=ignore_eos,
            seconds=seconds,
        )
        result = measure(target, load, warm_up=warm_up, progress=progress)
    _finish(result, output, as_json=as_json, table=print_table)


@contextmanager
def _server(
    base_url: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
    model_path: Path | None,
    cache_dir: Path | None,
    progress: PhaseProgress,
    as_json: bool,
) -> Iterator[str]:
    """The given server, or one of the document's that is started for the time."""
    if base_url is not None:
        if file is not None or overrides or model_path is not None:
            raise ConfigError(
                "there is a server already, so nothing else can be served",
                where="--base-url",
                hint="Leave out -f, --set and --model-path, or --base-url",
            )
        yield base_url
        return
    from kerf_runtime.cli.bench_server import started_server, write_document

    document, model_path = _read(file, overrides, model_path, as_json=as_json)
    with tempfile.TemporaryDirectory(prefix="kerf-bench-") as folder:
        written = write_document(document, Path(folder))
        progress("start", "the server loads, and compiles what the cache does not have", None)
        with started_server(written, model_path, cache_dir or default_cache_dir()) as url:
            yield f"{url}/v1"


def _finish(result: dict[str, Any], output: Path | None, *, as_json: bool, table: Any) -> None:
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write the result: {error.strerror}", where=f"--output {output}"
            ) from None
    if as_json:
        echo_json(result)
    else:
        table(result)
