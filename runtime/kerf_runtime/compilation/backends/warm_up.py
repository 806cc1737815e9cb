"""A small program that a compile worker compiles before its first piece.

The first compilation of a process is seconds longer than the next: the compiler imports its parts, builds
its tables of patterns and hashes its own sources.  Workers do that while the model is still being traced.
"""

from __future__ import annotations

from kerf_runtime.compilation.program import InputLayout, PieceProgram

__all__ = ["warm_up_program"]

_SOURCE = """\
def forward(self, n, x, weight, norm):
    product = torch.nn.functional.linear(x, weight)
    wide = product.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-05)
    normed = (wide * scale).to(x.dtype) * norm
    return (torch.nn.functional.silu(normed), product)
"""
_WIDTH = 64


def warm_up_program(device: str) -> PieceProgram:
    """A product, a reduction and a point-wise kernel on ``[tokens, 64]`` in bfloat16 on ``device``."""
    width = str(_WIDTH)

    def tensor(*shape: str) -> InputLayout:
        stride = ("1",) if len(shape) == 1 else (width, "1")
        return InputLayout(shape, stride, "bfloat16", device)

    inputs = (InputLayout(("n",)), tensor("n", width), tensor(width, width), tensor(width))
    return PieceProgram(_SOURCE, inputs)
