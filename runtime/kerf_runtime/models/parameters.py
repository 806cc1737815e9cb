"""Fills a model's parameters from the tensors of a checkpoint, as the rules of its family say.

Every parameter is allocated once, at its final size and data type on its final device, and the parts of
fused parameters are copied, or quantised, into their rows: the peak is one checkpoint tensor above the
model, never two models.  What needs no change is read by several threads (``upload``) meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn

from kerf_runtime.errors import ModelError
from kerf_runtime.layers.quantization import quantize_rows
from kerf_runtime.models.config import Fp8Scheme
from kerf_runtime.models.sources import WeightSource
from kerf_runtime.models.upload import StoredTensor, Upload
from kerf_runtime.ops.fp8 import FP8

__all__ = ["How", "LoadedWeights", "ParameterRule", "Progress", "fill", "tensors_of_module"]

Progress = Callable[[str, float | None], None]
"""Called with a detail for people and the fraction done (0..1), or None if unknown."""


class How(Enum):
    """How the sources of a rule become one parameter."""

    COPY = auto()
    """Stacked, in the model's data type."""
    FP8 = auto()
    """Stacked; stored as FP8 and kept so."""
    QUANTIZE = auto()
    """Stacked and quantised to FP8; fills ``weight_scale`` of the same module, too."""
    ROW_SCALES = auto()
    """Stacked float32 scales, [rows, 1]; a source with one scale stands for all of its rows."""
    LARGEST = auto()
    """The largest of the sources' single values, float32 [1]: one input feeds every part."""


@dataclass(frozen=True)
class ParameterRule:
    """Where one parameter of our module comes from.

    Attributes:
        parameter: our name.
        sources: checkpoint tensors that are stacked along dim 0, in order.
        rows: rows of each source.
        adapt: what to do to each source before it is used (None: nothing).
        how: the sources become the parameter.
        transposed: the sources are stored [inputs, outputs], the reverse of ours.
    """

    parameter: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    adapt: tuple[Callable[[Tensor], Tensor] | None, ...]
    how: How = How.COPY
    transposed: bool = False


@dataclass(frozen=True)
class LoadedWeights:
    """What a family's ``weights`` module says about one checkpoint.

    Attributes:
        rules: one per parameter.
        ignored: checkpoint tensors that are rightly not used.
    """

    rules: Sequence[ParameterRule]
    ignored: frozenset[str]


def tensors_of_module(scheme: Fp8Scheme | None, *, bias: bool) -> Iterator[tuple[str, How]]:
    """The parameters of one module, and how each is assembled from the checkpoint's tensors."""
    if scheme is None:
        yield "weight", How.COPY
    elif not scheme.stored:
        yield "weight", How.QUANTIZE
    else:
        yield "weight", How.FP8
        yield "weight_scale", How.ROW_SCALES
        if scheme.static:
            yield "input_scale", How.LARGEST
    if bias:
        yield "bias", How.COPY


