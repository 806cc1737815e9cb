"""The CPU platform: honest about its graphs, and about what compiled code depends on."""

from __future__ import annotations

import json

import torch

from kerf_runtime.config import AttentionGraphSupport, DType
from kerf_runtime.cudagraph.emulated import EmulatedStaticGraph
from kerf_runtime.platforms import current_platform


def test_graphs_are_labelled_as_emulated():
    facts = current_platform().facts()
    assert (facts.name, facts.graph_backend) == ("cpu", "emulated")
    assert facts.attention_graph_support is AttentionGraphSupport.ALWAYS
    assert facts.mixer_graph_support is AttentionGraphSupport.ALWAYS
    assert facts.default_dtype is DType.FLOAT32


def test_every_static_graph_is_a_new_empty_one():
    platform = current_platform()
    first, second = platform.static_graph(), platform.static_graph()
    assert isinstance(first, EmulatedStaticGraph)
    assert first is not second
    assert first.nodes == 0


def test_the_observed_factors_are_facts_about_the_instruction_set_and_the_python_abi():
    found = current_platform().observed_factors()
    assert found["cpuCapability"] == torch.backends.cpu.get_cpu_capability()
    assert found["pythonAbi"].startswith("cpython-")
    assert json.loads(json.dumps(found)) == found
    assert found == current_platform().observed_factors()


def test_the_device_is_the_cpu_and_there_is_nothing_to_wait_for():
    platform = current_platform()
    assert platform.device == torch.device("cpu")
    assert platform.synchronize(torch.zeros(1)) is None
