"""The pass manager: what Inductor calls after its own post-grad passes, once per compiled graph.

It runs the enabled passes in their order, counts what each one matched, and writes the graph before and
after each pass when asked to.  Its uuid covers names and versions of the enabled passes, so a changed
pass or a changed configuration is another entry in Inductor's caches and in ours.  What one pass needs of
another is checked with the rest of the configuration (``config.resolve``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import fx

from kerf_runtime.compilation import internals
from kerf_runtime.compilation.counters import (
    PASS_COUNTERS,
    CompilationCounter,
    compilation_counter,
)
from kerf_runtime.compilation.passes.addmm import unfuse_matrix_adds
from kerf_runtime.compilation.passes.attention_quant import fuse_attention_quant
from kerf_runtime.compilation.passes.functionalization import fix_functionalization
from kerf_runtime.compilation.passes.fusions import fuse_activation_quant, fuse_norm_quant
from kerf_runtime.compilation.passes.noop import eliminate_noops
from kerf_runtime.config.passes import PassConfig, enabled_passes, pass_uuids

__all__ = ["PassManager", "inductor_options"]

_log = logging.getLogger(__name__)


def inductor_options(manager: PassManager) -> dict[str, Any]:
    """The Inductor options under which ``manager`` runs and in-place operators can stay in place."""
    return {"post_grad_custom_post_pass": manager, "enable_auto_functionalized_v2": False}


class PassManager(internals.CustomGraphPass):
    """Runs the passes on a post-grad graph, in place.

    Args:
        config: which passes are on.
        counters: where matches are counted.
        dump_dir: where the graph is written before and after each pass, as Python; None for nowhere.

    Attributes:
        matches: matches of each enabled pass since the manager was made.
        left_functional: calls that ``fix_functionalization`` could not make in-place again.
    """

    def __init__(
        self,
        config: PassConfig,
        *,
        counters: CompilationCounter = compilation_counter,
        dump_dir: Path | None = None,
    ) -> None:
        self.matches: dict[str, int] = dict.fromkeys(enabled_passes(config), 0)
        self.left_functional = 0
        self._uuid = sha256(json.dumps(pass_uuids(config)).encode()).hexdigest()
        self._counters = counters
        self._dump_dir = dump_dir
        self._graphs = 0
        self._passes: dict[str, Callable[[fx.Graph], int]] = {
            "unfuse_matrix_adds": unfuse_matrix_adds,
            "noop_elimination": eliminate_noops,
            "norm_quant_fusion": fuse_norm_quant,
            "activation_quant_fusion": fuse_activation_quant,
            "attention_quant_fusion": fuse_attention_quant,
            "fix_functionalization": self._fix_functionalization,
        }

    def uuid(self) -> str:
        """64 hex digits that identify what the enabled passes do."""
        return self._uuid

    def __deepcopy__(self, memo: dict[int, Any]) -> PassManager:
        """Itself: Inductor copies its configuration, and there is one count of matches."""
        return self

    def __call__(self, graph: fx.Graph) -> None:
        """Run the enabled passes on ``graph``."""
        number = self._graphs
        self._graphs += 1
        for order, name in enumerate(self.matches):
            self._dump(graph, f"graph{number}_{order}_{name}_before.py")
            found = self._passes[name](graph)
            self._dump(graph, f"graph{number}_{order}_{name}_after.py")
            self._count(name, found)
        graph.lint()

    def _count(self, name: str, found: int) -> None:
        self.matches[name] += found
        field = PASS_COUNTERS[name]
        setattr(self._counters, field, getattr(self._counters, field) + found)
        _log.debug("%s matched %d times", name, found)

    def _fix_functionalization(self, graph: fx.Graph) -> int:
        result = fix_functionalization(graph)
        self.left_functional += result.left
        if result.left:
            _log.info("%d in-place operators stay functional: their buffer is read", result.left)
        if result.fixed and "noop_elimination" in self.matches:
            # A reshaped buffer that was written is reshaped back by whoever reads it.
            self._count("noop_elimination", eliminate_noops(graph))
        return result.fixed

    def _dump(self, graph: fx.Graph, name: str) -> None:
        if self._dump_dir is None:
            return
        self._dump_dir.mkdir(parents=True, exist_ok=True)
        code = graph.python_code("self", verbose=True, include_stride=True, expanded_def=True)
        (self._dump_dir / name).write_text(code.src.lstrip())
