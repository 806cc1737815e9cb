"""The pass manager: order, counts, identity, dumps, warnings, and its place in the real Inductor."""

from __future__ import annotations

import ast
import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compilation.passes.attention import one_prompt
from tests.compilation.passes.harness import ALL, assert_same, run_passes
from tests.compilation.passes.layers import (
    ActivationQuant,
    AddNormQuant,
    AttentionQuant,
    NormQuant,
    attention_layer_names,
    quantiser,
    tokens,
)
from torch import nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from kerf_runtime.compilation.counters import CompilationCounter, compilation_counter
from kerf_runtime.compilation.passes.manager import (
    PassManager,
    inductor_options,
)
from kerf_runtime.config.passes import FUSION_PASSES, PASS_VERSIONS, PERMANENT_PASSES, PassConfig

SWITCHES = [name for name in PASS_VERSIONS if name not in PERMANENT_PASSES]
FUSIONS_AND_LAST = (*FUSION_PASSES, "fix_functionalization")
CONFIGS = [
    PassConfig(**dict(zip(SWITCHES, values, strict=True)))
    for values in itertools.product((False, True), repeat=len(SWITCHES))
]


def test_every_configuration_has_its_own_uuid_and_keeps_it() -> None:
    uuids = [PassManager(config).uuid() for config in CONFIGS]
    assert len(set(uuids)) == len(CONFIGS)
    assert uuids == [PassManager(config).uuid() for config in CONFIGS]


def test_the_uuid_changes_with_the_version_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    before = PassManager(ALL).uuid()
    monkeypatch.setitem(PASS_VERSIONS, "norm_quant_fusion", PASS_VERSIONS["norm_quant_fusion"] + 1)
    assert PassManager(ALL).uuid() != before


def test_fix_functionalization_is_always_the_last_pass() -> None:
    for passes in CONFIGS:
        assert list(PassManager(passes).matches)[-1] == "fix_functionalization"


def test_every_pass_can_be_run_and_counts_into_a_field_of_its_own() -> None:
    counters = CompilationCounter()
    before = counters.snapshot()
    manager = PassManager(ALL, counters=counters)
    assert list(manager.matches) == list(PASS_VERSIONS)
    for name in manager.matches:
        manager._count(name, 1)
    changed = {name for name, count in counters.snapshot().items() if count != before[name]}
    assert len(changed) == len(PASS_VERSIONS)


def test_copies_count_into_the_same_manager() -> None:
    manager = PassManager(ALL)
    assert copy.deepcopy(manager) is manager


FUSION = PassConfig(noop_elimination=False, norm_quant_fusion=True)
ATTENTION = PassConfig(attention_quant_fusion=True)


class _Everything(nn.Module):
    """Something for every fusion, N times."""

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__()
        static = quantiser("static", "native")
        self.norm = AddNormQuant(count, "native", static, **options)
        self.activation = ActivationQuant(count, "native", static, **options)
        self.attention = AttentionQuant(count, static, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, residual = self.norm(x)
        return self.attention(self.activation(x) + residual)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_pass_matches_exactly_once_per_layer(count: int) -> None:
    model = _Everything(count)
    x = tokens(6)
    with one_prompt(6, attention_layer_names(count)), torch.no_grad():
        expected = model(x)
        with compilation_counter.expect(
            norm_quant_matches=count,
            activation_quant_matches=count,
            attention_quant_matches=count,
            functionalization_matches=count,
        ):
            result = run_passes(model, x)
    assert_same(result.outputs, expected)


def test_the_graph_is_dumped_before_and_after_every_pass_as_python(tmp_path: Path) -> None:
    model = NormQuant(2, "native", quantiser("static", "custom"))
    run_passes(model, tokens(4), dump_dir=tmp_path / "passes")
    names = sorted(path.name for path in (tmp_path / "passes").iterdir())
    assert names == sorted(
        f"graph0_{order}_{name}_{when}.py"
        for order, name in enumerate(PASS_VERSIONS)
        for when in ("before", "after")
    )
    texts = {path.name: path.read_text() for path in (tmp_path / "passes").iterdir()}
    for text in texts.values():
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        assert function.name == "forward"
    before = texts["graph0_2_norm_quant_fusion_before.py"]
    after = texts["graph0_2_norm_quant_fusion_after.py"]
    assert before.count("torch.ops.aten.rsqrt") == 2
    assert after.count("torch.ops.aten.rsqrt") == 0
    assert after.count("torch.ops.kerf.rms_norm_static_fp8_quant.default(") == 2


def test_nothing_is_written_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_passes(NormQuant(1, "custom", quantiser("static", "custom")), tokens(4))
    assert list(tmp_path.iterdir()) == []


_QUICK = {"fx_graph_cache": False, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}


class _Stop(Exception):  # noqa: N818 - says that nothing went wrong
    """Ends a compilation when the wrapper is written and before any kernel is compiled."""


def _wrapper_of(model: nn.Module, x: torch.Tensor, manager: PassManager, **options: Any) -> str:
    """The source of the wrapper that Inductor generates for ``model``."""
    sources: list[str] = []

    def stop(source: str) -> None:
        sources.append(source)
        raise _Stop

    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    with (
        config.patch({**inductor_options(manager), **options, **_QUICK}),
        pytest.MonkeyPatch.context() as patch,
        torch.no_grad(),
    ):
        patch.setattr(GraphLowering, "save_output_code", staticmethod(stop))
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="_Stop"):
            compiled(x)
    (source,) = sources
    return source


def test_inductor_calls_attention_on_its_buffer_and_copies_nothing() -> None:
    """One piece with attention inside: the wrapper allocates a buffer, and nothing writes to it before."""
    manager = PassManager(ALL)
    # Without reuse every buffer has an allocation of its own to look at.
    source = _wrapper_of(_Everything(2), tokens(6), manager, allow_buffer_reuse=False)
    assert {n: c for n, c in manager.matches.items() if n in FUSIONS_AND_LAST} == {
        "norm_quant_fusion": 2,
        "activation_quant_fusion": 2,
        "attention_quant_fusion": 2,
        "fix_functionalization": 2,
    }
    calls = re.findall(r"torch\.ops\.kerf\.attention\.default\((.*)\)\n", source)
    assert len(calls) == 2
    for call in calls:
        expression = ast.parse(f"attention({call})", mode="eval").body
        assert isinstance(expression, ast.Call)
        (name,) = re.findall(r"buf\d+", ast.unparse(expression.args[3]))
        (origin,) = re.findall(rf"^ *{name} = (.*)$", source, flags=re.MULTILINE)
        assert re.match(r"empty_strided_cpu\(.*float8_e4m3fn\)$", origin), origin
        before_call = source[: source.index(call)]
        assert len(re.findall(rf"\b{name}\b", before_call)) == 1  # nothing was written to it
    assert not re.search(r"clone|(?<!_to_)copy_", source)
    assert "auto_functionalized" not in source


@pytest.mark.slow
def test_generated_code_gives_the_results_of_the_unfused_model() -> None:
    model = NormQuant(1, "native", quantiser("static", "native"), dtype=torch.float32)
    x, manager = tokens(6, dtype=torch.float32), PassManager(ALL)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0)
    with config.patch({**inductor_options(manager), **_QUICK}), torch.no_grad():
        compiled = torch.compile(model, backend="inductor", fullgraph=True)
        assert_same(compiled(x), model(x))
        assert manager.matches["norm_quant_fusion"] == 1
        other = tokens(9, dtype=torch.float32)
        assert_same(compiled(other), model(other))
    assert manager.matches["norm_quant_fusion"] == 1  # one compilation serves every batch
