"""What resolution must answer, written down as tables by hand: rows to read, not rules to run.

``MODES``: the effective mode and the reasons for each requested mode.  What matters is where attention
is in what is recorded, and which batches the attention implementation can have in a graph.

    between   level 3 and the splitting ops name attention: pieces hold no attention
    inside    level 3 and the splitting ops name other operators only: some piece holds attention
    whole     level 3 without splitting ops: the only piece is the whole forward
    unsplit   levels 0, 1 and 2: there are no pieces, whatever the splitting ops are

``WORK``: level, custom operators, fusions and static sizes, for level, back end and ``enforceEager``.
"""

from __future__ import annotations

from kerf_runtime.config import AttentionGraphSupport, PlatformFacts
from kerf_runtime.config.engine import DType

_MODES = """
where    support              NONE   PIECEWISE                       FULL                            FULL_DECODE_ONLY   FULL_AND_PIECEWISE
between  ALWAYS               =      =                               =                               =                  =
between  UNIFORM_BATCH        =      =                               FULL_AND_PIECEWISE:limit        =                  =
between  SINGLE_TOKEN_DECODE  =      =                               FULL_AND_PIECEWISE:limit        =                  =
between  NEVER                =      =                               PIECEWISE:limit,limit           NONE:limit         PIECEWISE:limit
inside   ALWAYS               =      =                               =                               =                  =
inside   UNIFORM_BATCH        =      FULL_DECODE_ONLY:limit          FULL_DECODE_ONLY:limit          =                  FULL_DECODE_ONLY:limit
inside   SINGLE_TOKEN_DECODE  =      FULL_DECODE_ONLY:limit          FULL_DECODE_ONLY:limit          =                  FULL_DECODE_ONLY:limit
inside   NEVER                =      NONE:limit,limit                NONE:limit,limit                NONE:limit         NONE:limit,limit
whole    ALWAYS               =      FULL:empty                      =                               =                  FULL:empty
whole    UNIFORM_BATCH        =      FULL_DECODE_ONLY:empty,limit    FULL_DECODE_ONLY:limit          =                  FULL_DECODE_ONLY:empty,limit
whole    SINGLE_TOKEN_DECODE  =      FULL_DECODE_ONLY:empty,limit    FULL_DECODE_ONLY:limit          =                  FULL_DECODE_ONLY:empty,limit
whole    NEVER                =      NONE:empty,limit,limit          NONE:limit,limit                NONE:limit         NONE:empty,limit,limit
unsplit  ALWAYS               =      NONE:low                        =                               =                  FULL_DECODE_ONLY:low
unsplit  UNIFORM_BATCH        =      NONE:low                        FULL_DECODE_ONLY:limit          =                  FULL_DECODE_ONLY:low
unsplit  SINGLE_TOKEN_DECODE  =      NONE:low                        FULL_DECODE_ONLY:limit          =                  FULL_DECODE_ONLY:low
unsplit  NEVER                =      NONE:low                        NONE:limit,limit                NONE:limit         NONE:low,limit
"""

_WORK = """
level  backend   enforceEager  becomes  customOps  noopElimination  fusionsAndSizes
0      inductor  false         0        all        off              off:low
0      eager     false         0        all        off              off:low
1      inductor  false         1        none       off              off:low
1      eager     false         1        all        off              off:low
2      inductor  false         2        none       off              off:low
2      eager     false         2        all        off              off:low
3      inductor  false         3        none       on               on
3      eager     false         3        all        off              off:backend
0      inductor  true          0        all        off              off:forced
0      eager     true          0        all        off              off:forced
1      inductor  true          0        all        off              off:forced
1      eager     true          0        all        off              off:forced
2      inductor  true          0        all        off              off:forced
2      eager     true          0        all        off              off:forced
3      inductor  true          0        all        off              off:forced
3      eager     true          0        all        off              off:forced
"""

CODES = {
    "low": "LevelTooLow",
    "empty": "EmptySplittingOps",
    "limit": "AttentionBackendLimit",
    "forced": "EnforceEager",
    "backend": "EagerBackend",
    "splitting": "SplittingOpsLimit",
    "platform": "PlatformUnsupported",
}

SPLITTING = {
    "default": None,
    "custom with attention": ["aten::mm", "kerf::attention.default"],
    "custom without attention": ["aten::mm"],
    "empty": [],
}

PLATFORMS = {
    "cpu": PlatformFacts(
        "cpu", "emulated", "some-attention", AttentionGraphSupport.ALWAYS, DType.FLOAT32
    ),
    **{
        f"cuda {grade.name}": PlatformFacts("cuda", "cuda", "some-attention", grade, DType.AUTO)
        for grade in AttentionGraphSupport
    },
    "without graphs": PlatformFacts(
        "other", "none", "some-attention", AttentionGraphSupport.ALWAYS, DType.AUTO
    ),
}

Outcome = tuple[str, list[str]]


def _outcome(requested: str, cell: str) -> Outcome:
    effective, _, reasons = cell.partition(":")
    return (
        requested if effective == "=" else effective,
        [CODES[word] for word in reasons.split(",") if word],
    )


def _modes() -> dict[tuple[str, str, str], Outcome]:
    header, *rows = (line.split() for line in _MODES.strip().splitlines())
    return {
        (where, support, requested): _outcome(requested, cell)
        for where, support, *cells in rows
        for requested, cell in zip(header[2:], cells, strict=True)
    }


MODES = _modes()
"""(where attention is, support, requested mode) -> (effective mode, reasons in order)."""

WORK = {
    (int(level), backend, eager == "true"): (int(becomes), ops, noop == "on", rest)
    for level, backend, eager, becomes, ops, noop, rest in (
        line.split() for line in _WORK.strip().splitlines()[1:]
    )
}
"""(level, back end, enforceEager) -> (level, custom operators, noopElimination, fusions and sizes)."""


def where_attention_is(level: int, splitting: str) -> str:
    """The first column of ``MODES``."""
    if level < 3:
        return "unsplit"
    return {"custom without attention": "inside", "empty": "whole"}.get(splitting, "between")


def expected_mode(level: int, mode: str, splitting: str, *, eager: bool, platform: str) -> Outcome:
    """Effective mode and reasons."""
    if mode == "NONE":
        return "NONE", []
    if eager:
        return "NONE", [CODES["forced"]]
    if platform == "without graphs":
        return "NONE", [CODES["platform"]]
    support = "ALWAYS" if platform == "cpu" else platform.removeprefix("cuda ")
    return MODES[where_attention_is(level, splitting), support, mode]
