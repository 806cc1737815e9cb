"""Writes docs/metrics.md from the table in kerf_runtime.metric_table: name, type, labels, meaning, buckets.

``python hack/metrics_docs.py`` writes the file, ``--check`` fails if it is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kerf_runtime.metric_table import METRICS, MetricSpec

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

_INTRODUCTION = """# Metrics of the runtime

<!-- Written by hack/metrics_docs.py from kerf_runtime.metric_table; do not edit. -->

`GET /metrics` of a serving pod, as Prometheus text or OpenMetrics. Units are seconds, bytes and ratios. Labels are
bounded: `model_name` is the served name, `mode` is FULL, PIECEWISE or NONE, `size` the captured size, or 0 for steps
that ran without a graph, `tokens` the exact number up to 512 and rounded up to one of eight per octave above,
`reason` one of the codes in [configuration.md](configuration.md). `kerf_compilations_after_startup_total` and
`kerf_capture_after_startup_total` must stay 0. The operator has metrics of its own: [operator.md](operator.md).

| metric | type | labels | meaning |
|---|---|---|---|
"""


def render() -> str:
    """The whole document."""
    rows = [
        f"| `{spec.series.removesuffix('_bucket')}` | {spec.type} | "
        f"{', '.join(f'`{label}`' for label in spec.labels) or '-'} | {spec.help} |"
        for spec in METRICS.values()
    ]
    buckets = [f"| `{spec.name}` | {_bounds(spec)} |" for spec in METRICS.values() if spec.buckets]
    return (
        _INTRODUCTION
        + "\n".join(rows)
        + "\n\n## Buckets\n\nUpper bounds in seconds.\n\n| metric | bounds |\n|---|---|\n"
        + "\n".join(buckets)
        + "\n"
    )


def _bounds(spec: MetricSpec) -> str:
    return ", ".join(f"{bound:g}" for bound in spec.buckets or ())


def main() -> int:
    """Write, or with ``--check`` compare."""
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != render():
            print(
                "docs/metrics.md is out of date: run python hack/metrics_docs.py", file=sys.stderr
            )
            return 1
        return 0
    TARGET.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
