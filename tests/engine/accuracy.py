"""How far an engine's log probabilities are from those of transformers, and how far they may be.

The reference is transformers in float32 with the very weights that the engine has: rounded to bfloat16 once.
In bfloat16 nobody reproduces it, and random models make close calls, so no token is compared with that of
another run.  Every request is asked for log probabilities, and transformers is shown the prompt with the
engine's own answer: all that is compared follows the same tokens.  What rounding does to a model is measured,
not guessed: transformers itself runs in bfloat16 over the same tokens, and its error is the unit of ours.

Engines are on any device; the reference is computed on the CPU, so that it is the same for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams, TokenLogprobs
from kerf_runtime.engine.scheduler import Scheduler

MEAN_FACTOR = 1.5
"""Most of our root mean square error over that of transformers in bfloat16.  Both round each product and each
sum of the residual once, so 1 is what is expected: on a CPU it is 0.98 to 1.03, and 0.85 where compiled code
rounds less often.  A GPU rounds the weights of attention too.  A window that is one token too wide gives more, and
so does one row in five hundred that is about another token."""

WORST_FACTOR = 2.0
"""Most of our largest error over theirs.  It is that of one number out of a hundred thousand, so it scatters:
on a CPU it is 0.6 to 1.3."""

FLOOR = 0.002
"""Nats that are added to both, for a model that transformers happens to round without a loss."""

MOST_ROUNDING = 0.05
"""Of the spread of a row's logits: most that transformers itself may be off in bfloat16, which is 0.01 to 0.03.
With a larger unit a wrong model could pass."""

FLOAT32 = 1e-3
"""Nats: most of any error in float32.  On a CPU the largest is 0.00005; a GPU adds in another order for every size
of a batch."""


@dataclass(frozen=True)
class Told:
    """What an engine told about one request: R rows, each about one token of prompt or answer.

    Attributes:
        tokens: the prompt, then the answer.
        answer: how many of them are the answer.
        first: the token that the first row is about; the last row is about the last token.
        ids: int64 [R, N], the tokens whose log probabilities are told; the first is the one at that place.
        logprobs: float32 [R, N].
    """

    tokens: tuple[int, ...]
    answer: int
    first: int
    ids: Tensor
    logprobs: Tensor


def round_weights(model: Any) -> Any:
    """The model itself, with parameters that bfloat16 can hold; tables that are computed stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def ask(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    *,
    answer: int,
    top: int,
    about_prompts: bool,
) -> list[Told]:
    """Run all prompts together, greedily.

    Args:
        core: idle.
        prompts: their tokens.
        answer: tokens of each answer.
        top: how many of the likeliest tokens to be told about at every place; the vocabulary for all.
        about_prompts: be told about the prompts' tokens too.  Such requests find nothing in the prefix cache.
    """
    params = SamplingParams(
        max_tokens=answer, ignore_eos=True, logprobs=top, prompt_logprobs=about_prompts
    )
    tokens = {str(number): list(prompt) for number, prompt in enumerate(prompts)}
    entries: dict[str, list[TokenLogprobs]] = {name: [] for name in tokens}
    for name, prompt in tokens.items():
        core.add(AddRequest(name, list(prompt), params))
    while core.has_work:
        for output in core.step():
            name = output.request_id
            if output.prompt_logprobs is not None:
                assert about_prompts
                assert not entries[name], "a prompt was told about twice"
                head, *rest = output.prompt_logprobs
                assert head is None
                entries[name] += [entry for entry in rest if entry is not None]
            assert output.logprobs is not None
            entries[name] += output.logprobs
            tokens[name] += output.token_ids
    found = []
    for name, prompt in zip(tokens, prompts, strict=True):
        first = 1 if about_prompts else len(prompt)
        assert len(tokens[name]) == len(prompt) + answer
        assert len(entries[name]) == len(tokens[name]) - first
        found.append(_told(tuple(tokens[name]), answer, first, entries[name]))
    return found


