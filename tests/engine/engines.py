"""Engines for tests: documents, in-process cores, and running prompts to their end."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.compilation.helpers import QUICK
from transformers import LlamaForCausalLM

from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def document(
    *, engine: dict[str, Any] | None = None, compilation: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A ModelDeployment in float32 with small limits, changed as asked."""
    return {
        "apiVersion": "kerf.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": "test"},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "engine": {
                "dtype": "float32",
                "maxModelLen": 128,
                "maxNumSeqs": 6,
                "maxNumBatchedTokens": 48,
                "kvCacheMemory": "64Mi",
                **(engine or {}),
            },
            "compilation": {
                "captureSizes": [1, 2, 4, 8, 16],
                "inductorConfig": QUICK,
                **(compilation or {}),
            },
        },
    }


def engine_args(
    path: Path,
    *,
    level: int = 0,
    mode: str = "NONE",
    cache: Path | None = None,
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> EngineArgs:
    """Arguments for a model, with the level and mode that a test is about."""
    compilation = {"level": level, "cudagraphMode": mode}
    return EngineArgs(
        document=document(engine=engine, compilation=compilation),
        model_path=path,
        cache_dir=cache,
        **options,
    )


def started(args: EngineArgs, *, overlap: bool | None = None) -> EngineCore:
    """A core that has gone through start-up."""
    core = EngineCore(args, overlap=overlap)
    core.startup()
    return core


def run(core: EngineCore, requests: Sequence[AddRequest]) -> dict[str, list[int]]:
    """All requests together, until every one of them is finished."""
    for request in requests:
        core.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for output in core.step():
            tokens[output.request_id] += output.token_ids
    return tokens


def generate(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    *,
    together: bool = True,
) -> list[list[int]]:
    """Answers to prompts, batched or one after the other."""
    requests = [AddRequest(str(i), list(prompt), params) for i, prompt in enumerate(prompts)]
    if together:
        return list(run(core, requests).values())
    return [run(core, [request])[request.request_id] for request in requests]


@torch.inference_mode()
def greedy_reference(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """What transformers answers greedily, one prompt at a time."""
    answers = []
    for prompt in prompts:
        ids, cache, answer = torch.tensor([list(prompt)]), None, []
        # Not every model of transformers counts on from what is in its cache.
        places = torch.arange(len(prompt))[None]
        for _ in range(count):
            with warnings.catch_warnings():
                # Newer releases call the argument "cache" and still take the old name.
                warnings.simplefilter("ignore", FutureWarning)
                out = model(ids, position_ids=places, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            token = int(out.logits[0, -1].argmax())
            answer.append(token)
            ids, places = torch.tensor([[token]]), places[:, -1:] + 1
        answers.append(answer)
    return answers


@torch.inference_mode()
def greedy_continuations(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[int]]:
    """What transformers would say greedily at every place of ``answers``, one call per prompt.

    Element i is transformers' first choice after the prompt and the first i tokens of the answer.  If the
    result equals ``answers``, they are the greedy answers of transformers: its first token does not
    depend on the answer, and when i tokens are its own, so is token i + 1.  One pass over prompt and
    answer shows what ``greedy_reference`` needs a step per token for.
    """
    chosen = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        logits = model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
        chosen.append(logits.argmax(-1).tolist())
    return chosen
