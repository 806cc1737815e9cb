"""What ``prepare`` makes of levels, back ends, static sizes and dumps."""

from __future__ import annotations

import ast

import pytest
import torch
from tests.compilation import models
from tests.compilation.helpers import make_spec, open_cache, prepare, run

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.prepare import prepare_model
from kerf_runtime.config import CompilationLevel


@pytest.mark.parametrize("level", [1, 2])
def test_levels_1_and_2_run_the_whole_forward_and_cache_nothing(level, tmp_path):
    spec = make_spec(level=level, backend="eager", inductorConfig=None, cudagraphMode="NONE")
    loaded, session = models.tiny(2), open_cache(tmp_path, "whole", spec=spec)
    prepared = prepare(loaded, session, spec=spec)
    assert (prepared.level, prepared.artifact) == (CompilationLevel(level), None)
    with compilation_counter.expect(dynamo_traces=1, backend_compilations=1):
        for tokens in (5, 5):
            assert torch.equal(run(prepared.forward, tokens), run(loaded.model, tokens))
    assert list(tmp_path.iterdir()) == []


def test_level_2_never_traces_again_and_evaluates_no_guard():
    spec = make_spec(level=2, backend="eager", inductorConfig=None, cudagraphMode="NONE")
    loaded = models.tiny(2)
    prepared = prepare(loaded, open_cache(None, "whole"), spec=spec)
    run(prepared.forward, 4)
    with compilation_counter.expect(dynamo_traces=0, backend_compilations=0, guards_evaluated=0):
        for tokens in range(1, 40):
            run(prepared.forward, tokens, seed=tokens)


def test_static_sizes_are_compiled_once_stored_and_chosen_by_the_number_of_tokens(tmp_path):
    spec = make_spec(compileSizes=[1, 8])
    counts = {"inductor_compilations": 6, "static_compilations": 4, "artifacts_saved": 6}
    with compilation_counter.expect(dynamo_traces=1, artifacts_loaded=6, **counts):
        prepare(models.tiny(1), open_cache(tmp_path, "sizes", spec=spec), spec=spec)
    loaded = models.tiny(1)
    nothing = dict.fromkeys(["dynamo_traces", *counts], 0)
    with compilation_counter.expect(artifacts_loaded=6, **nothing):
        warm = prepare(loaded, open_cache(tmp_path, "sizes", spec=spec), spec=spec)
    for tokens in (8, 8, 1, 3, 33):
        torch.testing.assert_close(run(warm.forward, tokens), run(loaded.model, tokens))
    used = [piece for piece in warm.artifact._calls.values() if piece._static]
    assert len(used) == 2


def test_the_eager_back_end_is_cached_like_any_other(tmp_path):
    spec = make_spec(backend="eager", inductorConfig=None)
    with compilation_counter.expect(backend_compilations=3, inductor_compilations=0):
        prepare(models.tiny(2), open_cache(tmp_path, "eager", spec=spec), spec=spec)
    loaded = models.tiny(2)
    with compilation_counter.expect(dynamo_traces=0, backend_compilations=0, artifacts_loaded=3):
        warm = prepare(loaded, open_cache(tmp_path, "eager", spec=spec), spec=spec)
    assert torch.equal(run(warm.forward, 7), run(loaded.model, 7))


def test_a_dump_has_the_graph_and_what_each_pass_made_of_it(tmp_path, monkeypatch):
    spec = make_spec()
    monkeypatch.setattr("tests.compilation.helpers.prepare_model", _dumping(tmp_path / "dump"))
    prepared = prepare(models.tiny(1), open_cache(None, "dump"), spec=spec)
    graph = prepared.artifact.sources["computation_graph.py"]
    calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(graph)) if isinstance(n, ast.Call)]
    assert calls.count("torch.ops.kerf.attention") == 1
    assert "submod_1: splitting op" in graph
    names = {path.name for path in (tmp_path / "dump" / "passes" / "submod_0").iterdir()}
    assert any(name.endswith("noop_elimination_before.py") for name in names)
    assert any(name.endswith("noop_elimination_after.py") for name in names)


def _dumping(folder):
    def prepare_with_dump(*args, **options):
        return prepare_model(*args, **options, dump=folder)

    return prepare_with_dump
