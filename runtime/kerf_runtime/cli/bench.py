"""``kerf bench``: measure this machine; the measuring itself is in ``bench_latency``, ``bench_startup``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kerf_runtime.cli.options import document_options, engine_args, json_option, model_path_option
from kerf_runtime.cli.output import echo_json
from kerf_runtime.errors import ConfigError

__all__ = ["bench"]

_OUTPUT = click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the result there as JSON, for benchmarks/results.",
)


@click.group()
def bench() -> None:
    """Measure this machine.  Results go to benchmarks/results with --output."""


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
    from kerf_runtime.cli.document import read_document

    document = read_document(file, overrides)
    args = engine_args(document, model_path=model_path, cache_dir=None)
    workload = Workload(
        batches=batches or (1, 8),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
    )
    result = measure(document, args.model_path, workload)
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
    from kerf_runtime.cli.document import read_document

    document = read_document(file, overrides)
    args = engine_args(document, model_path=model_path, cache_dir=None)
    result = measure(document, args.model_path, repeats=repeats)
    _finish(result, output, as_json=as_json, table=print_table)


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
