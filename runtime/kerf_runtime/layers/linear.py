"""Linear layers: plain, and W8A8 in FP8.

Shapes: T tokens, K inputs, N outputs.  An FP8 layer holds its weight as FP8 [N, K] with one float32 scale
per output channel (``weight_scale`` [N, 1]; a per-tensor scale of a checkpoint is repeated, so that parts
of a fused projection keep theirs exactly), and quantises its input per tensor with a scale of the
checkpoint (``input_scale`` [1]) or per token as it comes.  Then

    out[t, n] = input_scale[t] * weight_scale[n] * sum_k q[t, k] * weight[n, k]   (+ bias[n])

with a float32 sum, rounded once to the data type of the input.  On CUDA the sum is ``torch._scaled_mm``, and
the scales are applied to its float32 result, where Inductor fuses them with what follows.  The row-wise
scaling of ``_scaled_mm`` itself writes bfloat16 only.  On an H200 (6144 and 28672 outputs of 4096 inputs) it
takes 1.5 to 2.2 times as long for 2 tokens and as long or longer for 64, but 0.67 to 0.82 times as long from
512 tokens on; decode steps are what serving waits for, and both beat bfloat16 everywhere.  Elsewhere the FP8
values are widened to float32 and multiplied (correct, slow: for tests and small models).

Tolerance.  FP8 (e4m3) rounds a value by at most 1/16 of itself, so one layer's output is off by 3 to 4 %
of its norm.  For a whole model against the same model unquantised we state, on English text and with
weights quantised on load (dynamic per-token inputs), for SmolLM2-135M (30 layers): the logits of a position
are off by at most 25 % of their spread (root mean square over the vocabulary, standard deviation; mean over
positions), at least 85 % of the greedy tokens are the same, and the mean KL divergence is at most 0.05 nat.
``tests/models/test_fp8.py`` holds it to that; it measures 16 %, 94 % and 0.022.  On an H200, against bfloat16,
``tests/gpu/test_fp8_model.py`` measured 20 %, 90 % and 0.023, eagerly and compiled with the fusions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerf_runtime.errors import ModelError
from kerf_runtime.layers.quantization import DynamicQuantFP8, StaticQuantFP8
from kerf_runtime.ops.fp8 import FP8

__all__ = ["Fp8Linear", "Linear", "scaled_matmul"]

_ALIGNMENT = 16
"""``torch._scaled_mm`` reads FP8 operands in units of 16 bytes."""


class Linear(nn.Module):
    """A matrix and perhaps a bias, without ``nn.Linear``'s random initialisation.

    The initialisation would be thrown away, and on the meta device it imports Dynamo (seconds).
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return F.linear(x, self.weight, self.bias)


class Fp8Linear(nn.Module):
    """A matrix in FP8 that quantises its input; see the top of the module for what it computes.

    ``unit`` is the scale 1.0 that ``torch._scaled_mm`` wants where scales are applied afterwards: a buffer,
    so that no compiled piece makes one on every call.  ``materialize`` it after building on the meta device.

    Args:
        inputs: K.
        outputs: N.
        bias: whether there is one, in the data type of the model.
        static: whether the input's scale comes from the checkpoint.

    Raises:
        ModelError: K or N is no multiple of 16.
    """

    unit: Tensor

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, static: bool) -> None:
        super().__init__()
        if inputs % _ALIGNMENT or outputs % _ALIGNMENT:
            raise ModelError(
                f"an FP8 matrix of {outputs} outputs and {inputs} inputs cannot be multiplied: both "
                f"must be multiples of {_ALIGNMENT}",
                where="quantization",
                hint="Serve the model unquantised",
            )
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=FP8), requires_grad=False)
        self.weight_scale = _scale(outputs, 1)
        self.input_scale = _scale(1) if static else None
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.register_buffer("unit", torch.ones(1, dtype=torch.float32), persistent=False)
        self.quantize: StaticQuantFP8 | DynamicQuantFP8
        self.quantize = StaticQuantFP8() if static else DynamicQuantFP8()

    def materialize(self, device: torch.device | str) -> None:
        """Make the buffer on ``device``; the parameters come from a checkpoint."""
        self.unit = torch.ones(1, dtype=torch.float32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N] in the data type of x."""
        if self.input_scale is not None:
            q, scale = self.quantize(x, self.input_scale), self.input_scale
        else:
            q, scale = self.quantize(x)
        return scaled_matmul(
            q, self.weight, scale, self.weight_scale, self.bias, dtype=x.dtype, unit=self.unit
        )


def scaled_matmul(
    q: Tensor,
    weight: Tensor,
    scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    unit: Tensor,
) -> Tensor:
    """Multiply FP8 matrices and undo their scales.

    Args:
        q: FP8 [T, K].
        weight: FP8 [N, K], contiguous: its transpose is the column-major operand that CUDA wants.
        scale: float32, [T, 1] per token or [1].
        weight_scale: float32 [N, 1].
        bias: [N] or None.
        dtype: of the result.
        unit: float32 [1], the value 1.0.

    Returns:
        [T, N].
    """
    per_token = scale.dim() == 2
    if q.device.type == "cuda":
        # Matrices of one value: where Inductor tunes this product it cannot read a scale that is a vector.
        wide = torch._scaled_mm(
            q,
            weight.t(),
            scale_a=(unit if per_token else scale).view(1, 1),
            scale_b=unit.view(1, 1),
            out_dtype=torch.float32,
        )
    else:
        wide = F.linear(q.float(), weight.float())
        wide = wide if per_token else wide * scale
    wide = (wide * scale if per_token else wide) * weight_scale.t()
    return (wide if bias is None else wide + bias.float()).to(dtype)


def _scale(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
