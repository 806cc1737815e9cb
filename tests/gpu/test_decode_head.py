"""Full CUDA graphs of decode batches compute the logits and tokens of their own hidden states, replay after replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.engine.engines import engine_args, started
from tests.models.checkpoints import make_llama, write_safetensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("vocab_size", [320, 152064])
def test_a_replay_gives_the_logits_and_the_likeliest_tokens_of_its_own_rows(
    vocab_size: int, level: int, tmp_path: Path
) -> None:
    # A row of the large vocabulary is searched by several blocks, which meet in memory that every replay clears.
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = write_safetensors(tmp_path, make_llama(vocab_size=vocab_size, **shape))
    mode = "FULL_DECODE_ONLY"
    core = started(engine_args(folder, level=level, mode=mode, engine={"dtype": "bfloat16"}))
    engine, seen = core.engine, set()
    with torch.inference_mode():
        for size in (8, 1, 4, 2) * 3:
            decision = engine.graphs.dispatch(size, uniform_decode=True)
            assert (decision.mode.value, decision.descriptor.num_tokens) == ("FULL", size)
            ids, positions, context = engine.runner.make_dummy_batch(decision.descriptor)
            ids.random_(vocab_size)
            output = engine.graphs.run(decision, ids, positions, context)
            assert output.decoded is not None
            logits, likeliest = output.decoded
            expected = engine.prepared.model.compute_logits(output.hidden)  # type: ignore[operator]
            torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)
            assert torch.equal(likeliest, logits.argmax(dim=-1))
            seen |= set(likeliest.tolist())
    assert len(seen) > 12
