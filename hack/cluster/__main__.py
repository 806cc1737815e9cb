"""``python -m hack.cluster``: bring the local cluster up and down, and look at it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import click
from hack.cluster import controlplane
from hack.cluster import instance as instances
from hack.cluster import node as nodes
from hack.cluster.binaries import Binaries, cache_folder
from hack.cluster.controlplane import processes_of
from hack.cluster.errors import ClusterError
from hack.cluster.progress import say
from hack.cluster.versions import TOOLS


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A real Kubernetes on this machine, from pinned versions."""


@main.group(name="control-plane")
def control_plane_group() -> None:
    """etcd, API server, controller manager, scheduler; pods do not run.  Needs no root."""


NAME = click.option("--name", default="control-plane", show_default=True, help="instance name")


@control_plane_group.command(name="up")
@NAME
def control_plane_up(name: str) -> None:
    """Start it, or what is missing of it; prints how to talk to it."""
    plane = controlplane.bring_up(name)
    click.echo(f"export KUBECONFIG={plane.kubeconfig}")
    click.echo(f"# kubectl: {plane.bin('kubectl')}")


@control_plane_group.command(name="down")
@NAME
def control_plane_down(name: str) -> None:
    """Stop it and delete its state; safe to repeat."""
    cache = cache_folder()
    instance = instances.find(cache, name)
    if instance is None:
        say(f"there is no cluster {name}")
        return
    if instance.has_node:
        raise ClusterError(f"{name} has a node", hint="python -m hack.cluster node down")
    controlplane.bring_down(instance, cache)
    say(f"cluster {name} is gone")


@main.group(name="node")
def node_group() -> None:
    """A control plane with containerd, kubelet and kube-proxy: pods run.  Needs root."""


@node_group.command(name="up")
def node_up() -> None:
    """Start it, or what is missing of it; prints how to talk to it."""
    running = nodes.bring_up()
    click.echo(f"export KUBECONFIG={running.kubeconfig}")
    click.echo(f"# kubectl: {running.bin('kubectl')}")


@node_group.command(name="down")
@click.option("--images", is_flag=True, help="also delete the node's image store")
def node_down(images: bool) -> None:
    """Stop it and put the machine back as it was; safe to repeat."""
    nodes.bring_down(cache_folder(), images=images)


@main.command()
@click.argument("names", nargs=-1)
def binaries(names: tuple[str, ...]) -> None:
    """Find, download or build programs (all, or NAMES), and print where they are."""
    found = Binaries().ensure(*(names or TOOLS))
    for name, path in found.items():
        click.echo(f"{name}\t{path}")


@dataclass(frozen=True)
class Row:
    """What ``status`` says about one instance."""

    name: str
    state: str
    kubeconfig: str
    processes: dict[str, int | None]


@main.command()
@click.option("--json", "as_json", is_flag=True, help="for programs")
def status(as_json: bool) -> None:
    """Every cluster of this machine's cache folder, with its processes."""
    rows = []
    for instance in instances.instances(cache_folder()):
        table = processes_of(instance)
        rows.append(
            Row(
                instance.name,
                str(instance.state),
                str(instance.kubeconfig),
                {name: table.pid(name) for name in table.names()},
            )
        )
    if as_json:
        click.echo(json.dumps([vars(row) for row in rows], indent=2))
        return
    if not rows:
        click.echo("no cluster")
    for row in rows:
        click.echo(f"{row.name}\n  KUBECONFIG={row.kubeconfig}")
        for name, pid in row.processes.items():
            click.echo(f"  {name:26} {pid if pid is not None else 'ENDED'}")


def run() -> None:
    """The entry point: errors of ours in one line each, without a traceback."""
    try:
        main(standalone_mode=False)
    except ClusterError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    run()
