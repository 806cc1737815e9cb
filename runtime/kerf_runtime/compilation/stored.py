"""What reading a stored file may raise, whatever is in it.

Without checksums nothing is known of what a file holds: a plan, a piece or the launch of a kernel that
cannot be understood has to be a refusal with a reason, not the end of the process.
"""

from __future__ import annotations

__all__ = ["UNREADABLE"]

UNREADABLE = (
    OSError,
    ValueError,  # also: no JSON, no UTF-8
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,  # 1e999 is infinity to the JSON of Python, and no integer
    RecursionError,
    SyntaxError,  # of expressions in it
    MemoryError,  # the parser's word for too many brackets
)
