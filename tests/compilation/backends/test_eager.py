"""The eager back end: pieces as source, run as they were traced."""

from __future__ import annotations

import pytest
import torch
from tests.compilation.graphs import ATTENTION
from tests.compilation.helpers import run
from tests.compilation.models import tiny

from kerf_runtime.compilation.artifact import load_artifact, write_artifact
from kerf_runtime.compilation.backends import EagerBackend
from kerf_runtime.compilation.compiler import CompileOptions, compile_model
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.errors import CompileError, ConfigError


def compile_eagerly(model, **options):
    return compile_model(
        model,
        CompileOptions(ATTENTION, backend="eager", **options),
        device=torch.device("cpu"),
        progress=lambda *_: None,
    )


def test_a_model_is_stored_and_loaded_without_inductor(tmp_path):
    loaded = tiny(3)
    with compilation_counter.expect(backend_compilations=3, inductor_compilations=0):
        compiled = compile_eagerly(loaded.model)
    folder = tmp_path / "artifact"
    write_artifact(folder, compiled.plan, compiled.pieces, compiled.graph_source)
    with compilation_counter.expect(dynamo_traces=0, backend_compilations=0, artifacts_loaded=3):
        artifact = load_artifact(folder, loaded.model)
    for tokens in (1, 2, 33):
        assert torch.equal(run(artifact.forward, tokens), run(loaded.model, tokens))


@pytest.mark.parametrize("layers", [1, 2, 3, 12, 30])
def test_static_sizes_add_exactly_the_distinct_pieces_for_each_size(layers):
    distinct = min(layers + 1, 3)
    with compilation_counter.expect(
        graphs_seen=1,
        pieces_seen=2 * layers + 1,
        capturable_pieces_seen=layers + 1,
        backend_compilations=3 * distinct,
        static_compilations=2 * distinct,
    ):
        compiled = compile_eagerly(tiny(layers).model, sizes=(1, 8))
    assert all(sorted(piece.static) == [1, 8] for piece in compiled.pieces.values())


def test_options_are_refused_because_there_are_none():
    with pytest.raises(ConfigError, match="has no options: max_autotune"):
        EagerBackend().check({"max_autotune": True})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def forward(self, x):\n    return (open('x'),)\n", "refers to 'open'"),
        ("import os\n", "something else than one function"),
        ("def other(self, x):\n    return (x,)\n", "the function 'other'"),
        ("def forward(self, x):\n    import os\n    return (x,)\n", "contains 'import os'"),
        ("def forward(self):\n    return ()\n", "0 inputs instead of 1"),
        ("def forward(self", "no Python source"),
        ("", "something else than one function"),
    ],
)
def test_a_source_that_is_no_piece_is_refused(tmp_path, source, message):
    (tmp_path / "graph.py").write_text(source)
    with pytest.raises(CompileError, match=message):
        EagerBackend().load(tmp_path, num_inputs=1, identity="test")


def test_a_missing_source_is_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(CompileError, match="cannot be read") as raised:
        EagerBackend().load(tmp_path, num_inputs=1, identity="test")
    assert raised.value.where == str(tmp_path)
