"""Reaching a Service or a pod from this machine, over 127.0.0.1 and the API server."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hack.cluster.controlplane import ControlPlane
from hack.cluster.waiting import wait_until

__all__ = ["port_forward"]

DEADLINE_S = 30.0


@contextmanager
def port_forward(plane: ControlPlane, namespace: str, target: str, port: str) -> Iterator[str]:
    """Forward a free local port for the length of a ``with`` block; gives ``http://127.0.0.1:N``.

    Args:
        target: ``svc/NAME`` or ``pod/NAME``.  A Service means one of its ready pods, chosen now.
        port: number or name of the port there.
    """
    with tempfile.TemporaryDirectory(prefix="kerf-forward-") as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [plane.bin("kubectl"), "-n", namespace, "port-forward", target, f":{port}"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=plane.environ(),
            )
        try:
            match = wait_until(
                lambda: re.search(r"Forwarding from (127\.0\.0\.1:\d+)", log.read_text()),
                what=f"the port-forward to {target} port {port}",
                deadline_s=DEADLINE_S,
                alive=lambda: process.poll() is None,
                log=log,
            )
            yield f"http://{match.group(1)}"
        finally:
            process.terminate()
            process.wait(timeout=10)
