"""A real engine moves what it is supposed to move; the exposition of it is in test_metrics."""

from __future__ import annotations

from collections import defaultdict

import pytest
from prometheus_client import CollectorRegistry
from tests.server.tiny import write_tiny_checkpoint, write_tiny_document

from kerf_runtime.cli.document import raw_document, read_document
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams
from kerf_runtime.metrics import EngineCollector, EngineView

SIXTEEN_BLOCKS = "100Ki"
MODEL = {"model_name": "tiny"}


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """An engine with graphs for decode batches and with room for a third of what it will be asked."""
    root = tmp_path_factory.mktemp("tiny")
    overrides = ("compilation.level=0", f"engine.kvCacheMemory={SIXTEEN_BLOCKS}")
    document = read_document(write_tiny_document(root / "tiny.yaml"), overrides, {})
    model = write_tiny_checkpoint(root / "model")
    made = EngineCore(EngineArgs(document=raw_document(document), model_path=model))
    made.startup()
    return made


@pytest.fixture(scope="module")
def samples(core):
    """Largest value of every series while six long requests share too few blocks."""
    registry = CollectorRegistry()
    registry.register(
        EngineCollector(lambda: EngineView("tiny", core.started_message().report, core.stats()))
    )
    largest: dict[tuple, float] = defaultdict(float)

    def scrape() -> None:
        for family in registry.collect():
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                largest[key] = max(largest[key], sample.value)

    for index in range(6):
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        core.add(AddRequest(f"r{index}", [3 + index] * 20, params))
    while core.has_work:
        core.step()
        scrape()
    scrape()
    return largest


def get(samples, name, **labels):
    return samples[name, tuple(sorted(labels.items()))]


def test_requests_run_and_wait(samples):
    assert get(samples, "kerf_requests_running", **MODEL) >= 2
    assert get(samples, "kerf_requests_waiting", **MODEL) >= 1
    assert get(samples, "kerf_request_queue_seconds_count", **MODEL) == 6


def test_tokens_are_counted_once_although_requests_were_preempted(samples):
    assert get(samples, "kerf_preemptions_total", **MODEL) >= 1
    assert get(samples, "kerf_prompt_tokens_total", **MODEL) == 6 * 20
    assert get(samples, "kerf_generation_tokens_total", **MODEL) == 6 * 100


def test_requests_find_again_what_they_lost(core, samples):
    again = get(samples, "kerf_prefix_cache_queries_total", **MODEL) - 6 * 20
    assert again >= 20
    assert 0 < get(samples, "kerf_prefix_cache_hits_total", **MODEL) < again
    assert 0 < get(samples, "kerf_kv_cache_cached_ratio", **MODEL) <= 1


def test_the_cache_fills_and_empties(core, samples):
    assert 0.9 < get(samples, "kerf_kv_cache_usage_ratio", **MODEL) <= 1
    assert core.stats()["kv_blocks_used"] == 0


def test_every_step_is_dispatched_timed_and_its_rows_accounted_for(core, samples):
    stats = core.stats()
    for mode in ("FULL", "NONE"):
        steps = sum(count for row_mode, *_, count in stats["dispatch"] if row_mode == mode)
        assert steps > 0
        assert get(samples, "kerf_step_duration_seconds_count", mode=mode) == steps
    rows = sum(size * n for mode, size, _, n in stats["dispatch"] if mode == "FULL")
    real = get(samples, "kerf_scheduled_tokens_total", mode="FULL")
    assert real + get(samples, "kerf_padding_tokens_total", mode="FULL") == rows
    assert get(samples, "kerf_padding_tokens_total", mode="FULL") > 0
    assert get(samples, "kerf_padding_tokens_total", mode="NONE") == 0


def test_series_of_batch_sizes_are_counted_once_per_step_and_bounded(core, samples):
    batches = dict(core.stats()["batches"])
    series = {labels: n for (name, labels), n in samples.items() if name == "kerf_batches_total"}
    assert series == {(("tokens", str(tokens)),): n for tokens, n in batches.items()}
    assert sum(batches.values()) == sum(row[-1] for row in core.stats()["dispatch"])
    sizes = {dict(labels)["size"] for name, labels in samples if name == "kerf_dispatch_total"}
    captured = {
        dict(labels)["size"] for name, labels in samples if name == "kerf_cudagraph_memory_bytes"
    }
    assert sizes <= captured | {"0"}


def test_start_up_graphs_and_configuration_are_described(samples):
    names = {name for name, _ in samples}
    for phase in ("import", "weights", "kv_alloc", "warmup", "capture", "ready"):
        assert get(samples, "kerf_startup_phase_duration_seconds", phase=phase) > 0
    assert get(samples, "kerf_cudagraph_graphs", mode="FULL") == 3
    assert get(samples, "kerf_cudagraph_memory_bytes", mode="FULL", size="4") > 0
    assert get(samples, "kerf_cudagraph_capture_duration_seconds", mode="FULL", size="4") > 0
    assert get(samples, "kerf_cudagraph_pool_bytes") > 0
    labels = {"result": "miss", "reason": "NotNeeded"}
    assert get(samples, "kerf_compile_cache_requests_total", **labels) == 1
    assert "kerf_effective_config_info" in names
    assert get(samples, "kerf_compilations_after_startup_total") == 0
    assert get(samples, "kerf_capture_after_startup_total") == 0
