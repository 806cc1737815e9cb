"""Options that several commands share, and what they make of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from kerf_runtime.config import ModelDeploymentDocument
    from kerf_runtime.engine.args import EngineArgs

__all__ = [
    "cache_dir_option",
    "default_cache_dir",
    "document_options",
    "engine_args",
    "json_option",
    "model_path_option",
]

F = TypeVar("F", bound=Callable[..., Any])


def _complete_field(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from kerf_runtime.cli.document import option_paths

    return [CompletionItem(f"{path}=") for path in option_paths() if path.startswith(incomplete)]


def document_options(command: F) -> F:
    """``-f`` and ``--set``."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="FIELD=VALUE",
        shell_complete=_complete_field,
        help="Override a field of the spec, for example compilation.level=0. Repeatable.",
    )(command)
    return click.option(
        "-f",
        "--file",
        type=click.Path(path_type=Path),
        help="ModelDeployment document (YAML). Default: the JSON in KERF_DEPLOYMENT.",
    )(command)


def model_path_option(command: F) -> F:
    """``--model-path``."""
    return click.option(
        "--model-path",
        type=click.Path(path_type=Path),
        help="Folder (config.json, *.safetensors, tokenizer.json) or GGUF file. Default: the document's "
        "source, if it is one to download from.",
    )(command)


def cache_dir_option(command: F) -> F:
    """``--cache-dir``."""
    return click.option(
        "--cache-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of the compile cache.",
    )(command)


def json_option(command: F) -> F:
    """``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Machine-readable output on standard output."
    )(command)


def default_cache_dir() -> Path:
    """``kerf`` below the user's cache folder (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kerf"


def engine_args(
    document: ModelDeploymentDocument,
    *,
    model_path: Path,
    cache_dir: Path | None,
    cache_read_only: bool = False,
    debug_dump_path: Path | None = None,
) -> EngineArgs:
    """What the engine starts with; image, expected key and log level come from the environment.

    Raises:
        ConfigError: a variable that an engine reads is wrong.
        ModelError: there is no usable model at the path.
    """
    from kerf_runtime.cache.session import cache_disabled
    from kerf_runtime.cli.document import raw_document
    from kerf_runtime.engine.args import EngineArgs
    from kerf_runtime.environment import log_level
    from kerf_runtime.models import read_model_config

    level = log_level(os.environ)
    cache_disabled()  # the engine asks as well: a wrong value must not cost the time either
    read_model_config(model_path)  # a wrong path must not cost the time to start an engine
    return EngineArgs(
        document=raw_document(document),
        model_path=model_path,
        cache_dir=cache_dir,
        cache_read_only=cache_read_only,
        image=os.environ.get("KERF_IMAGE") or "local",
        expected_cache_key=os.environ.get("KERF_CACHE_KEY") or None,
        debug_dump_path=debug_dump_path,
        log_level=level,
    )
