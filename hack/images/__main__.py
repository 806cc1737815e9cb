"""``python -m hack.images``: build the operator's and the runtime's image."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from hack.cluster.binaries import cache_folder
from hack.cluster.errors import ClusterError
from hack.images.builder import Builder
from hack.images.project import build_images


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--ca-bundle",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="certificate bundle that pip needs inside the build; not part of the image",
)
@click.option("--index-url", help="package index instead of pip's default")
def main(ca_bundle: Path | None, index_url: str | None) -> None:
    """Build what is missing and print the references as JSON."""
    builder = Builder.from_environ(cache_folder())
    if ca_bundle or index_url:
        builder = Builder(cache_folder(), ca_bundle=ca_bundle, index_url=index_url)
    try:
        images = build_images(builder)
    except ClusterError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(json.dumps(asdict(images), indent=2))


if __name__ == "__main__":
    main()
