"""Whatever a forward writes, cutting it, planning it and stitching it again changes no bit of anything."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compilation.graphs import stitch_eagerly
from tests.compilation.programs import SPLITTING, STEPS, Program

from kerf_runtime.compilation.plan import StitchPlan
from kerf_runtime.compilation.planner import build_plan
from kerf_runtime.compilation.split import resolve_splitting_ops, split_graph
from kerf_runtime.compilation.trace import trace_forward

TRACED_TOKENS = 6


def arguments(tokens):
    generator = torch.Generator().manual_seed(tokens)
    return {name: torch.randn(tokens, 4, generator=generator) for name in "ab"}


def bits(tensors):
    """The bits of every tensor; not-a-number and the sign of zero included."""
    return [t.contiguous().view(torch.int32).tolist() for t in tensors]


def fresh_state(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def run_graph(traced, given, state):
    """The unsplit graph, called with the inputs it names."""
    sources = {
        "argument": lambda ref: given[ref.name],
        "state": lambda ref: state[ref.name],
        "size": lambda ref: given[ref.name].shape[ref.dim],
    }
    (result,) = traced.module(*[sources[ref.kind](ref) for ref in traced.inputs])
    return result


def check(steps, result, splitting):
    """Eager, unsplit and stitched: the same result, arguments and buffers, for any number of tokens."""
    model = Program(steps, result)
    initial = fresh_state(model)
    traced = trace_forward(model, arguments(TRACED_TOKENS))
    split = split_graph(traced.module, resolve_splitting_ops(splitting))
    prints = {piece.name: piece.name for piece in split.compilable}
    plan = build_plan(traced, split, prints, ("a", "b"))
    plan = StitchPlan.from_json(plan.to_json())
    for tokens in (1, 9):
        outcomes = []
        for way in ("eager", "graph", "stitched"):
            given = arguments(tokens)
            state = {name: tensor.clone() for name, tensor in initial.items()}
            if way == "eager":
                model.load_state_dict(state)
                output = model(**given)
                state = fresh_state(model)
            elif way == "graph":
                output = run_graph(traced, given, state)
            else:
                output = stitch_eagerly(plan, split, state)(**given)
            outcomes.append(bits([output, given["a"], given["b"], state["row"], state["total"]]))
        eager, graph, stitched = outcomes
        assert graph == eager
        assert stitched == eager
    return split


step = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 12), st.integers(0, 12))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(step, min_size=1, max_size=8),
    st.none() | st.integers(0, 12),
    st.sets(st.sampled_from(SPLITTING)),
)
def test_random_programs_compute_and_write_the_same_bits_however_they_are_cut(
    steps, result, splitting
):
    check(steps, result, tuple(sorted(splitting)))


def test_every_step_survives_being_cut_everywhere():
    names = sorted(STEPS)
    for start in range(0, len(names), 8):
        some = names[start : start + 8]
        check([(name, i, i + 1) for i, name in enumerate(some)], None, SPLITTING)


def test_a_write_after_a_cut_is_seen_through_a_view_made_before_it():
    steps = [("view", 0, 0), ("shift", 1, 1), ("multiply in place", 0, 0), ("accumulate", 3, 4)]
    split = check(steps, 0, SPLITTING)
    assert sum(piece.is_splitting for piece in split.pieces) == 2
