"""The graph passes that run between AOTAutograd and Inductor's code generation.

``manager`` is what Inductor calls; every other module is one pass or what passes share.  Names, order,
switches and uuids are in ``kerf_runtime.config.passes``, which needs no torch.
"""