def _told(
    tokens: tuple[int, ...], answer: int, first: int, entries: Sequence[TokenLogprobs]
) -> Told:
    own = torch.tensor(tokens[first:])[:, None]
    ids = torch.tensor([[token for token, _ in entry.top] for entry in entries])
    values = torch.tensor(
        [[entry.logprob, *(value for _, value in entry.top)] for entry in entries]
    )
    return Told(tokens, answer, first, torch.cat((own, ids), 1), values)


@dataclass(frozen=True)
class Scores:
    """What transformers says after every token but the last, log probabilities [T - 1, vocab].

    Attributes:
        exact: in float32.
        rounded: in bfloat16.
    """

    exact: Tensor
    rounded: Tensor


class Reference:
    """transformers in float32 and in bfloat16, asked once about tokens that several engines gave.

    Args:
        model: in float32 on the CPU, with weights that bfloat16 can hold.
    """

    def __init__(self, model: Any) -> None:
        self.exact, self.rounded = model, copy.deepcopy(model)
        for parameter in self.rounded.parameters():
            parameter.data = parameter.data.bfloat16()
        self._known: dict[tuple[int, ...], Scores] = {}

    @torch.inference_mode()
    def scores(self, tokens: tuple[int, ...]) -> Scores:
        """What it says of a sequence of T tokens."""
        if tokens not in self._known:
            ids = torch.tensor([tokens[:-1]])
            exact, rounded = (
                model(ids, use_cache=False).logits[0].float().log_softmax(-1)
                for model in (self.exact, self.rounded)
            )
            self._known[tokens] = Scores(exact, rounded)
        return self._known[tokens]


@dataclass(frozen=True)
class Errors:
    """Of log probabilities, in nats: root mean square and largest."""

    mean: float
    worst: float

    @classmethod
    def of(cls, differences: Tensor) -> Errors:
        return cls(float(differences.pow(2).mean().sqrt()), float(differences.abs().max()))


@dataclass(frozen=True)
class Comparison:
    """Of many rows with transformers in float32.

    Attributes:
        rows: how many.
        spread: standard deviation of a row's logits, the mean over rows.
        ours: errors of the engine.
        theirs: errors of transformers in bfloat16 at the same places.
        regret: nats by which float32 prefers another token to that of an answer; the largest.
        agreement: part of the answers' tokens that are float32's choice.
        closest: nats between the best two tokens of float32 where an answer's choice was closest.
    """

    rows: int
    spread: float
    ours: Errors
    theirs: Errors
    regret: float
    agreement: float
    closest: float


def compare(told: Iterable[Told], reference: Reference) -> Comparison:
    """Everything that an engine told, with the reference."""
    ours, theirs, spreads, regrets, gaps = [], [], [], [], []
    for one in told:
        scores = reference.scores(one.tokens)
        exact, rounded = scores.exact[one.first - 1 :], scores.rounded[one.first - 1 :]
        expected = exact.gather(1, one.ids)
        ours.append((one.logprobs - expected).flatten())
        theirs.append((rounded.gather(1, one.ids) - expected).flatten())
        spreads.append(exact.std(-1))
        best, second = exact[-one.answer :].topk(2).values.unbind(-1)
        regrets.append(best - expected[-one.answer :, 0])
        gaps.append(best - second)
    regret = torch.cat(regrets)
    return Comparison(
        rows=sum(map(len, spreads)),
        spread=float(torch.cat(spreads).mean()),
        ours=Errors.of(torch.cat(ours)),
        theirs=Errors.of(torch.cat(theirs)),
        regret=float(regret.max()),
        agreement=float((regret == 0).float().mean()),
        closest=float(torch.cat(gaps).min()),
    )


def check_bfloat16(found: Comparison, where: str) -> None:
    """An engine in bfloat16 is as near to float32 as rounding allows.

    A token that is not float32's choice was a close call: both its log probability and that of the choice may
    be off by the largest error.  So where the two best are further apart, the tokens are the same.
    """
    assert found.theirs.mean <= MOST_ROUNDING * found.spread, f"{where}: {found}"
    assert found.ours.mean <= MEAN_FACTOR * found.theirs.mean + FLOOR, f"{where}: {found}"
    worst = WORST_FACTOR * found.theirs.worst + FLOOR
    assert found.ours.worst <= worst, f"{where}: {found}"
    assert found.regret <= 2 * worst, f"{where}: {found}"


