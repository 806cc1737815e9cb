"""The stitching plan: how to run a split graph, as plain data.

A plan names its inputs (arguments, sizes, parameters and buffers), the pieces by fingerprint and the
splitting ops between them.  It is stored in the cache, so a warm start rebuilds the forward without
Dynamo; a cold start runs the very same plan.  ``stitch`` turns it into one Python function without
guards: a straight line of calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from kerf_runtime.errors import CompileError

if TYPE_CHECKING:
    from kerf_runtime.compilation.split import SplitGraph
    from kerf_runtime.compilation.trace import TracedGraph

__all__ = ["InputRef", "PlanStep", "StitchPlan", "build_plan", "stitch", "stitched_source"]


@dataclass(frozen=True)
class InputRef:
    """Where one graph input comes from at run time.

    ``kind`` is ``argument`` (``name`` is the forward's argument), ``state`` (``name`` is the qualified
    name of a parameter or buffer) or ``size`` (dimension ``dim`` of argument ``name``).
    """

    kind: str
    name: str
    dim: int = 0


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
    """Arguments of the forward, graph inputs by value name, steps in order, the returned value."""

    arguments: tuple[str, ...]
    inputs: tuple[tuple[str, InputRef], ...]
    steps: tuple[PlanStep, ...]
    result: str

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
        """The plan stored by ``to_json``."""
        return cls(
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
        )


def build_plan(
    traced: TracedGraph,
    split: SplitGraph,
    fingerprints: Mapping[str, str],
    arguments: tuple[str, ...],
) -> StitchPlan:
    """The plan of a split graph.

    Args:
        traced: names the graph inputs.
        split: the pieces and the graph that calls them.
        fingerprints: name of a compilable piece -> fingerprint.
        arguments: argument names of the forward, in order.

    Raises:
        CompileError: the forward returns something else than one tensor.
    """
    pieces = {piece.name: piece for piece in split.pieces}
    values: dict[fx.Node, str] = {}
    steps: list[PlanStep] = []
    placeholders = [node for node in split.module.graph.nodes if node.op == "placeholder"]
    inputs = []
    for index, (node, ref) in enumerate(zip(placeholders, traced.inputs, strict=True)):
        values[node] = f"i{index}"
        inputs.append((f"i{index}", ref))

    outputs: dict[fx.Node, list[fx.Node | None]] = {}
    for node in split.module.graph.nodes:
        if node.op == "call_module":
            outputs[node] = _unpacked(node, pieces[str(node.target)].module)
    result = ""
    counter = 0
    for node in split.module.graph.nodes:
        if node.op == "call_module":
            piece = pieces[str(node.target)]
            names = []
            for out in outputs[node]:
                name = f"v{counter}"
                counter += 1
                names.append(name)
                if out is not None:
                    values[out] = name
            refs = [("value", values[arg]) for arg in node.args]
            if piece.is_splitting:
                steps.append(_op_step(piece.name, piece.module, refs, tuple(names)))
            else:
                target = fingerprints[piece.name]
                steps.append(PlanStep("piece", piece.name, target, tuple(refs), tuple(names)))
        elif node.op == "output":
            returned = node.args[0]
            returned = returned if isinstance(returned, (tuple, list)) else (returned,)
            if len(returned) != 1 or not isinstance(returned[0], fx.Node):
                raise CompileError(
                    f"the forward returns {len(returned)} values; one tensor is supported"
                )
            result = values[returned[0]]
        elif node.op == "call_function" and node.target is not operator.getitem:
            raise CompileError(f"unexpected call of {node.target} between the pieces")
    return StitchPlan(arguments, tuple(inputs), tuple(steps), result)


def _unpacked(call: fx.Node, piece: fx.GraphModule) -> list[fx.Node | None]:
    """Which node of the parent graph holds each output of a piece: a getitem, or the call itself."""
    output = next(node for node in piece.graph.nodes if node.op == "output")
    returned = output.args[0]
    if returned is None:
        return []
    if not isinstance(returned, (tuple, list)):
        return [call]
    found: list[fx.Node | None] = [None] * len(returned)
    for user in call.users:
        index = user.args[1]
        assert isinstance(index, int)  # a getitem of a tuple
        found[index] = user
    return found


def _op_step(
    name: str, module: fx.GraphModule, refs: list[tuple[str, str]], outputs: tuple[str, ...]
) -> PlanStep:
    """A splitting piece is exactly one operator call; its constants move into the plan."""
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if len(nodes) != 1 or nodes[0].op != "call_function":
        raise CompileError(f"splitting piece {name} is not a single operator call")
    call = nodes[0]
    by_node: dict[fx.Node, tuple[str, Any]] = dict(zip(placeholders, refs, strict=True))

    def describe(arg: Any) -> tuple[str, Any]:
        if isinstance(arg, fx.Node):
            return by_node[arg]
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return ("constant", arg)
        raise CompileError(
            f"splitting op {call.target} is called with a {type(arg).__name__}, which cannot be stored"
        )

    if call.kwargs:
        raise CompileError(f"splitting op {call.target} is called with keyword arguments")
    return PlanStep(
        "op", name, _qualified(call.target), tuple(describe(a) for a in call.args), outputs
    )


def _qualified(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return f"{target.namespace}::{target._schema.name.split('::')[1]}.{target._overloadname}"


def _operator(qualified: str) -> Callable[..., Any]:
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise CompileError(f"the plan calls {qualified}, which is not registered in this process")
    found: Callable[..., Any] = getattr(packet, overload)
    return found


def stitched_source(plan: StitchPlan) -> str:
    """Readable Python source of the stitched forward; dead values are dropped as soon as possible."""
    last_use: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        for name in step.outputs:
            last_use[name] = index
        for kind, value in step.inputs:
            if kind == "value":
                last_use[value] = index
    last_use.pop(plan.result, None)

    lines = [f"def forward({', '.join(plan.arguments)}):"]
    bound = {}
    for name, ref in plan.inputs:
        if ref.kind == "argument":
            bound[name] = ref.name
        elif ref.kind == "size":
            lines.append(f"    {name} = {ref.name}.size({ref.dim})")
    for index, step in enumerate(plan.steps):
        args = ", ".join(bound.get(v, v) if k == "value" else repr(v) for k, v in step.inputs)
        call = f"call_{index}({args})"
        if step.outputs:
            targets = ", ".join(step.outputs) + ("," if len(step.outputs) == 1 else "")
            lines.append(f"    {targets} = {call}  # {step.kind} {step.target}")
        else:
            lines.append(f"    {call}  # {step.kind} {step.target}")
        dead = [n for n, last in last_use.items() if last == index and n.startswith("v")]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    lines.append(f"    return {bound.get(plan.result, plan.result)}")
    return "\n".join(lines) + "\n"


def stitch(
    plan: StitchPlan, pieces: Mapping[int, Callable[..., Any]], state: Mapping[str, Tensor]
) -> Callable[..., Tensor]:
    """The forward of a plan.

    Args:
        plan: the plan.
        pieces: step index -> callable that takes the step's inputs and returns a sequence of outputs.
        state: qualified name -> parameter or buffer.

    Raises:
        CompileError: the model lacks a parameter that the plan needs.
    """
    namespace: dict[str, Any] = {}
    for name, ref in plan.inputs:
        if ref.kind == "state":
            if ref.name not in state:
                raise CompileError(f"the plan needs parameter {ref.name!r}, which the model lacks")
            namespace[name] = state[ref.name]
    for index, step in enumerate(plan.steps):
        namespace[f"call_{index}"] = (
            pieces[index] if step.kind == "piece" else _operator(step.target)
        )
    exec(compile(stitched_source(plan), "<kerf stitched forward>", "exec"), namespace)
    forward: Callable[..., Tensor] = namespace["forward"]
    return forward
