"""Shows what a long command is doing: a live display on a terminal, plain lines elsewhere.

Progress goes to standard error, so that standard output stays for results.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import click

from kerf_runtime.cli.output import echo_json, human_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["JsonProgress", "LiveProgress", "PhaseProgress", "PlainProgress", "open_progress"]

_PLAIN_INTERVAL_SECONDS = 5.0
_JSON_INTERVAL_SECONDS = 0.5


class PhaseProgress(Protocol):
    """Shows phases; a context manager that ends the display."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def __call__(self, phase: str, detail: str, fraction: float | None) -> None:
        """A phase began, or went on."""

    def finish(self) -> None:
        """The last phase is over."""


def open_progress(*, as_json: bool) -> PhaseProgress:
    """The display that suits where our output goes."""
    if as_json:
        return JsonProgress()
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()


class _Phases:
    """Which phase runs since when."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._since = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def __call__(self, phase: str, detail: str, fraction: float | None) -> None:
        if phase != self._phase:
            self.finish()
            self._phase, self._since = phase, time.monotonic()
            self._began(phase, detail)
        else:
            self._went_on(phase, detail, fraction)

    def finish(self) -> None:
        """The last phase is over."""
        if self._phase is not None:
            self._ended(self._phase, time.monotonic() - self._since)
            self._phase = None

    def _began(self, phase: str, detail: str) -> None: ...

    def _went_on(self, phase: str, detail: str, fraction: float | None) -> None: ...

    def _ended(self, phase: str, seconds: float) -> None: ...


class PlainProgress(_Phases):
    """One line when a phase ends, and one every few seconds while it runs.

    A thread writes the latter: a compiler may say nothing for a minute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="kerf-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _repeat(self) -> None:
        said = ""
        while not self._over.wait(_PLAIN_INTERVAL_SECONDS):
            if self._phase is None:
                continue
            line = f"  {self._now} ({time.monotonic() - self._since:.0f} s so far)"
            if line != said:
                click.echo(line, err=True)
                said = line

    def _began(self, phase: str, detail: str) -> None:
        self._now = f"{phase} {detail}".rstrip()

    def _went_on(self, phase: str, detail: str, fraction: float | None) -> None:
        share = "" if fraction is None else f" {fraction:.0%}"
        self._now = f"{phase}{share} {detail}".rstrip()

    def _ended(self, phase: str, seconds: float) -> None:
        if phase != "ready":
            click.echo(f"  {phase:<12} {human_seconds(seconds):>8}", err=True)


class JsonProgress(_Phases):
    """JSON lines on standard output: a phase begins, goes on (twice a second at most), ends."""

    def __init__(self) -> None:
        super().__init__()
        self._said = 0.0

    def _began(self, phase: str, detail: str) -> None:
        self._said = time.monotonic()
        echo_json({"event": "phase", "phase": phase, "detail": detail})

    def _went_on(self, phase: str, detail: str, fraction: float | None) -> None:
        if time.monotonic() - self._said >= _JSON_INTERVAL_SECONDS:
            self._said = time.monotonic()
            echo_json({"event": "progress", "phase": phase, "detail": detail, "fraction": fraction})

    def _ended(self, phase: str, seconds: float) -> None:
        echo_json({"event": "phase_done", "phase": phase, "seconds": round(seconds, 4)})


class LiveProgress(_Phases):
    """A line per phase with its time; the running one moves."""

    def __init__(self) -> None:
        super().__init__()
        self._display: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._display = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[detail]}"),
            console=Console(stderr=True),
        )
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None

    def _began(self, phase: str, detail: str) -> None:
        if self._display is not None and phase != "ready":
            self._task = self._display.add_task(phase, total=None, detail=detail[:60])

    def _went_on(self, phase: str, detail: str, fraction: float | None) -> None:
        if self._display is not None and self._task is not None:
            known = {} if fraction is None else {"total": 1.0, "completed": fraction}
            self._display.update(self._task, detail=detail[:60], **known)  # type: ignore[arg-type]

    def _ended(self, phase: str, seconds: float) -> None:
        if self._display is not None and self._task is not None:
            self._display.update(self._task, total=1.0, completed=1.0, detail="")
            self._task = None
