"""What Inductor is told: Kerf's options, the user's, and which of them are in force for which shape.

What is published under a key must not depend on whether an environment variable of torch asks for tuning: the
options that time candidates are always set.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from kerf_runtime.compilation import internals
from kerf_runtime.config.tuning import UNTIMED
from kerf_runtime.errors import ConfigError

__all__ = ["INNER_OPTIONS", "REFUSED_OFF", "settings_for", "validate_options"]

_DEFAULT_OPTIONS: dict[str, Any] = {
    # The number of threads must not be compiled in: pods may have other CPU limits than the Job.
    "cpp.dynamic_threads": True,
    # The instruction set is chosen in _plain_instruction_sets; probing it would start a compiler and a
    # Python that imports torch for each candidate.
    "cpp.vec_isa_ok": True,
    # Precompiled headers go to a folder shared by everything on the machine and pay off after many kernels.
    "cpp_cache_precompile_headers": False,
    # Every kernel is stored on its own; two kernels must not be merged across pieces.
    "cpp.enable_kernel_profile": False,
    # A fresh cache folder is used per session, so caching between sessions cannot help.
    "fx_graph_remote_cache": False,
    # The stitching plan fixes every layout; checking them again on each call costs CPU time.
    "size_asserts": False,
    "alignment_asserts": False,
    # Kernels are launched from their cubins: one that cannot be is an error, not a slower launch.
    "strict_static_triton_launcher": True,
}
INNER_OPTIONS: dict[str, Any] = {
    # Generating code must allocate nothing on the device and launch nothing.  An option of its own:
    # standalone_compile sets it to True around everything else.
    "triton.autotune_at_compile_time": False,
}
_REFUSED_OPTIONS: dict[str, tuple[bool | int, str]] = {
    "cpp_wrapper": (False, "pieces are stored with wrappers in Python"),
    "freezing": (False, "pieces are stored without the weights"),
    "triton.cudagraphs": (False, "graphs are recorded as compilation.cudagraphMode says"),
    # Such a product would be a function beside the wrapper's own, which the loader does not know.
    "triton.num_decompose_k_splits": (0, "a product in parts cannot be stored"),
    "assume_32bit_indexing": (False, "32 bits are used where they are enough for the largest step"),
}
"""Each with the value that switches it off, and why it stays off."""
REFUSED_OFF: dict[str, Any] = {name: off for name, (off, _) in _REFUSED_OPTIONS.items()}
"""To be set explicitly: an environment variable could have switched one on."""
_STATIC_GPU_OPTIONS: dict[str, Any] = {
    "max_autotune": True,
    "coordinate_descent_tuning": True,
    "triton.autotune_pointwise": True,
    "dynamic_scale_rblock": True,
    "shape_padding": True,
    "autotune_num_choices_displayed": 0,
}


def settings_for(
    options: Mapping[str, Any], *, timed: bool, on_gpu: bool, hooks: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of one compilation.

    Args:
        options: the user's.
        timed: whether candidates may be timed, which code for any number of tokens never is: without, the
            options for that are off, whoever asks for them.
        on_gpu: whether they are timed unasked.
        hooks: options under which the passes run.
    """
    settings = {**REFUSED_OFF, **_DEFAULT_OPTIONS, **UNTIMED, **hooks}
    if not timed:
        return {**settings, **options, **UNTIMED}
    return {**settings, **(_STATIC_GPU_OPTIONS if on_gpu else {}), **options}


def validate_options(options: Mapping[str, Any]) -> None:
    """Refuse Inductor options that do not exist, cannot work here, or have a value of another type.

    Raises:
        ConfigError: names the option, and near matches or the type of its value.
    """
    known = internals.inductor_config.get_config_copy()
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise ConfigError(
                f"Inductor has no option {name!r}",
                where="compilation.inductorConfig",
                hint=f"Did you mean {', '.join(near)}?" if near else "See torch._inductor.config",
            )
        if value and name in _REFUSED_OPTIONS:
            raise ConfigError(
                f"the Inductor option {name!r} cannot be used: {_REFUSED_OPTIONS[name][1]}",
                where="compilation.inductorConfig",
                hint="Remove it",
            )
        kind = type(known[name])
        allowed = (int, float) if kind is float else (kind,)
        if kind in (bool, int, float, str) and type(value) not in allowed:
            raise ConfigError(
                f"the Inductor option {name!r} takes a value of type {kind.__name__}, not {value!r}",
                where="compilation.inductorConfig",
                hint=f"Its default is {known[name]!r}",
            )
