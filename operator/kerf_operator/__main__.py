"""The command line: ``kerf-operator run | crds | render``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from kerf_operator.api import crd_documents, crd_yaml, write_crds
from kerf_operator.render_command import render
from kerf_operator.settings import Settings
from kerf_runtime import __version__
from kerf_runtime.command_line import invoke

__all__ = ["main"]

CRD_FOLDERS = (Path("crds"), Path("charts/kerf/files/crds"))
"""Where the repository keeps the CRDs: for kubectl, and packaged in the chart."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kerf-operator")
def cli() -> None:
    """The Kerf operator: ModelDeployments to compiled caches and serving pods."""


@cli.command()
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    envvar="KERF_NAMESPACES",
    help="Serve only this namespace (repeatable; the variable is separated by spaces). Default: all.",
)
@click.option(
    "--runtime-image",
    envvar="KERF_RUNTIME_IMAGE",
    required=True,
    help="Image of compile Jobs and serving pods that name none.",
)
@click.option(
    "--kubeconfig", type=click.Path(path_type=Path), help="Default: in-cluster, then KUBECONFIG."
)
@click.option("--context", help="Context of the kubeconfig. Default: its current one.")
@click.option(
    "--resync-seconds", type=float, default=60.0, show_default=True, envvar="KERF_RESYNC_SECONDS"
)
@click.option("--workers", type=int, default=4, show_default=True, envvar="KERF_WORKERS")
@click.option(
    "--liveness-port", type=int, default=8080, show_default=True, help="Port of /healthz; 0: none."
)
@click.option(
    "--metrics-port", type=int, default=9090, show_default=True, help="Port of /metrics; 0: none."
)
@click.option(
    "--host", default="0.0.0.0", show_default=True, help="Address the two ports listen on."
)
@click.option(
    "--log-format", type=click.Choice(["plain", "json"]), default="plain", show_default=True
)
@click.option("-v", "--verbose", is_flag=True, help="Log what is watched and read as well.")
def run(log_format: str, verbose: bool, **options: Any) -> None:
    """Run the operator in a cluster, or against one from outside."""
    settings = Settings(**options)
    # kopf and the Kubernetes client are imported only here: the other commands need neither.
    import kopf

    from kerf_operator.app import run_operator

    kopf.configure(
        verbose=verbose,
        log_format=kopf.LogFormat.JSON if log_format == "json" else kopf.LogFormat.FULL,
    )
    for noisy in ("httpx", "httpcore", "urllib3", "kopf.activities", "kopf.objects"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    run_operator(settings)


@cli.command()
@click.option(
    "--write", is_flag=True, help="Write the files of the repository instead of printing."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --write: write into this folder only.",
)
def crds(write: bool, folder: Path | None) -> None:
    """Print the CustomResourceDefinitions."""
    if not write:
        click.echo(
            "---\n".join(crd_yaml(document) for document in crd_documents().values()), nl=False
        )
        return
    for target in (folder,) if folder else CRD_FOLDERS:
        for path in write_crds(target):
            click.echo(str(path))


cli.add_command(render)


def main() -> NoReturn:
    """Entry point of the console script."""
    sys.exit(invoke(cli, sys.argv[1:], program="kerf-operator"))


if __name__ == "__main__":
    main()
