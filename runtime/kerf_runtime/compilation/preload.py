"""Imported once by the process that compile workers are forked from: everything a compilation needs.

Nothing here may start threads or ask for a device: neither would survive the fork.
"""

import importlib

from kerf_runtime.compilation import internals

_MODULES = (
    *internals.COMPILER_MODULES,
    "kerf_runtime.compilation.backends.inductor",
    "kerf_runtime.compilation.passes.manager",
    "kerf_runtime.compilation.program",
    "kerf_runtime.compilation.workers",
)

# Inductor asks the driver for devices when it is imported, to choose a way of timing kernels.  Workers time none.
internals.inductor_config.use_experimental_benchmarker = False
for _name in _MODULES:
    importlib.import_module(_name)
