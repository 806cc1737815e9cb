"""The engine itself, in whatever process: start once, then one step after another.

``EngineCore`` imports no torch until ``startup``, so that the import is a timed phase like the others.
It is not thread-safe: one loop owns it.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.config import parse_document
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.messages import AddRequest, Started, TokenOutput
from kerf_runtime.engine.phases import PhaseClock, Progress, ignore_progress
from kerf_runtime.engine.request import FinishReason
from kerf_runtime.engine.threads import prepare_environment
from kerf_runtime.errors import EngineError
from kerf_runtime.stats import EngineStats

if TYPE_CHECKING:
    from kerf_runtime.cudagraph.descriptor import DispatchDecision
    from kerf_runtime.engine.runner import Sampling
    from kerf_runtime.engine.scheduler import Batch
    from kerf_runtime.engine.started import StartedEngine

__all__ = ["EngineCore"]


@dataclass(frozen=True)
class _InFlight:
    """A step that was enqueued and whose tokens have not been read."""

    batch: Batch
    decision: DispatchDecision
    sampling: Sampling


class EngineCore:
    """One model, its scheduler and its statistics.

    Args:
        args: what to serve and from where.
        spawned: ``time.monotonic`` of the moment that start-up is measured from; now if None.
        overlap: whether a step is enqueued while the one before runs.  If None, where the device works
            while Python goes on; on a CPU tokens would only come later.
    """

    def __init__(
        self, args: EngineArgs, *, spawned: float | None = None, overlap: bool | None = None
    ) -> None:
        self._args = args
        self._document = parse_document(args.document, where="document")
        self._spawned = time.monotonic() if spawned is None else spawned
        self._engine: StartedEngine | None = None
        self._startup_seconds: dict[str, float] = {}
        self._stats = EngineStats()
        self.overlap = overlap
        self._in_flight: _InFlight | None = None

    def startup(self, progress: Progress = ignore_progress) -> None:
        """Load, compile or load compiled code, allocate, capture; afterwards nothing compiles.

        Args:
            progress: told about phases, details and fractions.

        Raises:
            KerfError: configuration, model, cache, compilation or capture failed.
        """
        clock = PhaseClock(progress, started=self._spawned)
        prepare_environment()
        progress("import", "torch", None)
        from kerf_runtime.engine import startup

        clock.seconds["import"] = time.monotonic() - self._spawned
        self._engine = startup.start_engine(self._args, self._document.spec, clock, progress)
        clock.finish()
        self._startup_seconds = clock.seconds
        self._stats.kv_blocks_total = self._engine.scheduler.pool.total
        if self.overlap is None:
            self.overlap = self._engine.runner.is_asynchronous

    @property
    def engine(self) -> StartedEngine:
        """The parts.

        Raises:
            EngineError: ``startup`` has not finished.
        """
        if self._engine is None:
            raise EngineError("the engine has not been started")
        return self._engine

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would run something."""
        return self._in_flight is not None or self.engine.scheduler.has_work

    def add(self, request: AddRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run; names the parameter.
        """
        engine = self.engine
        seed = request.params.seed
        engine.scheduler.add(
            request.request_id,
            request.prompt_token_ids,
            request.params,
            eos_token_ids=engine.config.eos_token_ids,
            seed=secrets.randbits(63) if seed is None else seed,
            arrived=time.monotonic(),
            priority=request.priority,
        )

    def abort(self, request_id: str) -> None:
        """Stop a request and free its blocks; unknown ids are ignored."""
        if self.engine.scheduler.abort(request_id):
            self._stats.requests_finished[FinishReason.ABORT] += 1

    def step(self) -> list[TokenOutput]:
        """Enqueue the next batch, then read the tokens of the one before; or both of the same batch.

        Returns:
            New tokens; none if there was no work, or if the first of overlapping steps was enqueued.
        """
        started = time.monotonic()
        batch = self.engine.scheduler.schedule()
        enqueued = None if batch is None else self._enqueue(batch, started)
        outputs = self._finish()
        self._in_flight = enqueued
        if enqueued is None:
            return outputs
        if self.overlap and not self.engine.graphs.capture_due:
            self._stats.overlapped_steps += 1
        else:
            outputs += self._finish()
        decision = enqueued.decision
        self._stats.record_step(
            mode=decision.mode.value,
            size=decision.descriptor.num_tokens,
            reason=decision.reason.value,
            real_tokens=enqueued.batch.num_tokens,
            seconds=time.monotonic() - started,
        )
        return outputs

    def _enqueue(self, batch: Batch, now: float) -> _InFlight:
        engine = self.engine
        for request in batch.first_time:
            self._stats.record_queue(now - request.arrived)
            self._stats.prompt_tokens += request.prompt_length
        decision = engine.graphs.dispatch(batch.num_tokens, batch.uniform_decode)
        output = engine.graphs.run(decision, *engine.runner.prepare(batch, decision))
        return _InFlight(batch, decision, engine.runner.sample(batch, output))

    def _finish(self) -> list[TokenOutput]:
        """Wait for the tokens of the step in flight, if there is one."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        sampled = step.sampling.read()
        outputs = sampled.attach(self.engine.scheduler.complete(step.batch, sampled.tokens))
        for output in outputs:
            self._stats.generation_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._stats.requests_finished[output.finish_reason] += 1
        return outputs

    @property
    def captures_pending(self) -> bool:
        """Whether a progressive capture has graphs left to record."""
        return self.engine.graphs.pending > 0

    def capture_next(self) -> bool:
        """Do one unit of a progressive capture, between two steps, or a longer one where there is no request.

        Returns:
            Whether there was something to do.
        """
        from kerf_runtime.engine.startup import after_capture

        engine = self.engine
        before = engine.graphs.changes
        done = engine.graphs.capture_next(engine.runner.make_dummy_batch, idle=not self.has_work)
        if done and (not self.captures_pending or engine.graphs.changes != before):
            self._engine = after_capture(engine)
        return done

    def stats(self) -> dict[str, Any]:
        """Cumulative numbers; see ``kerf_runtime.stats.EngineStats.to_values``."""
        engine, stats = self.engine, self._stats
        stats.requests_running = engine.scheduler.num_running
        stats.requests_waiting = engine.scheduler.num_waiting
        stats.kv_blocks_used = engine.scheduler.pool.used
        stats.kv_blocks_cached = engine.scheduler.pool.cached
        stats.prefix_cache_queries = engine.scheduler.prefixes.queries
        stats.prefix_cache_hits = engine.scheduler.prefixes.hits
        stats.preemptions = engine.scheduler.preemptions
        hits = [
            (graph["mode"], graph["num_tokens"], graph["uniform_decode"], graph["hits"])
            for graph in engine.graphs.report()["descriptors"]
        ]
        return stats.to_values(counters=compilation_counter.snapshot(), graph_hits=hits)

    def report(self) -> dict[str, Any]:
        """What ``/debug/graphs`` shows, as of now: verdict, configuration, graphs, phases, counters."""
        from kerf_runtime.engine.report import describe

        dispatch = self.engine.graphs
        return {
            **describe(self.engine, self._startup_seconds),
            "served_name": self._document.served_name,
            "counters": compilation_counter.snapshot(),
            "dispatch": dispatch.dispatch_totals(),
            "dispatch_detail": dispatch.dispatch_detail(),
        }

    def started_message(self) -> Started:
        """What the HTTP process must know once the engine is ready."""
        engine = self.engine
        return Started(
            max_model_len=engine.effective.max_model_len,
            vocab_size=engine.config.vocab_size,
            eos_token_ids=engine.config.eos_token_ids,
            report=self.report(),
        )
