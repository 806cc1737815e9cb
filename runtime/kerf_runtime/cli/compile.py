"""``kerf compile``: fill the compile cache and say what happened; what the compile Job runs."""

from __future__ import annotations

import time
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
from kerf_runtime.cli.output import echo_json, human_bytes, human_seconds
from kerf_runtime.cli.result import result_file_option, written_result
from kerf_runtime.engine.threads import prepare_environment
from kerf_runtime.errors import ConfigError, KerfError

if TYPE_CHECKING:
    from kerf_runtime.cli.progress import PhaseProgress
    from kerf_runtime.engine.args import EngineArgs

__all__ = ["compile_command", "compile_into_cache"]


@click.command("compile")
@document_options
@model_path_option
@cache_dir_option
@result_file_option
@json_option
def compile_command(
    file: Path | None,
    overrides: tuple[str, ...],
    model_path: Path | None,
    cache_dir: Path | None,
    result_file: Path | None,
    as_json: bool,
) -> None:
    """Compile a model into the cache, check it numerically, and publish it.

    Does nothing but verify when the cache already holds the key.
    """
    with written_result(result_file) as result:
        result.update(_compile(file, overrides, model_path, cache_dir, as_json=as_json))
    if as_json:
        echo_json({"event": "done", **result})
    else:
        click.echo(
            f"{result['key']}: {result['result']} ({result['reason']}), {human_bytes(result['sizeBytes'])}, "
            f"{human_seconds(result['seconds'])}"
        )


def _compile(
    file: Path | None,
    overrides: tuple[str, ...],
    model_path: Path | None,
    cache_dir: Path | None,
    *,
    as_json: bool,
) -> dict[str, Any]:
    from kerf_runtime.cache.session import DISABLE_VARIABLE, cache_disabled
    from kerf_runtime.cli.document import read_document
    from kerf_runtime.cli.model import find_model
    from kerf_runtime.cli.progress import open_progress
    from kerf_runtime.config import needs_compile_cache

    document = read_document(file, overrides)
    if cache_disabled():
        raise ConfigError(
            "there is no cache to compile into",
            where=f"{DISABLE_VARIABLE}=1",
            hint="Unset it, or serve without compiling first",
        )
    if not needs_compile_cache(document.spec):
        raise ConfigError(
            "there is nothing to compile into a cache: the level is below 3 or enforceEager is set",
            where="compilation.level",
            hint="Set level 3, or serve without compiling",
        )
    model_path = find_model(document, model_path, as_json=as_json)
    args = engine_args(document, model_path=model_path, cache_dir=cache_dir or default_cache_dir())
    with open_progress(as_json=as_json) as progress:
        result = compile_into_cache(args, progress)
        progress.finish()
    return result


def compile_into_cache(args: EngineArgs, progress: PhaseProgress) -> dict[str, Any]:
    """Make sure that the cache holds the compiled model of ``args``.

    Returns:
        ``key``, ``result`` (``published`` or ``hit``), ``reason`` and ``message`` (the verdict about what
        was there before), ``sizeBytes``, ``seconds``, ``counters``,
        ``gate`` (numbers of the numerical gate) and ``phases`` (seconds).

    Raises:
        KerfError: configuration, model, compiler, numerical gate or volume.
    """
    started = time.monotonic()
    progress("import", "torch", None)
    prepare_environment()
    from kerf_runtime.compilation.counters import compilation_counter
    from kerf_runtime.config import parse_document
    from kerf_runtime.engine.phases import PhaseClock
    from kerf_runtime.engine.startup import compile_only

    clock = PhaseClock(progress, started=started)
    clock.seconds["import"] = time.monotonic() - started
    compiled = compile_only(
        args, parse_document(args.document, where="document").spec, clock, progress
    )
    manifest = compiled.cache.manifest
    hit = compiled.cache.verdict.hit
    if manifest is None:
        raise KerfError(
            f"the compiled model was not published: {compiled.cache.verdict.reason}: "
            f"{compiled.cache.verdict.message}",
            where=str(args.cache_dir),
        )
    return {
        "key": compiled.cache.key,
        "result": "hit" if hit else "published",
        "reason": compiled.cache.verdict.reason,
        "message": compiled.cache.verdict.message,
        "sizeBytes": manifest.total_bytes,
        "seconds": round(time.monotonic() - started, 3),
        "counters": compilation_counter.snapshot(),
        "gate": dict(manifest.gate),
        "phases": {name: round(value, 3) for name, value in clock.seconds.items()},
    }
