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
    result = _describe(document)
    if model_path is not None:
        result["effective"] = _effective(document, model_path)
    if as_json:
        echo_json(result)
        return
    click.echo(f"{document.name}: valid")
    click.echo(f"served name  {result['servedName']}")
    click.echo(f"cache key    {result['cacheKey'] or 'none (nothing is compiled)'}")
    effective = result.get("effective")
    if effective is None:
        return
    click.echo(f"level        {effective['level']}")
    click.echo(f"mode         {effective['mode']}")
    click.echo(f"sizes        {', '.join(map(str, effective['capture_sizes'])) or 'none'}")
    click.echo(f"dtype        {effective['dtype']}")
    click.echo(f"length       {effective['max_model_len']} tokens")
    for change in effective["changes"]:
        click.echo(
            f"changed      {change['field']} {change['requested']} -> {change['effective']} "
            f"({change['reason']}: {change['message']})"
        )


def _describe(document: ModelDeploymentDocument) -> dict[str, Any]:
    """What follows from the document alone; the key is the one that the operator computes."""
    import os

    from kerf_runtime.config import cache_key, declared_factors, needs_compile_cache

    spec = document.spec
    key = None
    if needs_compile_cache(spec):
        key = cache_key(declared_factors(spec, image=os.environ.get("KERF_IMAGE") or "local"))
    return {
        "name": document.name,
        "servedName": document.served_name,
        "cacheKey": key,
        "spec": spec.to_document(),
    }


def _effective(document: ModelDeploymentDocument, model_path: Path) -> dict[str, Any]:
    engine_args(document, model_path=model_path, cache_dir=None)  # checks the path
    from kerf_runtime.config import resolve
    from kerf_runtime.models import read_model_config
    from kerf_runtime.platforms import current_platform

    config = read_model_config(model_path)
    return resolve(
        document.spec,
        platform=current_platform().facts(),
        model_max_len=config.max_position_embeddings,
        model_dtype=config.dtype,
    ).to_json()
