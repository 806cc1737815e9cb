"""What prompts tell about their own tokens, however they are cut into chunks."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.engine.engines import engine_args, started
from transformers import LlamaForCausalLM

from kerf_runtime.engine import prompt_logprobs
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams, TokenOutput

ASK = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=True)


def answers(core: EngineCore, *requests: AddRequest) -> dict[str, list[TokenOutput]]:
    for request in requests:
        core.add(request)
    outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for output in core.step():
            outputs[output.request_id].append(output)
    return outputs


def reference(model: LlamaForCausalLM, prompt: list[int]) -> torch.Tensor:
    """[P - 1]: the log probability of every token but the first."""
    with torch.no_grad():
        scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def core(tiny_path):
    """Steps of 24 tokens: a long prompt takes several."""
    return started(engine_args(tiny_path, engine={"maxNumBatchedTokens": 24}))


def test_every_token_of_a_prompt_has_what_transformers_says(
    core, tiny_model, tiny_prompts, monkeypatch
):
    monkeypatch.setattr(prompt_logprobs, "_ROWS", 7)
    requests = [AddRequest(str(i), prompt, ASK) for i, prompt in enumerate(tiny_prompts)]
    for request, outputs in zip(requests, answers(core, *requests).values(), strict=True):
        first, *rest = outputs
        assert all(output.prompt_logprobs is None for output in rest)
        found = first.prompt_logprobs
        assert found is not None
        assert len(found) == len(request.prompt_token_ids)
        assert found[0] is None
        own = torch.tensor([entry.logprob for entry in found[1:]])
        torch.testing.assert_close(
            own, reference(tiny_model, request.prompt_token_ids), atol=2e-4, rtol=0
        )
        for entry in found[1:]:
            assert len(entry.top) == 2
            assert entry.top[0][1] >= entry.logprob


def test_a_second_time_and_after_a_request_that_did_not_ask_it_is_the_same(core, tiny_prompts):
    prompt = tiny_prompts[-1]
    plain = SamplingParams(max_tokens=3, ignore_eos=True)
    assert answers(core, AddRequest("p", prompt, plain))["p"][0].prompt_logprobs is None
    first = answers(core, AddRequest("a", prompt, ASK))["a"]
    again = answers(core, AddRequest("b", prompt, ASK))["b"]
    assert first[0].prompt_logprobs == again[0].prompt_logprobs
    assert [o.token_ids for o in first] == [o.token_ids for o in again]


def test_a_prompt_that_fills_the_model_is_told_whole_and_yields_one_token(
    core, tiny_model, tiny_prompts
):
    prompt = [token for some in tiny_prompts for token in some][:128]
    assert len(prompt) == core.engine.effective.max_model_len
    [output] = answers(core, AddRequest("full", prompt, ASK))["full"]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    own = torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]])
    torch.testing.assert_close(own, reference(tiny_model, prompt), atol=2e-4, rtol=0)
    assert core.stats()["kv_blocks_used"] == 0


def test_requests_that_lose_their_blocks_tell_everything_once(tiny_path, tiny_model, tiny_prompts):
    few = started(engine_args(tiny_path, engine={"kvCacheMemory": "100Ki", "maxModelLen": 64}))
    ask = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, prompt_logprobs=True)
    prompts = tiny_prompts[1:5]
    made = answers(few, *(AddRequest(str(i), p, ask) for i, p in enumerate(prompts)))
    assert few.stats()["preemptions"] > 0
    for prompt, outputs in zip(prompts, made.values(), strict=True):
        told = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert len(told) == 1
        own = torch.tensor([entry.logprob for entry in told[0][1:]])
        torch.testing.assert_close(own, reference(tiny_model, prompt), atol=2e-4, rtol=0)


def test_a_prompt_that_is_aborted_half_way_leaves_nothing(core, tiny_prompts):
    core.add(AddRequest("x", tiny_prompts[6], ASK))
    core.step()
    core.abort("x")
    answers(core, AddRequest("y", tiny_prompts[0], ASK))
    gc.collect()
    assert len(core.engine.runner._prompts._readings) == 0
