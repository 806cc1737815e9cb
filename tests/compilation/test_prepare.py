"""From the cache, compiled now, or refused: what happens in each case, and why."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import shutil

import pytest
import torch
from tests.compilation import models, shared
from tests.compilation.helpers import make_effective, make_spec, open_cache, prepare, run

from kerf_runtime.cache import CacheSession
from kerf_runtime.cache.session import DISABLE_VARIABLE
from kerf_runtime.cache.verify import ready_text
from kerf_runtime.compilation import prepare as prepare_module
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.config import CompilationLevel, DType
from kerf_runtime.errors import CacheError, NumericalGateError
from kerf_runtime.reasons import CacheReason

NOTHING_COMPILED = {
    "dynamo_traces": 0,
    "graphs_seen": 0,
    "backend_compilations": 0,
    "inductor_compilations": 0,
    "artifacts_saved": 0,
}


@pytest.fixture
def tiny_cache(tmp_path, tiny_is_compiled):
    """A volume with the published ``tiny(1)``."""
    prepared_into(tmp_path)
    return tmp_path


def prepared_into(root, **options):
    session = open_cache(root, "tiny", **options)
    return prepare(models.tiny(1), session, digest="tiny"), session


def keys(root):
    folder = root / "torch_compile_cache"
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".lock"))


def edit_manifest(folder, change):
    """Change the manifest and make READY agree: what another build of the same key left behind."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    text = json.dumps(data)
    path.write_text(text)
    (folder / "READY").write_text(ready_text(data["key"], text.encode()))


def test_a_cold_start_publishes_what_it_compiled_with_everything_about_it(cold):
    assert (cold.cache.verdict.hit, cold.cache.verdict.reason) == (False, CacheReason.NO_SUCH_KEY)
    manifest = cold.cache.manifest
    assert manifest is not None
    assert manifest.gate["passed"]
    assert manifest.counters["dynamo_traces"] >= 1
    assert {"trace", "split", "inductor", "parity"} <= set(manifest.timings)
    assert "kerf_runtime.models.llama.model" in manifest.observed["sources"]
    paths = {entry.path for entry in manifest.files}
    assert {"rank_0/graph/plan.json", "rank_0/graph/forward.py"} <= paths
    assert sum(path.endswith("wrapper.py") for path in paths) == 3


def test_no_file_of_an_artifact_but_the_libraries_names_a_place_of_this_machine(cold):
    for path in cold.cache.folder.rglob("*"):
        if path.is_file() and path.suffix != ".so":
            text = path.read_text()
            assert str(cold.root) not in text, path
            assert "kerf-inductor" not in text, path


def test_a_warm_start_traces_nothing_compiles_nothing_and_computes_the_same_bits(cold):
    with compilation_counter.expect(**NOTHING_COMPILED, artifacts_loaded=3):
        session = open_cache(cold.root, shared.DEEP, read_only=True)
        prepared = prepare(cold.loaded, session, digest=shared.DEEP)
    assert session.verdict.reason == CacheReason.HIT
    assert set(prepared.timings) == {"cache_load"}
    assert prepared.gate == {}
    for tokens in (1, 5, 33):
        assert torch.equal(run(prepared.forward, tokens), run(cold.prepared.forward, tokens))


def test_replicas_sizes_and_modes_use_the_same_compiled_code(cold):
    spec = make_spec(cudagraphMode="PIECEWISE", captureSizes=[3, 5])
    with compilation_counter.expect(**NOTHING_COMPILED):
        session = open_cache(cold.root, shared.DEEP, spec=spec, read_only=True)
        prepare(cold.loaded, session, digest=shared.DEEP, spec=spec)
    assert session.verdict.hit


def test_level_0_compiles_nothing_and_needs_no_cache():
    loaded, spec = models.llama(1), make_spec(level=0)
    session = CacheSession.unused(CacheReason.NOT_NEEDED, "level 0")
    with compilation_counter.expect(**NOTHING_COMPILED, artifacts_loaded=0, pieces_seen=0):
        prepared = prepare(loaded, session, spec=spec)
    assert prepared.level is CompilationLevel.NO_COMPILATION
    assert prepared.report()["pieces"] == 0
    assert torch.equal(run(prepared.forward, 5), run(loaded.model, 5))
    prepared.wrap_pieces(lambda piece: pytest.fail("there is no piece to wrap"))


