"""`make bench`: every CPU benchmark with the demo's model, records into results/, then the README.

The programs are those of `kerf bench`; this only gives them their arguments.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.readme import RESULTS, write_readme
from hack.demo import ROOT, packaged_model

PROGRAMS = {
    "latency": ("bench", "latency", "--repeats", "7"),
    "startup": ("bench", "startup", "--repeats", "5"),
    "throughput": ("bench", "throughput", "--num-requests", "100", "--concurrency", "8"),
}


def main() -> int:
    """Run all programs, or those named on the command line; returns the first failure's exit code."""
    names = sys.argv[1:] or list(PROGRAMS)
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        print(
            f"no such benchmark: {', '.join(unknown)}; there are {', '.join(PROGRAMS)}",
            file=sys.stderr,
        )
        return 2
    model = packaged_model()
    for name in names:
        print(f"kerf bench {name} (minutes; be alone on the machine)", file=sys.stderr, flush=True)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "kerf_runtime.cli", *PROGRAMS[name]),
                *("-f", "examples/smollm2.yaml", "--model-path", str(model)),
                *("--output", str(RESULTS / f"{name}-smollm2-cpu.json")),
            ],
            cwd=Path(ROOT),
            check=False,
        )
        if done.returncode != 0:
            return done.returncode
    write_readme()
    return 0


if __name__ == "__main__":
    sys.exit(main())
