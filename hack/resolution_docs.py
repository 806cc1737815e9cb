"""The tables of docs/configuration.md that show what resolution makes of every request.

Made by resolving the whole product of level, mode, splitting ops, back end, enforceEager and platform and
merging rows that come out alike, so that the page cannot differ from the code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kerf_runtime.config import (
    AttentionGraphSupport,
    CompilationLevel,
    CompilerBackendName,
    CUDAGraphMode,
    DType,
    EffectiveConfig,
    ModelDeploymentSpec,
    PlatformFacts,
    resolve,
)
from kerf_runtime.config.passes import FUSION_PASSES

__all__ = ["resolution_section"]

_SPLITTING: dict[str, list[str] | None] = {
    "default": None,
    "custom, with attention": ["kerf::attention", "aten::mm"],
    "custom, without attention": ["aten::mm"],
    "empty": [],
}

_PLATFORMS: dict[str, PlatformFacts] = {
    "CPU": PlatformFacts(
        "cpu", "emulated", "attention", AttentionGraphSupport.ALWAYS, DType.FLOAT32
    ),
    **{
        f"CUDA {grade.name}": PlatformFacts("cuda", "cuda", "attention", grade, DType.AUTO)
        for grade in sorted(AttentionGraphSupport, reverse=True)
    },
    "without graphs": PlatformFacts(
        "other", "none", "attention", AttentionGraphSupport.ALWAYS, DType.AUTO
    ),
}

_FUSIONS = ("normQuantFusion", "activationQuantFusion", "attentionQuantFusion")

_INTRODUCTION = """## From requested to effective

`kerf validate --model-path`, the log, `/debug/graphs` and `status.graphs` show what is in force and why. The two
tables below are made by resolving every combination of level, mode, splitting ops, back end, `enforceEager` and
platform; rows that come out alike are merged. `strict: true` makes an error of every cell that names a reason.

### `cudagraphMode`

A cell is the effective mode and the reasons, in order; `=` is as requested. CUDA is followed by what the
attention implementation supports inside a graph. Splitting ops *with attention* name the attention operator, so
that no piece holds it.

"""

_MODE_NOTES = """
The back end changes nothing here. With `enforceEager` every mode but `NONE` becomes `NONE` (`EnforceEager`).

### Levels, custom operators, fusions and static sizes

With `customOps` left out, every fusion on and `compileSizes` given. Graph modes and platforms change nothing here.