def fill(
    model: nn.Module,
    weights: LoadedWeights,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> None:
    """Replace the meta parameters of ``model`` by the tensors that ``weights`` names.

    Raises:
        ModelError: tensors are missing or superfluous, or one has another shape or data type than
            the configuration says.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_names(weights, source)
    sizes = [parameters[rule.parameter].numel() * dtype.itemsize for rule in weights.rules]
    started = 0
    with Upload(device) as upload:

        def report(detail: str) -> None:
            if progress is not None:
                progress(detail, max(0, started - upload.pending_bytes) / sum(sizes))

        filler = _Filler(source, upload, dtype)
        for rule, size in zip(weights.rules, sizes, strict=True):
            report(rule.parameter)
            expected = tuple(parameters[rule.parameter].shape)
            for name, tensor in filler.assemble(rule, expected).items():
                _replace(model, name, nn.Parameter(tensor, requires_grad=False))
            started += size
        upload.finish(lambda: report(f"{upload.pending_bytes / 2**30:.1f} GiB are on their way"))
    if progress is not None:
        progress("weights are loaded", 1.0)


class _Filler:
    """Makes parameters on the device of an upload, in the data type of the model."""

    def __init__(self, source: WeightSource, upload: Upload, dtype: torch.dtype) -> None:
        self._source = source
        self._upload = upload
        self._kinds = {
            How.COPY: dtype,
            How.FP8: FP8,
            How.QUANTIZE: FP8,
            How.ROW_SCALES: torch.float32,
        }

    def assemble(self, rule: ParameterRule, expected: tuple[int, ...]) -> dict[str, Tensor]:
        """The parameter of a rule by its name, and its scales by theirs where they are made here.

        What the checkpoint holds as the parameter does may still be on its way.
        """
        source, device = self._source, self._upload.device
        if rule.how is How.LARGEST:
            values = [_one_value(source, name) for name in rule.sources]
            return {rule.parameter: torch.stack(values).max().reshape(1).to(device)}
        target = _allocate(rule.parameter, expected, self._kinds[rule.how], device)
        made = {rule.parameter: target}
        scales = target
        if rule.how is How.QUANTIZE:
            owner = rule.parameter.rpartition(".")[0]
            scales = torch.empty(expected[0], 1, dtype=torch.float32, device=device)
            made[f"{owner}.weight_scale"] = scales
        start = 0
        for name, rows, adapt in zip(rule.sources, rule.rows, rule.adapt, strict=True):
            span = slice(start, start + rows)
            start += rows
            if rule.how is How.ROW_SCALES:
                target[span].copy_(_row_scales(source, name, rows))
                continue
            want, found = (rows, *expected[1:]), source.shape(name)
            if rule.transposed:
                want = want[::-1]
            if found != want:
                raise _wrong_shape(source, name, found, list(want))
            stored = source.stored(name)
            as_it_is = adapt is None and not rule.transposed and rule.how is not How.QUANTIZE
            if as_it_is and stored is not None and stored.dtype is target.dtype:
                self._upload.start(target[span], stored)
                continue
            tensor = self._read(rule, name, stored)
            tensor = adapt(tensor) if adapt else tensor
            if rule.how is How.QUANTIZE:
                # From what the checkpoint holds, not from a copy rounded to the model's data type.
                target[span], scales[span] = quantize_rows(tensor.to(device=device))
            else:
                target[span].copy_(tensor)
        return made

    def _read(self, rule: ParameterRule, name: str, stored: StoredTensor | None) -> Tensor:
        """One source of a rule as ours are laid out, wherever it comes fastest."""
        tensor = self._source.read(name) if stored is None else self._upload.fetch(stored)
        floats = tensor.dtype.is_floating_point
        if not floats or (tensor.dtype is FP8) is not (rule.how is How.FP8):
            raise ModelError(
                f"tensor {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, which the "
                "quantization_config of the checkpoint does not say",
                where=self._source.file(name),
                hint="The weights do not belong to this configuration",
            )
        return tensor.t() if rule.transposed else tensor


def _allocate(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's has no class of its own
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        size = math.prod(shape) * dtype.itemsize
        raise ModelError(
            f"{name} needs {size / 2**30:.1f} GiB of memory, which {device} does not have",
            where="weights",
            hint="Use a smaller model or data type, engine.quantization, or a machine with more memory",
        ) from error


def _row_scales(source: WeightSource, name: str, rows: int) -> Tensor:
    """Float32 [rows, 1] from one scale, or one per row."""
    shape = source.shape(name)
    if shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        raise _wrong_shape(source, name, shape, f"[], [1] or [{rows}, 1]")
    return source.read(name).float().reshape(-1, 1).expand(rows, 1)


def _one_value(source: WeightSource, name: str) -> Tensor:
    shape = source.shape(name)
    if shape not in ((), (1,)):
        raise _wrong_shape(source, name, shape, "[] or [1]")
    return source.read(name).float().reshape(())


def _wrong_shape(
    source: WeightSource, name: str, found: tuple[int, ...], expected: object
) -> ModelError:
    return ModelError(
        f"tensor {name} has shape {list(found)}, expected {expected}",
        where=source.file(name),
        hint="The weights do not belong to this configuration",
    )


def _check_names(weights: LoadedWeights, source: WeightSource) -> None:
    needed = {name for rule in weights.rules for name in rule.sources}
    present = source.names()
    missing = sorted(needed - present)
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(needed)} tensors are missing: {_some(missing)}",
            where=source.where,
            hint="The checkpoint is incomplete, or its configuration describes another model",
        )
    unknown = sorted(present - needed - weights.ignored)
    if unknown:
        raise ModelError(
            f"{len(unknown)} tensors are unknown to the architecture: {_some(unknown)}",
            where=source.where,
            hint="Leaving them out would change the answers, so nothing was loaded",
        )


def _some(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)
