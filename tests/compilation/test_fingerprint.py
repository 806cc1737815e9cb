"""Pieces that are the same program have the same fingerprint; nothing else has."""

from __future__ import annotations

import pytest
import torch
from tests.compilation import models, stateful
from tests.compilation.graphs import ATTENTION, example_arguments, trace_and_split

from kerf_runtime.compilation.fingerprint import fingerprint_piece
from kerf_runtime.compilation.split import resolve_splitting_ops, split_graph
from kerf_runtime.compilation.trace import trace_forward
from kerf_runtime.errors import CompileError


def fingerprints(loaded, **options):
    _, split = trace_and_split(loaded.model, **options)
    return [fingerprint_piece(piece.module) for piece in split.compilable]


@pytest.fixture(scope="module")
def base():
    """First, middle and last piece of the plain small Llama."""
    first, middle, last = fingerprints(models.llama(2))
    return first, middle, last


@pytest.mark.parametrize("layers", [1, 2, 3, 12, 30])
def test_a_model_of_n_layers_has_as_many_distinct_pieces_as_it_has_kinds(layers):
    found = fingerprints(models.tiny(layers))
    assert len(found) == layers + 1
    assert len(set(found)) == min(layers + 1, 3)
    assert len(set(found[1:-1])) <= 1


@pytest.mark.parametrize("layers", [3, 12])
def test_a_llama_of_any_depth_has_the_same_three_programs(base, layers):
    found = fingerprints(models.llama(layers))
    assert (found[0], set(found[1:-1]), found[-1]) == (base[0], {base[1]}, base[2])


def test_names_and_weights_do_not_count(base):
    assert fingerprints(models.llama(2, seed=7)) == list(base)


@pytest.mark.parametrize(
    ("changes", "different"),
    [
        ({"rms_norm_eps": 1e-6}, (True, True, True)),
        ({"intermediate_size": 32}, (False, True, True)),
        ({"vocab_size": 65}, (True, False, False)),
        ({"max_position_embeddings": 64}, (True, False, False)),
        ({"num_kv_heads": 4}, (True, True, False)),
        ({"dtype": torch.bfloat16}, (True, True, True)),
        ({"attention_bias": True}, (True, True, False)),
        ({"attention_output_bias": True}, (False, True, True)),
        ({"qk_norm": True}, (True, True, False)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_other_constants_dimensions_and_dtypes_are_other_programs(base, changes, different):
    found = fingerprints(models.llama(2, **changes))
    assert tuple(a != b for a, b in zip(found, base, strict=True)) == different


def test_a_layer_that_really_differs_is_not_merged_with_the_others():
    loaded = models.llama(5)
    loaded.model.layers[2].mlp_norm.eps = 1e-3
    found = fingerprints(loaded)
    assert len(set(found)) == 4
    # The norm after the attention of layer 2 is in the piece that follows it.
    assert [found.count(f) for f in found[1:-1]] == [3, 3, 1, 3]


@pytest.mark.parametrize("what", ["dimension", "dtype"])
def test_a_layer_with_another_dimension_or_dtype_is_not_merged_either(what):
    loaded = models.llama(5)
    if what == "dimension":
        loaded.model.layers[2].mlp = models.llama(1, intermediate_size=32).model.layers[0].mlp
    else:
        loaded.model.layers[2].mlp = stateful.InDouble(loaded.model.layers[2].mlp)
    found = fingerprints(loaded)
    assert len(set(found)) == 4
    assert [found.count(f) for f in found[1:-1]] == [3, 3, 1, 3]


def test_the_number_of_example_tokens_does_not_count():
    found = []
    for tokens in (8, 50):
        traced = trace_forward(models.tiny(1).model, example_arguments(tokens))
        split = split_graph(traced.module, resolve_splitting_ops(ATTENTION))
        found.append([fingerprint_piece(piece.module) for piece in split.compilable])
    assert found[0] == found[1]


def piece(target, *args, shape=(4,), **kwargs):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(shape)
    graph.output(graph.call_function(target, (x, *args), kwargs))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_every_kind_of_constant_counts():
    aten = torch.ops.aten
    pieces = [
        piece(aten.add.Scalar, 1),
        piece(aten.add.Scalar, 1.0),
        piece(aten.add.Scalar, True),
        piece(aten.add.Scalar, -0.0),
        piece(aten.add.Scalar, 0.0),
        piece(aten.sub.Scalar, 1),
        piece(aten.to.dtype, torch.float16),
        piece(aten.to.dtype, torch.float64),
        piece(aten.add.Scalar, 1, alpha=2),
        piece(aten.add.Scalar, 1, shape=(5,)),
        piece(torch.add, 1),
        piece(aten.sum.dim_IntList, [0]),
        piece(aten.sum.dim_IntList, [0], True),
        piece(aten.sum.dim_IntList, None),
    ]
    assert len({fingerprint_piece(p) for p in pieces}) == len(pieces)


def test_a_constant_of_an_unknown_kind_is_an_error():
    with pytest.raises(CompileError, match="constant argument of type complex"):
        fingerprint_piece(piece(torch.ops.aten.add.Scalar, 1j))


def test_a_tensor_inside_a_piece_is_an_error_that_says_what_to_do():
    graph = torch.fx.Graph()
    graph.output(graph.get_attr("weight"))
    root = torch.nn.Module()
    root.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(CompileError, match=r"'weight'.*buffers"):
        fingerprint_piece(torch.fx.GraphModule(root, graph))
