"""Imported once by the process that compile workers are forked from: everything a compilation needs.

Nothing here may start threads or touch a device, which would not survive the fork.
"""

import kerf_runtime.compilation.backends.inductor
import kerf_runtime.compilation.passes.manager
import kerf_runtime.compilation.program
import kerf_runtime.compilation.workers  # noqa: F401
