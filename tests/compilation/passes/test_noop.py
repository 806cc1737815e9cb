"""Noop elimination: nodes that change nothing go, everything else stays, results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compilation.passes.harness import run_passes
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.passes.noop import eliminate_noops
from kerf_runtime.config.passes import PassConfig

aten = torch.ops.aten
SHUFFLES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.slice.Tensor,
    aten.expand.default,
    aten.permute.default,
)


def trace(
    function: Callable[..., Any], *arguments: Tensor, symbolic: bool = True
) -> fx.GraphModule:
    """The ATen graph of ``function``; the first size of every argument is symbolic, the others are not."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first = DimDynamic.DYNAMIC if symbolic else DimDynamic.STATIC
    fakes = [
        mode.from_tensor(
            argument,
            symbolic_context=StatelessSymbolicContext(
                [first, *[DimDynamic.STATIC] * (argument.dim() - 1)]
            ),
            source=ConstantSource(f"argument_{index}"),
        )
        for index, argument in enumerate(arguments)
    ]
    return make_fx(function)(*fakes)


def left(module: fx.GraphModule) -> list[Any]:
    """The targets of the shuffling nodes in the graph."""
    return [node.target for node in module.graph.nodes if node.target in SHUFFLES]


X = torch.arange(60.0).view(5, 12)


@pytest.mark.parametrize(
    ("function", "matches"),
    [
        pytest.param(lambda x: x.sin().view(x.shape[0], 12), 1, id="view with the symbolic size"),
        pytest.param(lambda x: x.sin().view(-1, 12), 1, id="view with -1"),
        pytest.param(lambda x: x.sin().view(x.shape[0], -1), 1, id="view with -1 for an integer"),
        pytest.param(lambda x: aten.reshape.default(x.sin(), [-1, 12]), 1, id="reshape"),
        pytest.param(lambda x: aten._unsafe_view.default(x.sin(), [-1, 12]), 1, id="unsafe view"),
        pytest.param(lambda x: x.sin().expand(-1, -1), 1, id="expand with -1"),
        pytest.param(lambda x: x.sin().expand(x.shape[0], 12), 1, id="expand to the same size"),
        pytest.param(lambda x: x.sin().permute(0, 1), 1, id="identity permute"),
        pytest.param(lambda x: x.sin().permute(-2, -1), 1, id="identity permute, negative"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 1, 0, 12), 1, id="slice to the size"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 1, 0, 99), 1, id="slice beyond the size"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 0), 1, id="slice without an end"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 0, 0, x.shape[0]), 1, id="symbolic end"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 0, 0, 2**63 - 1), 1, id="largest end"),
        pytest.param(lambda x: x.sin().view(-1, 3, 4).view(-1, 12), 2, id="there and back"),
    ],
)
def test_what_changes_nothing_is_removed(function: Callable[..., Any], matches: int) -> None:
    module = trace(lambda x: function(x) * 2, X)
    assert eliminate_noops(module.graph) == matches
    module.graph.lint()
    module.recompile()
    assert left(module) == []
    assert torch.equal(module(X), function(X) * 2)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.sin().view(12, -1), id="view to another shape"),
        pytest.param(lambda x: x.sin().view(-1, 1, 12), id="view with one more dimension"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 0, 1), id="slice from the second row"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 1, 0, 11), id="slice that is shorter"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 1, 0, 12, 2), id="slice with a step"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 1, -3), id="slice of the end"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 0, 0, 4), id="slice of a symbolic size"),
        pytest.param(lambda x: aten.slice.Tensor(x.sin(), 0, 0, 5), id="equal to the example only"),
        pytest.param(
            lambda x: aten.slice.Tensor(x.sin(), 1, 0, 1).expand(-1, 12), id="real expand"
        ),
        pytest.param(lambda x: x.sin().permute(1, 0), id="real permute"),
    ],
)
def test_what_changes_something_stays(function: Callable[..., Any]) -> None:
    module = trace(lambda x: function(x) * 2, X)
    before = left(module)
    assert before
    assert eliminate_noops(module.graph) == 0
    assert left(module) == before


def test_a_chain_of_reshapes_becomes_one() -> None:
    module = trace(lambda x: x.sin().view(-1, 3, 4).view(-1, 4).view(-1, 2, 2) * 2, X)
    assert eliminate_noops(module.graph) == 2
    module.recompile()
    assert left(module) == [aten.view.default]
    assert torch.equal(module(X), X.sin().view(-1, 2, 2) * 2)