"""

_WORK_NOTES = """
A fusion that is on while `noopElimination` is off stays on, with the warning `MissingDependency`.
"""


def resolution_section() -> str:
    """The whole section as Markdown."""
    return "".join(
        (
            _INTRODUCTION,
            _table(["level", "splitting ops", "platform", *_codes(CUDAGraphMode)], _mode_rows()),
            _MODE_NOTES,
            _table(
                [
                    "level",
                    "`backend`",
                    "`enforceEager`",
                    "splitting ops",
                    "effective level",
                    "custom ops",
                    "`noopElimination`",
                    "norm and activation fusion, `compileSizes`",
                    "`attentionQuantFusion`",
                ],
                _work_rows(),
            ),
            _WORK_NOTES,
        )
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _codes(values: Iterable[str]) -> list[str]:
    return [f"`{value}`" for value in values]


def _resolved(
    level: int, mode: str, splitting: str, backend: str, eager: bool, platform: str
) -> EffectiveConfig:
    spec = ModelDeploymentSpec.model_validate(
        {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "engine": {"enforceEager": eager},
            "compilation": {
                "level": level,
                "cudagraphMode": mode,
                "splittingOps": _SPLITTING[splitting],
                "backend": backend,
                "compileSizes": [1],
                "passes": dict.fromkeys(_FUSIONS, True),
            },
        }
    )
    facts = _PLATFORMS[platform]
    return resolve(spec, platform=facts, model_max_len=1, model_dtype=DType.FLOAT32)


def _one(values: Iterable[str], what: str) -> str:
    """The only value; the tables leave a dimension out because it changes nothing, which is checked here."""
    found = set(values)
    if len(found) != 1:
        raise ValueError(f"{what} depends on a dimension that its table leaves out: {found}")
    return found.pop()


def _reasons(effective: EffectiveConfig, field: str) -> str:
    names = (str(change.reason) for change in effective.changes if change.field == field)
    return ", ".join(dict.fromkeys(names))


def _mode_rows() -> list[list[str]]:
    def cell(level: int, mode: str, splitting: str, platform: str) -> str:
        def one(backend: str) -> str:
            effective = _resolved(level, mode, splitting, backend, False, platform)
            if effective.mode == mode:
                return "="
            return f"`{effective.mode}` {_reasons(effective, 'cudagraphMode')}"

        return _one(map(one, CompilerBackendName), f"the mode of level {level}, {mode}")

    cells = {
        (str(int(level)), splitting, platform): tuple(
            cell(level, mode, splitting, platform) for mode in CUDAGraphMode
        )
        for level, splitting, platform in itertools.product(
            CompilationLevel, _SPLITTING, _PLATFORMS
        )
    }
    for mode in CUDAGraphMode:
        eager = (
            _resolved(level, mode, splitting, backend, True, platform)
            for level, splitting, backend, platform in itertools.product(
                CompilationLevel, _SPLITTING, CompilerBackendName, _PLATFORMS
            )
        )
        _one(
            (f"{e.mode} {_reasons(e, 'cudagraphMode')}" for e in eager), "the mode of enforceEager"
        )
    return [[*key, *row] for key, row in _merge(cells)]


def _work_rows() -> list[list[str]]:
    def row(level: int, backend: str, eager: bool, splitting: str) -> tuple[str, ...]:
        def one(mode: str, platform: str) -> str:
            e = _resolved(level, mode, splitting, backend, eager, platform)
            sizes = _reasons(e, "compileSizes")
            fused = {_reasons(e, f"passes.{name}") for name in _FUSIONS[:2]}
            if fused != {sizes} or bool(sizes) != (not e.compile_sizes):
                raise ValueError("fusions and static sizes need a column each")
            lowered = _reasons(e, "level")
            return "|".join(
                (
                    f"{int(e.level)} {lowered}".strip(),
                    "all" if e.custom_ops else "none",
                    "on" if e.passes.noop_elimination else "off",
                    f"off {sizes}" if sizes else "on",
                    "on"
                    if getattr(e.passes, FUSION_PASSES[2])
                    else f"off {_reasons(e, 'passes.attentionQuantFusion')}",
                )
            )

        outcomes = itertools.starmap(one, itertools.product(CUDAGraphMode, _PLATFORMS))
        return tuple(_one(outcomes, f"the work of level {level}").split("|"))

    cells = {
        (str(int(level)), f"`{backend}`", str(eager).lower(), splitting): row(
            level, backend, eager, splitting
        )
        for eager, level, backend, splitting in itertools.product(
            (False, True), CompilationLevel, CompilerBackendName, _SPLITTING
        )
    }
    return [[*key, *values] for key, values in _merge(cells)]


def _merge(
    cells: dict[tuple[str, ...], tuple[str, ...]],
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Rows whose cells are alike become one, one dimension after the other, the last one first.

    A dimension of which every value came out alike is shown as ``any``.
    """
    dimensions = len(next(iter(cells)))
    rows = [(tuple((part,) for part in key), values) for key, values in cells.items()]
    everything = [{key[d] for key in cells} for d in range(dimensions)]
    for d in reversed(range(dimensions)):
        groups: dict[tuple[object, ...], list[str]] = {}
        for key, values in rows:
            groups.setdefault((key[:d], key[d + 1 :], values), []).extend(key[d])
        rows = [
            ((*before, tuple(merged), *after), values)
            for (before, after, values), merged in groups.items()
        ]
    return [
        (
            tuple(
                "any" if set(part) == everything[d] else "; ".join(part)
                for d, part in enumerate(key)
            ),
            values,
        )
        for key, values in rows
    ]
