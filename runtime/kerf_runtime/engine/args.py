"""What an engine is started with; picklable, because the engine runs in a spawned process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["EngineArgs"]


@dataclass(frozen=True)
class EngineArgs:
    """Arguments of ``EngineCore`` and ``EngineProcess``.

    Attributes:
        document: a ModelDeployment document in camelCase, as read from YAML.
        model_path: folder or GGUF file.
        cache_dir: root of the compile cache, or None for none.
        cache_read_only: never write to it.
        image: runtime image reference, a factor of the cache key.
        expected_cache_key: the key that the operator computed from the document; the engine refuses to
            start if its own is another one.  None outside a cluster: the model is then identified by
            its configuration, because a path on somebody's machine names nothing.
        debug_dump_path: folder for graphs and generated code, or None.
        log_level: of the process that the engine runs in.
    """

    document: dict[str, Any]
    model_path: Path
    cache_dir: Path | None = None
    cache_read_only: bool = False
    image: str = "local"
    expected_cache_key: str | None = None
    debug_dump_path: Path | None = None
    log_level: str = "INFO"
