"""``kerf validate``: is a document right, and what would come of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerf_runtime.cli.options import document_options, engine_args, json_option, model_path_option
from kerf_runtime.cli.output import echo_json

if TYPE_CHECKING:
    from kerf_runtime.config import ModelDeploymentDocument

__all__ = ["validate"]


@click.command()
@document_options
@model_path_option
@json_option
def validate(
    file: Path | None, overrides: tuple[str, ...], model_path: Path | None, as_json: bool
) -> None:
    """Check a document; with --model-path also against the model and this machine."""
    from kerf_runtime.cli.document import read_document

    document = read_document(file, overrides)
    result = _describe(document, model_path)
    if model_path is not None:
        result["effective"] = _effective(document, model_path)
    if as_json:
        echo_json(result)
        return
    click.echo(f"{document.name}: valid")
    click.echo(f"served name  {result['servedName']}")
    where = "here" if model_path is not None else "in a cluster, for the image in KERF_IMAGE"
    key = result["cacheKey"]
    click.echo(f"cache key    {f'{key} ({where})' if key else 'none (only level 3 is cached)'}")
    effective = result.get("effective")
    if effective is None:
        return
    click.echo(f"level        {effective['level']}")
    click.echo(f"mode         {effective['mode']}")
    click.echo(f"sizes        {', '.join(map(str, effective['capture_sizes'])) or 'none'}")
    click.echo(f"back end     {effective['backend']}")
    click.echo(f"custom ops   {', '.join(effective['custom_ops']) or 'none'}")
    click.echo(f"static sizes {', '.join(map(str, effective['compile_sizes'])) or 'none'}")
    passes = [name for name, on in effective["passes"].items() if on]
    click.echo(f"passes       {', '.join(passes) or 'none'}")
    quantized = f", {effective['quantization']} weights" if effective["quantization"] else ""
    click.echo(f"dtype        {effective['dtype']}{quantized}")
    click.echo(f"length       {effective['max_model_len']} tokens")
    for change in effective["changes"]:
        click.echo(
            f"changed      {change['field']} {change['requested']} -> {change['effective']} "
            f"({change['reason']}: {change['message']})"
        )
    for warning in effective["warnings"]:
        click.echo(f"warning      {warning['field']} ({warning['reason']}: {warning['message']})")


def _describe(document: ModelDeploymentDocument, model_path: Path | None) -> dict[str, Any]:
    """What follows from the document, and the key.

    With a model path it is the key of ``kerf run`` here; without one, the key that the operator computes
    for the runtime image named by ``KERF_IMAGE``.
    """
    import os

    from kerf_runtime.config import cache_key, declared_factors, needs_compile_cache
    from kerf_runtime.models import model_config_digest

    spec = document.spec
    key = None
    if needs_compile_cache(spec):
        if model_path is not None:
            engine_args(document, model_path=model_path, cache_dir=None)  # checks the path
        checkpoint = None if model_path is None else model_config_digest(model_path)
        image = os.environ.get("KERF_IMAGE") or "local"
        key = cache_key(declared_factors(spec, image=image, model_config_digest=checkpoint))
    return {
        "name": document.name,
        "servedName": document.served_name,
        "cacheKey": key,
        "spec": spec.to_document(),
    }


def _check_compiler(document: ModelDeploymentDocument) -> None:
    """Refuse operators and options that a compilation here would refuse."""
    from kerf_runtime.compilation.backends import backend_named
    from kerf_runtime.compilation.split import resolve_splitting_ops
    from kerf_runtime.ops import (  # noqa: F401  (registers them)
        activation,
        attention,
        mamba,
        norm,
        quant,
        rotary,
    )

    compilation = document.spec.compilation
    resolve_splitting_ops(tuple(compilation.splitting_ops or ()))
    backend_named(compilation.backend.value).check(compilation.inductor_config or {})


def _effective(document: ModelDeploymentDocument, model_path: Path) -> dict[str, Any]:
    engine_args(document, model_path=model_path, cache_dir=None)  # checks the path
    from kerf_runtime.config import resolve
    from kerf_runtime.models import read_model_config
    from kerf_runtime.platforms import current_platform

    config = read_model_config(model_path)
    _check_compiler(document)
    effective = resolve(
        document.spec,
        platform=current_platform().facts(),
        model_max_len=config.max_position_embeddings,
        model_dtype=config.dtype,
        mixer_ops=config.mixer_ops,
    )
    return effective.to_json()