def test_a_writer_compiles_once_and_the_next_one_hits(tmp_path, tiny_is_compiled):
    first, session = prepared_into(tmp_path)
    assert session.verdict.reason == CacheReason.NO_SUCH_KEY
    assert first.gate["passed"]
    with compilation_counter.expect(**NOTHING_COMPILED):
        _, session = prepared_into(tmp_path)
    assert session.verdict.reason == CacheReason.HIT
    assert keys(tmp_path) == [session.key]


def test_a_writer_that_waited_uses_what_the_other_one_published(tmp_path, tiny_is_compiled):
    waiting = open_cache(tmp_path, "tiny")
    assert not waiting.verdict.hit
    prepared_into(tmp_path)
    with compilation_counter.expect(**NOTHING_COMPILED, artifacts_loaded=2):
        prepare(models.tiny(1), waiting, digest="tiny")
    assert waiting.verdict.reason == CacheReason.HIT


@pytest.mark.parametrize("read_only", [True, False])
def test_without_a_usable_cache_a_reader_compiles_for_itself_and_writes_nothing(
    tmp_path, tiny_is_compiled, monkeypatch, read_only
):
    if not read_only:
        monkeypatch.setenv(DISABLE_VARIABLE, "1")
    prepared, session = prepared_into(tmp_path, read_only=read_only)
    reason = CacheReason.NO_SUCH_KEY if read_only else CacheReason.DISABLED
    assert (session.verdict.hit, session.verdict.reason) == (False, reason)
    assert prepared.gate["passed"]
    assert list(tmp_path.iterdir()) == []
    torch.testing.assert_close(run(prepared.forward, 4), run(models.tiny(1).model, 4))


def test_what_a_reader_compiled_for_itself_goes_away_with_the_model(tmp_path, tiny_is_compiled):
    prepared, _ = prepared_into(tmp_path, read_only=True)
    folder = prepared._holder.name
    assert os.path.isdir(folder)  # noqa: PTH112
    del prepared
    gc.collect()
    assert not os.path.exists(folder)  # noqa: PTH110


def require(root, **options):
    spec = make_spec(policy="Require")
    effective = options.pop("effective", None)
    loaded = options.pop("loaded", None) or models.tiny(1)
    session = open_cache(root, "tiny", spec=spec, **{"read_only": True, **options})
    return prepare(loaded, session, digest="tiny", spec=spec, effective=effective)


def test_policy_require_serves_from_the_cache(tiny_cache):
    with compilation_counter.expect(**NOTHING_COMPILED):
        require(tiny_cache)


def test_policy_require_compiles_where_it_may_write(tmp_path, tiny_is_compiled):
    require(tmp_path, read_only=False)
    assert len(keys(tmp_path)) == 1


def damage_a_file(folder):
    path = folder / "rank_0/graph/forward.py"
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shutil.rmtree, "NoSuchKey"),
        (lambda folder: (folder / "READY").unlink(), "Incomplete"),
        (damage_a_file, "ChecksumMismatch"),
        (lambda folder: edit_manifest(folder, lambda m: m.update(format=9)), "FormatTooNew"),
        (
            lambda folder: edit_manifest(folder, lambda m: m["observed"].update(torch="2.10")),
            "FactorMismatch:torch",
        ),
        (
            lambda folder: edit_manifest(
                folder, lambda m: m["observed"]["sources"].update({"tests.compilation.models": "0"})
            ),
            "FactorMismatch:sources.tests.compilation.models",
        ),
    ],
)
def test_policy_require_refuses_an_unusable_cache_with_its_reason(tiny_cache, damage, reason):
    damage(tiny_cache / "torch_compile_cache" / keys(tiny_cache)[0])
    with (
        compilation_counter.expect(**NOTHING_COMPILED),
        pytest.raises(CacheError, match=f"policy is Require .*: {reason}: ") as raised,
    ):
        require(tiny_cache)
    assert raised.value.where
    assert "Auto" in raised.value.hint


def test_another_dtype_under_the_same_key_is_a_mismatch_that_names_it(tiny_cache):
    effective = dataclasses.replace(make_effective(make_spec()), dtype=DType.BFLOAT16)
    with pytest.raises(CacheError, match=r"FactorMismatch:dtype: .*'float32'.*'bfloat16'"):
        require(tiny_cache, effective=effective)


