"""``kerf plan``: settings from what was observed instead of from a guess."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerf_runtime.cli.options import document_options, json_option
from kerf_runtime.cli.output import echo_json, echo_table
from kerf_runtime.errors import ConfigError

if TYPE_CHECKING:
    from kerf_runtime.cli.traffic import Traffic
    from kerf_runtime.config import CUDAGraphMode, ModelDeploymentSpec
    from kerf_runtime.cudagraph.size_plan import Limit, Waste

__all__ = ["plan"]

_MOST_SIZES = 256
"""What ``captureSizes`` can hold."""


@click.group()
def plan() -> None:
    """Compute settings from observed traffic."""


@plan.command()
@click.argument("histogram", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@document_options
@click.option(
    "--max-graphs", type=click.IntRange(1), help="Most graphs to record. Default: as many as now."
)
@click.option(
    "--memory-budget", metavar="QUANTITY", help="Most memory of all graphs, for example 512Mi."
)
@click.option(
    "--bytes-per-graph",
    metavar="QUANTITY",
    help="What one graph takes. Default: as measured in /metrics for each mode.",
)
@click.option(
    "--max-size",
    type=click.IntRange(1),
    help="Largest size to capture, in tokens. Default: as now.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    help="Most sequences of a step. Default: the document's.",
)
@click.option(
    "--current",
    metavar="SIZES",
    help="Sizes to compare with, for example 1,2,4. Default: those of now.",
)
@json_option
def sizes(
    histogram: Path,
    file: Path | None,
    overrides: tuple[str, ...],
    max_graphs: int | None,
    memory_budget: str | None,
    bytes_per_graph: str | None,
    max_size: int | None,
    max_num_seqs: int | None,
    current: str | None,
    as_json: bool,
) -> None:
    """Find the capture sizes that pad real batches least.

    HISTOGRAM is the text of /metrics, the JSON answer of a Prometheus query, a JSON object of sizes and
    counts, or lines of size,count; - reads standard input. "Now" is --current, else the document's sizes,
    else those in /metrics.
    """
    from kerf_runtime.cli.traffic import read_traffic
    from kerf_runtime.config import CUDAGraphMode
    from kerf_runtime.config.declared import requested_capture_sizes
    from kerf_runtime.cudagraph.size_plan import count_graphs, plan_sizes, waste_of

    spec = _spec(file, overrides)
    traffic = read_traffic(histogram)
    steps, now, mode = dict(traffic.histogram), traffic.captured, traffic.mode
    if spec is not None:
        now, mode = requested_capture_sizes(spec), spec.compilation.cudagraph_mode
        max_num_seqs = max_num_seqs or spec.engine.max_num_seqs
        steps = _clamp(steps, spec.engine.max_num_batched_tokens)
    if current is not None:
        now = _sizes(current)
    mode = mode or CUDAGraphMode.PIECEWISE
    if max_num_seqs is None:
        raise ConfigError(
            "nothing says how many sequences a step can have, which the largest size must hold",
            where="--max-num-seqs",
            hint="Pass --max-num-seqs, or the document with -f",
        )
    if max_size is None:
        max_size = max(*(now or steps), max_num_seqs)
    _check_limit(spec, max_size)
    limits = _limits(
        spec,
        traffic,
        mode,
        max_graphs,
        memory_budget,
        bytes_per_graph,
        now=count_graphs(mode, now, max_num_seqs),
    )
    found = plan_sizes(
        steps,
        limits=limits,
        max_num_seqs=max_num_seqs,
        max_size=max_size,
        mode=mode,
    )
    if len(found) > _MOST_SIZES:
        raise ConfigError(
            f"the best list has {len(found)} sizes and captureSizes holds {_MOST_SIZES}",
            where="--max-graphs",
            hint="Allow fewer graphs",
        )
    before, after = waste_of(now, steps) if now else None, waste_of(found, steps)
    graphs = count_graphs(mode, found, max_num_seqs)
    limit = min(limit.graphs(mode) for limit in limits)
    if as_json:
        echo_json(_result(mode, graphs, limit, before, after))
    else:
        _show(mode, graphs, limit, before, after)


def _spec(file: Path | None, overrides: tuple[str, ...]) -> ModelDeploymentSpec | None:
    """The spec, if a document was given at all."""
    from kerf_runtime.cli.document import DEPLOYMENT_VARIABLE, read_document

    if file is None and DEPLOYMENT_VARIABLE not in os.environ and not overrides:
        return None
    return read_document(file, overrides).spec


def _sizes(text: str) -> tuple[int, ...]:
    from kerf_runtime.config.compilation import MAX_SIZE

    found = set()
    for word in text.strip().strip("[]").split(","):
        size = int(word) if word.strip().isdecimal() else 0
        if not 1 <= size <= MAX_SIZE:
            raise ConfigError(
                f"a size is a number of tokens from 1 to {MAX_SIZE}, not {word.strip()!r}",
                where=f"--current {text}",
            )
        found.add(size)
    return tuple(sorted(found))


def _clamp(steps: dict[int, float], limit: int) -> dict[int, float]:
    """Batches counted above the largest step are that step: large ones are counted under a rounded number."""
    clamped: dict[int, float] = {}
    for size, count in steps.items():
        at = min(size, limit)
        clamped[at] = clamped.get(at, 0) + count
    return clamped


def _check_limit(spec: ModelDeploymentSpec | None, max_size: int) -> None:
    if spec is not None and max_size > spec.engine.max_num_batched_tokens:
        raise ConfigError(
            f"size {max_size} is above engine.maxNumBatchedTokens "
            f"{spec.engine.max_num_batched_tokens}: no step is that large",
            where="--max-size",
        )


def _limits(
    spec: ModelDeploymentSpec | None,
    traffic: Traffic,
    mode: CUDAGraphMode,
    max_graphs: int | None,
    memory_budget: str | None,
    bytes_per_graph: str | None,
    *,
    now: int,
) -> list[Limit]:
    """What the options, the memory and what there is now allow."""
    from kerf_runtime.cudagraph.size_plan import Limit

    budget, where = _bytes("--memory-budget", memory_budget), "--memory-budget"
    if budget is None and spec is not None:
        budget, where = spec.compilation.graph_memory_bytes, "compilation.graphMemoryBudget"
    limits = [] if max_graphs is None else [Limit(max_graphs)]
    each = _bytes("--bytes-per-graph", bytes_per_graph)
    if budget is not None and each is not None:
        limits.append(Limit(budget, each, each, "bytes", where))
    elif budget is not None:
        mixed, decode = (
            traffic.bytes_per_graph(of) for of in (mode.mixed_mode(), mode.decode_mode())
        )
        if mixed is None or decode is None:
            raise ConfigError(
                "a memory budget needs to know what a graph takes",
                where=where,
                hint="Pass --bytes-per-graph, or the text of /metrics, which has it",
            )
        left = max(0, budget - traffic.shared_bytes)
        limits.append(Limit(left, mixed, decode, "bytes", where))
    if not limits and now:
        limits.append(Limit(now))
    if not limits:
        raise ConfigError(
            "nothing says how many graphs there may be",
            where="--max-graphs",
            hint="Pass --max-graphs, --memory-budget, or the sizes of now with --current or -f",
        )
    return limits


def _bytes(option: str, text: str | None) -> int | None:
    from kerf_runtime.config import parse_quantity

    if text is None:
        return None
    try:
        size = parse_quantity(text)
    except ValueError as error:
        raise ConfigError(str(error), where=option) from None
    if size == 0:
        raise ConfigError("0 bytes hold no graph", where=option)
    return size


def _result(
    mode: CUDAGraphMode, graphs: int, limit: int, before: Waste | None, after: Waste
) -> dict[str, Any]:
    return {
        "captureSizes": [use.size for use in after.uses],
        "mode": mode.value,
        "graphs": graphs,
        "maxGraphs": limit,
        "before": None if before is None else _waste(before),
        "after": _waste(after),
    }


def _waste(waste: Waste) -> dict[str, Any]:
    return {
        "steps": waste.steps,
        "stepsAboveLargest": waste.uncaptured,
        "tokens": waste.tokens,
        "paddingTokens": waste.padding,
        "paddingRatio": waste.ratio,
        "sizes": [
            {"size": use.size, "steps": use.steps, "paddingTokens": use.padding}
            for use in waste.uses
        ],
    }


def _show(mode: CUDAGraphMode, graphs: int, limit: int, before: Waste | None, after: Waste) -> None:
    columns = [waste for waste in (before, after) if waste is not None]
    names = [""] if before is None else [" BEFORE", " AFTER"]
    rows: list[list[str]] = []
    for size in sorted({use.size for waste in columns for use in waste.uses}):
        rows.append([str(size), *(cell for waste in columns for cell in _cells(waste, size))])
    rows.append(
        ["above", *(c for w in columns for c in (_percent(w.uncaptured, w.steps), "no graph"))]
    )
    rows.append(["all", *(c for w in columns for c in ("100.0 %", f"{100 * w.ratio:.2f} %"))])
    echo_table(
        ["SIZE", *(f"{what}{name}" for name in names for what in ("STEPS", "PADDING"))],
        rows,
        right=range(1 + 2 * len(columns)),
    )
    was = "" if before is None else f", before {100 * before.ratio:.2f} %"
    click.echo(
        f"\n{len(after.uses)} sizes, {graphs} graphs in mode {mode} (at most {limit}); "
        f"{100 * after.ratio:.2f} % of the rows in graphs are padding{was}\n"
    )
    click.echo("compilation:")
    click.echo(f"  captureSizes: [{', '.join(str(use.size) for use in after.uses)}]")


def _cells(waste: Waste, size: int) -> tuple[str, str]:
    """Steps of one size and its padding, as parts of all; dashes for a size that is not in the list."""
    use = next((use for use in waste.uses if use.size == size), None)
    if use is None:
        return "-", "-"
    rows = waste.tokens + waste.padding
    return _percent(use.steps, waste.steps), _percent(use.padding, rows, digits=2)


def _percent(part: float, whole: float, digits: int = 1) -> str:
    return f"{100 * part / whole if whole else 0:.{digits}f} %"
