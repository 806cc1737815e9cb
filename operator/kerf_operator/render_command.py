"""``kerf render``, which is also ``kerf-operator render``: one command under two names.

``kerf`` finds it through the entry-point group ``kerf.commands`` (``pyproject.toml``) and asks it for its help,
so nothing but click is imported before it runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["render"]


@click.command()
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(path_type=Path),
    required=True,
    help="ModelDeployment document (YAML).",
)
@click.option(
    "-n",
    "--namespace",
    default="default",
    show_default=True,
    help="Namespace of the objects.",
)
@click.option(
    "--runtime-image",
    envvar="KERF_RUNTIME_IMAGE",
    default="kerf-runtime:dev",
    show_default=True,
    help="Image of the compile Job and the serving pods, if the document names none.",
)
@click.option("--json", "as_json", is_flag=True, help="One List of all objects, as JSON.")
def render(path: Path, namespace: str, runtime_image: str, as_json: bool) -> None:
    """Print the Kubernetes objects that a ModelDeployment would create, without a cluster."""
    from kerf_operator.errors import SettingsError
    from kerf_operator.preview import objects_yaml, preview_objects
    from kerf_runtime.config import load_document

    document = load_document(path)
    if not runtime_image:
        raise SettingsError("no runtime image", where="--runtime-image", hint="Name the image")
    objects = preview_objects(document, namespace=namespace, runtime_image=runtime_image)
    if as_json:
        click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    else:
        click.echo(objects_yaml(objects), nl=False)
