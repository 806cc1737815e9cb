"""The stitching plan: how to run a split graph, as plain data.

A plan names its inputs (arguments, sizes, parameters and buffers), the pieces by fingerprint and the
splitting ops between them.  It is stored in the cache, so a warm start rebuilds the forward without
Dynamo; a cold start runs the very same plan.  ``stitch`` turns it into one Python function without
guards: a straight line of calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.compilation.decorator import presence_error
from kerf_runtime.errors import CompileError

__all__ = [
    "InputRef",
    "PlanStep",
    "StitchPlan",
    "stitch",
    "stitched_source",
]


_VALUE = re.compile(r"[iv]\d+")
"""Names of values: inputs of the graph and results of steps."""
_TARGET = re.compile(r"[\w:.]+")
"""Fingerprints and operators."""


@dataclass(frozen=True)
class InputRef:
    """Where one graph input comes from at run time.

    ``kind`` is ``argument`` (``name`` is the forward's argument), ``state`` (``name`` is the qualified
    name of a parameter or buffer) or ``size`` (dimension ``dim`` of argument ``name``).  ``key`` chooses
    one tensor of an argument that is ``IntermediateTensors``, and is empty for a plain tensor.
    """

    kind: str
    name: str
    dim: int = 0
    key: str = ""


@dataclass(frozen=True)
class PlanStep:
    """One call.  ``kind`` is ``piece`` (``target`` is a fingerprint) or ``op`` (``target`` is a qualified
    operator overload).  Every entry of ``inputs`` is ``["value", name]`` or ``["constant", literal]``.
    """

    kind: str
    name: str
    target: str
    inputs: tuple[tuple[str, Any], ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class StitchPlan:
    """Arguments of the forward, graph inputs by value name, steps in order, the returned value, which
    arguments were None in the trace and stay so, and the parameters and buffers that the forward writes.
    """

    arguments: tuple[str, ...]
    inputs: tuple[tuple[str, InputRef], ...]
    steps: tuple[PlanStep, ...]
    result: str
    absent: tuple[str, ...] = ()
    state_writes: tuple[str, ...] = ()

    @property
    def piece_fingerprints(self) -> tuple[str, ...]:
        """Distinct pieces in order of first use."""
        return tuple(dict.fromkeys(step.target for step in self.steps if step.kind == "piece"))

    @property
    def capturable(self) -> int:
        """Number of compiled-piece calls in one forward."""
        return sum(step.kind == "piece" for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the cache."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StitchPlan:
        """The plan stored by ``to_json``.

        Raises:
            one of ``stored.UNREADABLE``: the data is no plan that can be run.
        """
        plan = cls(
            arguments=tuple(data["arguments"]),
            inputs=tuple((name, InputRef(**ref)) for name, ref in data["inputs"]),
            steps=tuple(
                PlanStep(
                    kind=step["kind"],
                    name=step["name"],
                    target=step["target"],
                    inputs=tuple((kind, value) for kind, value in step["inputs"]),
                    outputs=tuple(step["outputs"]),
                )
                for step in data["steps"]
            ),
            result=data["result"],
            absent=tuple(data["absent"]),
            state_writes=tuple(str(name) for name in data["state_writes"]),
        )
        plan._check()
        return plan

    def _check(self) -> None:
        """Every name is a name, and every value is there before it is used."""
        kinds = {"argument", "state", "size"}
        if not all(name.isidentifier() and not iskeyword(name) for name in self.arguments):
            raise ValueError(f"arguments {self.arguments} are no names")
        if not set(self.absent) <= set(self.arguments):
            raise ValueError(f"absent arguments {self.absent} are no arguments")
        for name, ref in self.inputs:
            if ref.kind not in kinds or (ref.kind != "state" and ref.name not in self.arguments):
                raise ValueError(f"input {name} comes from nowhere: {ref}")
            if not isinstance(ref.dim, int):
                raise ValueError(f"input {name} has no dimension: {ref}")
            if not isinstance(ref.key, str):
                raise ValueError(f"input {name} has no key: {ref}")
        known = {name for name, _ in self.inputs}
        for step in self.steps:
            used = {value for kind, value in step.inputs if kind == "value"}
            if step.kind not in ("piece", "op") or not _TARGET.fullmatch(step.target):
                raise ValueError(f"step {step.name} calls nothing: {step.kind} {step.target}")
            if not used <= known:
                raise ValueError(f"step {step.name} uses {used - known}, which nothing computed")
            known.update(step.outputs)
        if self.result not in known:
            raise ValueError(f"the result {self.result} is not computed")
        if not all(isinstance(name, str) and _VALUE.fullmatch(name) for name in known):
            raise ValueError(f"the values {known} are not all named as values are")


def _operator(qualified: str) -> Callable[..., Any]:
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found: Callable[..., Any] | None = getattr(packet, overload, None) if overload else packet
    if found is None:
        raise CompileError(f"the plan calls {qualified}, which is not registered in this process")
    return found


def stitched_source(plan: StitchPlan, direct: frozenset[int] = frozenset()) -> str:
    """Readable Python source of the stitched forward; dead values are dropped as soon as possible.

    Args:
        plan: the plan.
        direct: indices of the steps that are called with one list of inputs.
    """
    last_use: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        for name in step.outputs:
            last_use[name] = index
        for kind, value in step.inputs:
            if kind == "value":
                last_use[value] = index
    last_use.pop(plan.result, None)

    lines = [f"def forward({_signature(plan)}):", *_presence_check(plan)]
    bound = {}
    for name, ref in plan.inputs:
        tensor = f"{ref.name}[{ref.key!r}]" if ref.key else ref.name
        if ref.kind == "argument":
            bound[name] = tensor
        elif ref.kind == "size":
            lines.append(f"    {name} = {tensor}.size({ref.dim})")
    for index, step in enumerate(plan.steps):
        args = ", ".join(bound.get(v, v) if k == "value" else repr(v) for k, v in step.inputs)
        call = f"call_{index}([{args}])" if index in direct else f"call_{index}({args})"
        if step.outputs:
            # A piece returns a sequence; an operator with one result returns it bare.
            single = len(step.outputs) == 1 and step.kind == "piece"
            targets = ", ".join(step.outputs) + ("," if single else "")
            lines.append(f"    {targets} = {call}  # {step.kind} {step.target}")
        else:
            lines.append(f"    {call}  # {step.kind} {step.target}")
        dead = [n for n, last in last_use.items() if last == index and n.startswith("v")]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    lines.append(f"    return {bound.get(plan.result, plan.result)}")
    return "\n".join(lines) + "\n"


def _signature(plan: StitchPlan) -> str:
    """The arguments; absent ones at the end need not be given."""
    names = list(plan.arguments)
    for index in reversed(range(len(names))):
        if names[index] not in plan.absent:
            break
        names[index] += "=None"
    return ", ".join(names)


def _presence_check(plan: StitchPlan) -> list[str]:
    """Lines that refuse a call whose arguments are not None where those of the trace were."""
    if not plan.arguments:
        return []
    differs = " or ".join(
        f"{name} is {'not ' if name in plan.absent else ''}None" for name in plan.arguments
    )
    return [f"    if {differs}:", f"        refuse(({', '.join(plan.arguments)},))"]


def _refuse(plan: StitchPlan, values: tuple[object, ...]) -> None:
    for name, value in zip(plan.arguments, values, strict=True):
        if (value is None) is not (name in plan.absent):
            before = None if name in plan.absent else "a tensor"
            raise presence_error(name, before, value, where="forward")


def stitch(
    plan: StitchPlan, pieces: Mapping[int, Callable[..., Any]], state: Mapping[str, Tensor]
) -> Callable[..., Tensor]:
    """The forward of a plan.

    Args:
        plan: the plan.
        pieces: step index -> callable that takes the step's inputs and returns a sequence of outputs;
            what it says to call instead (``PiecewiseBackend.direct``) is called without it.
        state: qualified name -> parameter or buffer.

    Raises:
        CompileError: the model lacks a parameter that the plan needs.
    """
    namespace: dict[str, Any] = {"inf": math.inf, "nan": math.nan, "refuse": partial(_refuse, plan)}
    for name, ref in plan.inputs:
        if ref.kind == "state":
            if ref.name not in state:
                raise CompileError(f"the plan needs parameter {ref.name!r}, which the model lacks")
            namespace[name] = state[ref.name]
    direct = set()
    for index, step in enumerate(plan.steps):
        call = pieces[index] if step.kind == "piece" else _operator(step.target)
        shortcut = getattr(call, "direct", None) if step.kind == "piece" else None
        if shortcut is not None:
            direct.add(index)
        namespace[f"call_{index}"] = call if shortcut is None else shortcut
    source = stitched_source(plan, frozenset(direct))
    exec(compile(source, "<kerf stitched forward>", "exec"), namespace)
    forward: Callable[..., Tensor] = namespace["forward"]
    return forward
