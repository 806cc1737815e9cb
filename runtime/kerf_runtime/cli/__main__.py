"""``python -m kerf_runtime.cli`` is ``kerf``."""

from kerf_runtime.cli.root import main

if __name__ == "__main__":
    main()