def test_a_reshape_that_others_use_stays_for_them() -> None:
    def function(x: Tensor) -> Any:
        wide = x.sin().view(-1, 3, 4)
        return wide * 3, wide.view(-1, 2, 6) * 2

    module = trace(function, X)
    assert eliminate_noops(module.graph) == 1
    module.recompile()
    assert len(left(module)) == 2
    for one, other in zip(module(X), function(X), strict=True):
        assert torch.equal(one, other)


def test_an_input_is_never_returned_instead_of_its_view() -> None:
    module = trace(lambda x: x.view(-1, 12), X)
    assert eliminate_noops(module.graph) == 0


def test_one_tensor_is_never_returned_twice_instead_of_its_view() -> None:
    def function(x: Tensor) -> Any:
        y = x.sin()
        return y, aten._unsafe_view.default(y, [-1, 12])

    assert eliminate_noops(trace(function, X).graph) == 0


def test_comparing_symbolic_sizes_adds_no_guard() -> None:
    module = trace(lambda x, y: (x.sin().expand(y.shape[0], 12) + y) * 2, X, X[:, :12].clone())
    (environment,) = {
        node.meta["val"].node.shape_env
        for node in module.graph.nodes
        if isinstance(node.meta.get("val"), torch.SymInt)
    }
    before = len(environment.guards)
    eliminate_noops(module.graph)
    assert len(environment.guards) == before


def test_inductor_leaves_chains_that_the_pass_shortens() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.mm(x.sin().view(-1, 3, 4).view(-1, 2, 6).view(-1, 6), torch.ones(6, 6))

    with compilation_counter.expect(noop_matches=2):
        result = run_passes(model, X.clone(), passes=PassConfig())
    assert result.count(aten.view.default) == 1
    assert torch.equal(result.outputs, model(X))


@st.composite
def _steps(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Random reshapes, slices, expands and permutes for a [5, 12] tensor (5 is symbolic)."""
    steps: list[tuple[str, Any]] = []
    shape = (5, 12)
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["view", "slice", "expand", "permute", "arithmetic"]))
        if kind == "view":
            rest = 1
            for size in shape[1:]:
                rest *= size
            factor = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
            first: Any = draw(st.sampled_from([-1, None]))  # None is the size that is there
            new = draw(st.sampled_from([(rest,), (factor, rest // factor), shape[1:]]))
            steps.append(("view", (first, *new)))
            shape = (shape[0], *new)
        elif kind == "slice":
            dim = draw(st.integers(0, len(shape) - 1))
            if shape[dim] == 1:
                continue
            start = draw(st.sampled_from([0, 0, 0, 1]))
            end = draw(st.sampled_from([None, 2**63 - 1, shape[dim], 1000]))
            step = draw(st.sampled_from([1, 1, 1, 2]))
            steps.append(("slice", (dim, start, end, step)))
            length = -(-(shape[dim] - start) // step)
            shape = (*shape[:dim], length, *shape[dim + 1 :])
        elif kind == "expand":
            steps.append(("expand", tuple(draw(st.sampled_from([-1, size])) for size in shape)))
        elif kind == "permute":
            identity = tuple(range(len(shape)))
            dims = draw(st.one_of(st.just(identity), st.permutations(identity)))
            if dims[0] != 0:
                continue
            steps.append(("permute", tuple(dims)))
            shape = tuple(shape[d] for d in dims)
        else:
            steps.append(("arithmetic", None))
    return steps


def _apply(x: Tensor, steps: list[tuple[str, Any]]) -> list[Tensor]:
    results = []
    for kind, what in steps:
        if kind == "view":
            sizes = [x.shape[0] if size is None else size for size in what]
            x = x.contiguous().view(sizes)
        elif kind == "slice":
            x = aten.slice.Tensor(x, *what)
        elif kind == "expand":
            x = x.expand(what)
        elif kind == "permute":
            x = x.permute(what)
        else:
            x = x + 1
            results.append(x)
    return [*results, x * 2]


@settings(max_examples=60, deadline=None)
@given(steps=_steps(), symbolic=st.booleans())
def test_random_chains_give_the_same_results_and_a_second_run_finds_nothing(
    steps: list[tuple[str, Any]], symbolic: bool
) -> None:
    module = trace(lambda x: _apply(x.sin(), steps), X, symbolic=symbolic)
    before = len(left(module))
    found = eliminate_noops(module.graph)
    module.graph.lint()
    module.recompile()
    assert len(left(module)) >= before - found
    assert eliminate_noops(module.graph) == 0
    for one, other in zip(module(X), _apply(X.sin(), steps), strict=True):
        assert torch.equal(one, other)
