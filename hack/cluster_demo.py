"""``make cluster-demo``: the example ModelDeployment through a real cluster on this machine.

Brings up a node, builds and loads the images, installs the chart, fills the model volume, applies
the example, waits for the compile Job and the pods, asks a question through the Service with the
``openai`` client, scales, deletes, and ends with a table of timings.  Ctrl-C takes everything down;
``--keep`` leaves it running.  A node that was up before is used, and stays up.
"""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

import click
from hack.cluster import node as nodes
from hack.cluster.binaries import cache_folder
from hack.cluster.errors import ClusterError
from hack.cluster.processes import Owner
from hack.cluster.progress import say
from hack.images.builder import Builder
from hack.scenario import NAMESPACE, QUESTION, Scenario, Timings
from rich.console import Console
from rich.table import Table

EXPECTED = "Paris"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keep", is_flag=True, help="leave the cluster and the ModelDeployment running")
def main(keep: bool) -> None:
    """Run the example ModelDeployment on a real kubelet, on this machine."""
    # A terminated demo cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, _interrupt)
    cache = cache_folder()
    stays = keep or nodes.is_up(cache)
    timings = Timings()
    began = time.monotonic()
    try:
        with timings.step("node up"):
            node = nodes.bring_up(cache=cache, owner=None if stays else Owner.current())
        scenario = Scenario(node, Builder.from_environ(cache))
        run(scenario, timings, keep=keep)
        if stays:
            say(f"left running: export KUBECONFIG={node.kubeconfig}; down: make cluster-down")
    finally:
        if not stays:
            # A second Ctrl-C must not leave half of it: this takes a few seconds.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with timings.step("node down"):
                nodes.bring_down(cache)
    timings.rows.append(("total", time.monotonic() - began))
    Console().print(table(timings))


def run(scenario: Scenario, timings: Timings, *, keep: bool) -> None:
    """The steps themselves, on a node that is up.

    Raises:
        ClusterError: a step failed, or its effect is not what it must be.
    """
    with timings.step("images built and loaded"):
        images, model = scenario.load_images()
    with timings.step("helm install, operator ready"):
        scenario.install(images)
    with timings.step("model volume filled by the loader Job"):
        scenario.fill_model_volume(model)
    with timings.step("kubectl apply to compile Job complete"):
        scenario.apply()
        job = scenario.wait_compiled()
    with timings.step("compiled to CacheHit=True and Ready"):
        scenario.wait_ready()
    for kind, (status, reason) in sorted(scenario.conditions().items()):
        say(f"  {kind}={status} ({reason})")
    say(f"  keys on the cache volume: {', '.join(scenario.compiled_keys())}")

    with timings.step("one chat completion through the Service"):
        answer = scenario.ask()
    say(f"  {QUESTION}\n            -> {answer.text.strip()}")
    for labels, steps in sorted(answer.dispatched.items()):
        say(f"  kerf_dispatch_total{labels} +{steps:.0f}")
    if EXPECTED not in answer.text:
        raise ClusterError(f"the answer does not contain {EXPECTED!r}: {answer.text!r}")

    with timings.step("scale 1 -> 2, both ready"):
        scenario.scale(2)
    if scenario.jobs() != [job]:
        raise ClusterError(f"scaling started a compile Job: {scenario.jobs()}, before: {job}")
    say("  no new compile Job")
    if keep:
        return
    with timings.step("kubectl delete mdep, nothing left"):
        scenario.delete()
    say(f"  no object and no process of it is left in {NAMESPACE}")


def table(timings: Timings) -> Table:
    """The timings as a table."""
    shown = Table(title="kerf on a real node", show_edge=False)
    shown.add_column("step")
    shown.add_column("seconds", justify="right")
    for name, seconds in timings.rows:
        shown.add_row(name, f"{seconds:.1f}", style="bold" if name == "total" else None)
    return shown


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (ClusterError, click.ClickException) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
