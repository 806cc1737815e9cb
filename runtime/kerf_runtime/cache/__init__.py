"""The compile cache: a small, verifiable store of compiled artifacts.  No torch in here."""

from kerf_runtime.cache.manifest import Manifest
from kerf_runtime.cache.session import CacheSession, CacheVerdict
from kerf_runtime.cache.store import CacheStore, Staging
from kerf_runtime.cache.verify import Problem

__all__ = ["CacheSession", "CacheStore", "CacheVerdict", "Manifest", "Problem", "Staging"]