def test_other_weights_of_the_same_shapes_hit_and_other_shapes_do_not(tiny_cache):
    require(tiny_cache, loaded=models.tiny(1, seed=5))
    with pytest.raises(CacheError, match="FactorMismatch:parameters"):
        require(tiny_cache, loaded=models.tiny(1, width=16))


def test_a_changed_source_file_is_compiled_again_and_the_old_key_quarantined(tmp_path):
    spec = make_spec()
    session = open_cache(tmp_path, "again", spec=spec)
    loaded = models.tiny(1)
    with compilation_counter.expect(dynamo_traces=1, inductor_compilations=2):
        prepare(loaded, session, digest="again", spec=spec)
    edit_manifest(
        session.folder, lambda m: m["observed"]["sources"].update({"tests.compilation.models": "0"})
    )
    again = open_cache(tmp_path, "again", spec=spec)
    with compilation_counter.expect(dynamo_traces=1, inductor_compilations=2, artifacts_saved=2):
        prepared = prepare(models.tiny(1), again, digest="again", spec=spec)
    assert again.verdict.reason == "FactorMismatch:sources.tests.compilation.models"
    torch.testing.assert_close(run(prepared.forward, 4), run(loaded.model, 4))
    quarantine, key = keys(tmp_path)
    assert (quarantine.startswith(f".quarantine-{session.key}-"), key) == (True, session.key)
    assert open_cache(tmp_path, "again", spec=spec).verdict.hit


def break_a_wrapper(root):
    """Damage that only the loader sees, because checksums are off."""
    (key,) = (p for p in (root / "torch_compile_cache").iterdir() if p.is_dir())
    path = next(key.glob("rank_0/pieces/*/general/wrapper.py"))
    path.write_text(path.read_text().replace("def call(", "def cull("))


def test_an_artifact_that_the_loader_refuses_is_a_miss_with_its_reason(tiny_cache):
    break_a_wrapper(tiny_cache)
    prepared, session = prepared_into(tiny_cache, read_only=True, checksums=False)
    assert session.verdict.reason == CacheReason.LOADER_REFUSED
    assert "does not know" in session.verdict.message
    assert prepared.gate["passed"]


def test_an_artifact_that_the_loader_refuses_is_replaced_by_a_writer(tiny_cache):
    break_a_wrapper(tiny_cache)
    _, session = prepared_into(tiny_cache, checksums=False)
    assert session.verdict.reason == CacheReason.LOADER_REFUSED
    assert prepared_into(tiny_cache)[1].verdict.hit
    assert len(keys(tiny_cache)) == 2


@pytest.fixture
def wrong_compiler(monkeypatch, tiny_is_compiled):
    """The loaded artifact computes something else than the model."""
    load = prepare_module.load_artifact

    def load_wrong(folder, model):
        artifact = load(folder, model)
        right = artifact.forward
        artifact.forward = lambda ids, positions: right(ids, positions) + 0.5
        return artifact

    monkeypatch.setattr(prepare_module, "load_artifact", load_wrong)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_wrong_compiled_forward_is_refused_and_nothing_is_published(
    tmp_path, wrong_compiler, read_only
):
    with pytest.raises(NumericalGateError, match="compiled logits differ from eager ones"):
        prepared_into(tmp_path, read_only=read_only)
    assert not (tmp_path / "torch_compile_cache").exists() or keys(tmp_path) == []


def test_a_full_disk_while_pieces_are_written_is_a_clear_error_and_nothing_is_published(
    tmp_path, tiny_is_compiled, monkeypatch
):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prepare_module, "write_artifact", full)
    with pytest.raises(CacheError, match="the volume is full"):
        prepared_into(tmp_path)
    assert keys(tmp_path) == []


def test_wrapping_pieces_wraps_every_call_of_every_piece(cold):
    prepared = shared.warm_deep_llama()
    calls = []

    def wrap(piece):
        def call(*inputs):
            calls.append(piece.fingerprint)
            return piece(*inputs)

        return call

    prepared.wrap_pieces(wrap)
    assert torch.equal(run(prepared.forward, 6), run(cold.prepared.forward, 6))
    assert len(calls) == 31
    assert list(dict.fromkeys(calls)) == list(prepared.artifact.plan.piece_fingerprints)
