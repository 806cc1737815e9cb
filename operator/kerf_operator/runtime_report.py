"""What a serving pod says about itself: the JSON of ``GET /debug/graphs``, as far as we need it.  Pure.

Unknown fields are ignored and missing ones have neutral values, so that an older or newer runtime can
still be read.  A document of another shape is a ``ValueError`` and not a guess.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = ["RuntimeReport", "parse_report"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ReportedCache(_Part):
    key: str | None = None
    result: str | None = None
    reason: str | None = None
    message: str | None = None
    bytes: int | None = None


class ReportedChange(_Part):
    field: str
    requested: str
    effective: str
    reason: str
    message: str = ""


class ReportedConfig(_Part):
    requested_mode: str | None = None
    mode: str | None = None
    capture_sizes: tuple[int, ...] = ()
    changes: tuple[ReportedChange, ...] = ()


class ReportedGraphs(_Part):
    backend: str | None = None
    captured: int | None = None
    memory_bytes: int | None = None
    capture_seconds: float | None = None


class RuntimeReport(_Part):
    """The report of one pod.

    Attributes:
        counters: what the compiler did in that process; a hit has no trace and no compilation.
        dispatch: model steps by mode since the process started.
        startup: seconds by start-up phase.
    """

    version: str | None = None
    served_name: str | None = None
    phase: str | None = None
    ready: bool = False
    cache: ReportedCache = ReportedCache()
    counters: dict[str, int] = {}
    effective: ReportedConfig = ReportedConfig()
    graphs: ReportedGraphs = ReportedGraphs()
    dispatch: dict[str, int] = {}
    startup: dict[str, float] = {}

    @property
    def compilations(self) -> int:
        """Traces and compilations of the process; 0 after a warm start."""
        names = ("dynamo_traces", "backend_compilations", "inductor_compilations")
        return sum(self.counters.get(name, 0) for name in names)


def parse_report(document: Any) -> RuntimeReport:
    """The report in ``document``.

    Raises:
        ValueError: the document has another shape; names the first field that differs.
    """
    if isinstance(document, dict):
        document = {key: value for key, value in document.items() if value is not None}
    try:
        return RuntimeReport.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"]) or "(document)"
        raise ValueError(f"unexpected report: {path}: {first['msg']}") from None
