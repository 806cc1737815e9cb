"""What commands print: JSON for programs, tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

__all__ = ["echo_json", "echo_table", "human_bytes", "human_seconds"]


def echo_json(value: Any) -> None:
    """One JSON document on one line of standard output."""
    click.echo(json.dumps(value, default=str))


def echo_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> None:
    """Aligned columns on standard output, the same on a terminal and in a file.

    Args:
        columns: headings.
        rows: cells.
        right: indices of columns that are aligned to the right.
    """
    table = [list(columns), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    to_right = set(right)
    for index, row in enumerate(table):
        cells = [
            cell.rjust(width) if i in to_right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
        if index == 0:
            click.echo("  ".join("-" * width for width in widths))


def human_bytes(count: int) -> str:
    """``1.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """Three digits with the unit that suits: ``850 us``, ``12.3 ms``, ``4.56 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
