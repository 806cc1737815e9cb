"""The Kerf runtime: a piecewise compiler, static graphs, a compile cache and a serving engine.

Importing this package imports nothing heavy; see ``docs/architecture.md`` for the map.
"""

__version__ = "0.1.0"