def check_float32(found: Comparison, where: str) -> None:
    """An engine in float32 gives the tokens of transformers, with log probabilities that are as good as equal.

    Whether a token is transformers' choice after the prompt and the answer so far is asked at every place, so
    the answers are its greedy ones; and as they always are, they depend on nothing that the scheduler does.
    Another order of additions may move log probabilities, but no choice is as close as that.
    """
    assert found.ours.worst <= FLOAT32, f"{where}: {found}"
    assert found.closest > 2 * FLOAT32, (
        f"{where}: these prompts make a choice that may go either way: {found}"
    )
    assert found.agreement == 1.0, f"{where}: {found}"


@dataclass(frozen=True)
class Schedule:
    """What a scheduler is free to do with prompts.

    Attributes:
        cached: whether they may find their beginnings in the KV cache.
        chunked: whether a step has room for a few of their tokens only.
        preempted: whether there are too few blocks for all of them to come to their end together.
    """

    cached: bool
    chunked: bool
    preempted: bool

    def __str__(self) -> str:
        names = ("cached", self.cached), ("chunked", self.chunked), ("preempted", self.preempted)
        return ", ".join(name if on else f"not {name}" for name, on in names)


CHUNK = 8
ANSWER = 36
FEW_BLOCKS = 11
"""Of 16 tokens: two of the longest of ``families.PROMPTS`` with their answers do not fit together."""


def with_schedule(core: EngineCore, schedule: Schedule) -> EngineCore:
    """The same idle engine with a new scheduler: to start one for each schedule would take minutes.

    Nothing else of an engine depends on these limits, as long as there are no more blocks or tokens than it
    was started with.
    """
    assert not core.has_work
    limits = core.engine.scheduler.limits
    assert limits.max_num_batched_tokens > CHUNK
    assert limits.num_blocks > FEW_BLOCKS
    assert limits.block_size == 16
    limits = replace(
        limits,
        prefix_caching=schedule.cached,
        max_num_batched_tokens=CHUNK if schedule.chunked else limits.max_num_batched_tokens,
        num_blocks=FEW_BLOCKS if schedule.preempted else limits.num_blocks,
    )
    other = copy.copy(core)
    other._engine = replace(core.engine, scheduler=Scheduler(limits))
    return other


def schedules(core: EngineCore) -> Iterator[Schedule]:
    """All that there are for the model of an engine."""
    for cached in (False, True) if core.engine.effective.prefix_caching else (False,):
        for chunked in (False, True):
            for preempted in (False, True):
                yield Schedule(cached, chunked, preempted)


def ask_twice(core: EngineCore, prompts: Sequence[Sequence[int]], top: int) -> list[Told]:
    """About prompts and answers, then about answers alone: only those may find something in the cache."""
    return [
        one
        for about_prompts in (True, False)
        for one in ask(core, prompts, answer=ANSWER, top=top, about_prompts=about_prompts)
    ]


def check_schedules(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    reference: Reference,
    check: Callable[[Comparison, str], None],
    only: Iterable[Schedule] = (),
) -> dict[str, Comparison]:
    """Prompts under every schedule, or some; ``check`` raises if an answer is not what it should be.

    Returns:
        By the name of the schedule, what was compared.
    """
    compared = {}
    for schedule in only or schedules(core):
        playing = with_schedule(core, schedule)
        told = ask_twice(playing, prompts, top=core.engine.config.vocab_size)
        scheduler = playing.engine.scheduler
        assert (scheduler.preemptions > 0) == schedule.preempted, schedule
        assert (scheduler.prefixes.hits > 0) == schedule.cached, schedule
        assert scheduler.pool.used == 0, schedule
        compared[str(schedule)] = compare(told, reference)
        check(compared[str(schedule)], str(schedule))
    return compared
