"""Options of Inductor that choose by timing candidates.  Pure; without torch.

A time measured for one number of tokens says nothing about another, so that only code for static sizes may be
tuned.  ``resolve`` says so to whoever asks for more, and the Inductor back end keeps to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kerf_runtime.reasons import ConfigReason, ReasonedChange

__all__ = ["UNTIMED", "tuning_warnings"]

UNTIMED: Mapping[str, bool | int] = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "benchmark_combo_kernel": False,
    "combo_kernels_autotune": 0,
    "triton.autotune_pointwise": False,
    "triton.mix_order_reduction_autotune_split_size": False,
    "triton.multi_kernel": 0,
    "dynamic_scale_rblock": False,
    # Whether padding a product pays off is decided by timing both.
    "shape_padding": False,
}
"""Each such option with the value that switches it off: in force for code for any number of tokens."""


def tuning_warnings(
    options: Mapping[str, object], compile_sizes: tuple[int, ...]
) -> tuple[ReasonedChange, ...]:
    """What ``inductorConfig`` asks to be tuned and code for any number of tokens is made without.

    Args:
        options: ``compilation.inductorConfig``, of a level at which Inductor compiles pieces.
        compile_sizes: the static sizes in force, in tokens.
    """
    why = "times of candidates hold for one number of tokens: " + (
        "only the sizes of compileSizes are tuned"
        if compile_sizes
        else "only sizes of compileSizes are tuned, and there are none"
    )
    return tuple(
        ReasonedChange(
            f"inductorConfig.{name}",
            str(value),
            str(value),
            ConfigReason.STATIC_SIZES_ONLY,
            why,
        )
        for name, value in sorted(options.items())
        if name in UNTIMED and value != UNTIMED[name]
    )
