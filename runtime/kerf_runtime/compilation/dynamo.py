"""What tracing asks of Dynamo beside ``torch.compile``: hooks, errors, and what a trace is about to change.

Nothing here decides anything; imported by whoever traces, never on a warm start.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from kerf_runtime.compilation import internals

__all__ = [
    "BACKEND_ERROR",
    "GRAPH_BREAKS",
    "SideEffect",
    "captured_bytecode",
    "compiled_names",
    "fake_mode",
    "pending_side_effects",
    "set_guard_hook",
    "traced_code",
]

GRAPH_BREAKS: tuple[type[Exception], ...] = (internals.Unsupported, internals.UserError)
"""What Dynamo raises for a forward that is not one graph; the message holds the user's stack."""

BACKEND_ERROR: type[Exception] = internals.BackendCompilerFailed
"""What Dynamo raises around an exception of the back end (``inner_exception``)."""


@dataclass(frozen=True)
class SideEffect:
    """Something other than a tensor that the forward changes.

    Attributes:
        owner: the object, as a path from the model: ``layers.0``.
        names: the attributes or keys that are assigned, if known, each with whether a tensor is assigned.
        stack: the user's frames as text, the last of them is where it happens; empty if unknown.
    """

    owner: str
    names: tuple[tuple[str, bool], ...]
    stack: str


def fake_mode() -> Any:
    """The fake tensor mode of the trace that is running."""
    mode = internals.TracingContext.get().fake_mode
    assert mode is not None
    return mode


def traced_code() -> list[CodeType]:
    """Code objects of all functions that the running trace went through, inlined ones included."""
    return list(internals.TracingContext.get_traced_code() or [])


def set_guard_hook(count: Callable[[], None]) -> None:
    """Have ``count()`` called after every evaluation of guards in this process."""

    def completed(cache_hit: bool) -> bool:
        count()
        return cache_hit

    internals.eval_frame.set_guard_complete_hook(completed)


@contextmanager
def captured_bytecode() -> Iterator[list[tuple[CodeType, CodeType]]]:
    """Collect (original, transformed) code objects of everything that Dynamo compiles in the block."""
    pairs: list[tuple[CodeType, CodeType]] = []

    def hook(code: CodeType, new_code: CodeType) -> CodeType | None:
        pairs.append((code, new_code))
        return None

    handle = internals.convert_frame.register_bytecode_hook(hook)
    try:
        with internals.dynamo_config.patch(record_runtime_overhead=False):
            yield pairs
    finally:
        handle.remove()


def compiled_names(code: CodeType) -> tuple[str, ...]:
    """Global names under which transformed bytecode calls what the back end returned."""
    return tuple(name for name in code.co_names if name.startswith("__compiled_fn_"))


def pending_side_effects() -> tuple[SideEffect, ...]:
    """What the code being traced will change beside tensors; to be called from within a back end."""
    effects = internals.symbolic_convert.InstructionTranslator.current_tx().output.side_effects
    found = []
    for item in effects.id_to_variable.values():
        # Tensors are in the graph, where writes to them are found; what has no source is new.
        if item.source is None or isinstance(item, internals.variables.TensorVariable):
            continue
        if effects.is_modified(item):
            stacks = effects.mutation_user_stacks.get(item, [])
            found.append(
                SideEffect(_path(item.source.name), _changed(effects, item), _format(stacks))
            )
    return tuple(found)


def _changed(effects: Any, item: Any) -> tuple[tuple[str, bool], ...]:
    names = [
        (str(name), isinstance(value, internals.variables.TensorVariable))
        for name, value in effects.store_attr_mutations.get(item, {}).items()
    ]
    if isinstance(item, internals.variables.ConstDictVariable):
        before = item.original_items
        names += [
            (
                str(key.vt.as_python_constant()),
                isinstance(value, internals.variables.TensorVariable),
            )
            for key, value in item.items.items()
            if key.vt.is_python_constant() and before.get(key) is not value
        ]
    return tuple(names)


def _path(source: str) -> str:
    """``L['self']._modules['layers']._modules['0']._buffers`` -> ``layers.0``."""
    text = re.sub(r"^L\['(\w+)'\]", r"\1", source)
    text = re.sub(r"^self\b\.?", "", text)
    text = re.sub(r"_modules\['([^']+)'\]", r"\1", text)
    return re.sub(r"\.?_(buffers|parameters|modules)$", "", text)


def _format(stacks: list[Any]) -> str:
    """The user's frames of the first change, without torch's own."""
    if not stacks:
        return ""
    frames = [f for f in stacks[0] if "/torch/nn/modules/" not in f.filename]
    return "".join(traceback.format_list(frames))
