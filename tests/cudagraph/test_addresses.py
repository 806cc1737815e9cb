"""Everything that a graph reads has a name by which one learns that it moved."""

from __future__ import annotations

import torch

from kerf_runtime.cudagraph.addresses import WeightAddresses, context_addresses, moved
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext


def test_metadata_caches_and_states_are_named():
    tensors = [torch.zeros(2) for _ in range(9)]
    metadata = AttentionMetadata(*tensors[:4], uniform_decode=True, state_slots=tensors[4])
    context = ForwardContext(
        attention=metadata,
        kv_caches={"a": (tensors[5], tensors[6])},
        states={"m": (tensors[7], tensors[8])},
    )
    names = ("query_start", "seq_lens", "block_table", "slot_mapping", "state_slots")
    names += ("keys of a", "values of a", "inputs of m", "state of m")
    found = context_addresses(context)
    assert found == {name: t.data_ptr() for name, t in zip(names, tensors, strict=True)}


def test_a_context_without_metadata_or_states_has_fewer():
    assert context_addresses(ForwardContext()) == {}


def test_what_moved_is_named_and_counted():
    before = dict.fromkeys("abcde", 1)
    assert moved(before, before | {"z": 1}) == ""
    assert moved(before, before | {"c": 2}) == "c"
    assert moved(before, {"a": 1}) == "b, c, d and 1 more"


def test_one_step_in_many_compares_the_first_included():
    asked = []

    def tensors():
        asked.append(1)
        return []

    weights = WeightAddresses(tensors, every=4)
    for _ in range(9):
        weights.step()
    assert len(asked) == 3
    never = WeightAddresses(tensors)
    never.step()
    assert len(asked) == 3
