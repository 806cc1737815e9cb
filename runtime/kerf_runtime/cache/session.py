"""One process's use of one cache key: open, verdict, publish.

The engine opens a session before it has weights (verification needs none), refines the verdict with
observed factors once the model is known, and publishes if it may write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerf_runtime.cache.manifest import Manifest, first_difference
from kerf_runtime.cache.store import CacheStore, Staging
from kerf_runtime.cache.verify import Problem
from kerf_runtime.config.key import cache_key, digest
from kerf_runtime.environment import is_on
from kerf_runtime.errors import CacheError
from kerf_runtime.reasons import CacheReason

__all__ = ["DISABLE_VARIABLE", "CacheSession", "CacheVerdict", "cache_disabled"]

DISABLE_VARIABLE = "KERF_DISABLE_COMPILE_CACHE"
"""A switch: 1 uses no cache at all, for diagnosis."""


def cache_disabled() -> bool:
    """Whether ``DISABLE_VARIABLE`` is on.

    Raises:
        ConfigError: it is neither on nor off.
    """
    return is_on(os.environ, DISABLE_VARIABLE)


@dataclass(frozen=True)
class CacheVerdict:
    """Hit or miss, and why.  ``reason`` is a ``CacheReason``, followed by ``:<factor>`` for mismatches."""

    hit: bool
    reason: str
    message: str

    @property
    def result(self) -> str:
        """``hit`` or ``miss``, as in the metric."""
        return "hit" if self.hit else "miss"


@dataclass
class CacheSession:
    """Use ``CacheSession.open`` or ``CacheSession.unused``."""

    key: str
    declared: dict[str, Any]
    store: CacheStore | None
    read_only: bool
    checksums: bool
    verdict: CacheVerdict
    manifest: Manifest | None = field(default=None)

    @classmethod
    def unused(cls, reason: CacheReason, message: str) -> CacheSession:
        """A session without a cache: level 0 needs none."""
        return cls("", {}, None, True, True, CacheVerdict(False, reason, message))

    @classmethod
    def open(
        cls, root: Path | None, declared: dict[str, Any], *, read_only: bool, checksums: bool = True
    ) -> CacheSession:
        """Look up and verify the key of ``declared`` below ``root``; never raises for a bad cache.

        Args:
            root: the volume, or None for no cache.
            declared: declared factors (``config.declared_factors``).
            read_only: never write below ``root``.
            checksums: verify the sha256 of every file.

        Raises:
            ConfigError: ``DISABLE_VARIABLE`` is neither on nor off.
        """
        key = cache_key(declared)
        if root is None:
            verdict = CacheVerdict(False, CacheReason.NOT_CONFIGURED, "no cache folder was given")
            return cls(key, declared, None, True, checksums, verdict)
        if cache_disabled():
            verdict = CacheVerdict(False, CacheReason.DISABLED, f"{DISABLE_VARIABLE}=1 is set")
            return cls(key, declared, None, True, checksums, verdict)
        session = cls(
            key, declared, CacheStore(root), read_only, checksums, CacheVerdict(False, "", "")
        )
        session.refresh()
        return session

    def refresh(self) -> None:
        """Verify the key again, for example after waiting for another writer."""
        assert self.store is not None
        found = self.store.read(self.key, checksums=self.checksums)
        if isinstance(found, Problem):
            self.manifest, self.verdict = None, CacheVerdict(False, found.reason, found.message)
            return
        difference = first_difference(found.declared, self.declared)
        if difference is not None:
            self.miss(f"{CacheReason.FACTOR_MISMATCH}:{difference[0]}", _explain(*difference))
            return
        self.manifest = found
        self.verdict = CacheVerdict(
            True, CacheReason.HIT, f"{self.folder} is complete and unchanged"
        )

    @property
    def folder(self) -> Path:
        """Folder of the key."""
        assert self.store is not None
        return self.store.path(self.key)

    @property
    def may_write(self) -> bool:
        """Whether this process publishes what it compiles."""
        return self.store is not None and not self.read_only

    def check_observed(self, observed: dict[str, Any]) -> CacheVerdict:
        """Compare observed factors with the manifest's; a difference turns a hit into a miss."""
        if self.manifest is not None:
            difference = first_difference(self.manifest.observed, observed)
            if difference is not None:
                self.miss(f"{CacheReason.FACTOR_MISMATCH}:{difference[0]}", _explain(*difference))
        return self.verdict

    def miss(self, reason: str, message: str) -> None:
        """Record that the key cannot be used after all."""
        self.manifest, self.verdict = None, CacheVerdict(False, reason, message)

    @contextmanager
    def staging(self) -> Iterator[Staging]:
        """A staging folder, removed at the end unless it was published.

        Raises:
            CacheError: the session may not write.
        """
        if self.store is None or self.read_only:
            raise CacheError(
                "the cache is read-only here", hint="Compile with a writable --cache-dir"
            )
        staging = self.store.stage(self.key)
        try:
            yield staging
        finally:
            self.store.discard(staging)

    def publish(
        self,
        staging: Staging,
        *,
        observed: dict[str, Any],
        counters: dict[str, int],
        timings: dict[str, float],
        gate: dict[str, Any],
    ) -> Manifest:
        """Make the staged artifact visible under the key."""
        assert self.store is not None
        self.manifest = self.store.publish(
            staging,
            digest=digest(self.declared),
            declared=self.declared,
            observed=observed,
            counters=counters,
            timings=timings,
            gate=gate,
        )
        return self.manifest


def _explain(name: str, stored: Any, actual: Any) -> str:
    return f"{name} was {_short(stored)} when the cache was written and is {_short(actual)} now"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
