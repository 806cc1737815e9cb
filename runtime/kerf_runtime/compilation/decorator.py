"""``@support_torch_compile``: a model says which dimensions of its arguments vary from step to step.

The decorator only stores facts about ``forward`` on the class; it changes nothing of how the model
runs.  Everything that traces (``trace.py``, ``once.py``) asks for them with ``compile_support``.  No
Dynamo is imported here, because models import this module and a warm start needs no compiler.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, Union, get_args, get_origin, overload

from torch import Tensor, nn

from kerf_runtime.errors import CompileError

__all__ = [
    "ArgumentPresence",
    "CompileSupport",
    "IntermediateTensors",
    "compile_support",
    "presence_error",
    "support_torch_compile",
    "tensors_of",
]

_ATTRIBUTE = "kerf_compile_support"

Model = TypeVar("Model", bound=type[nn.Module])


@dataclass(frozen=True)
class IntermediateTensors:
    """Named tensors [T, ...] that one part of a model hands to the next."""

    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True)
class CompileSupport:
    """What tracing needs to know about the ``forward`` of one class.

    Attributes:
        owner: name of the decorated class.
        forward: the function the facts are about; a subclass that overrides it is not supported.
        arguments: names of all arguments, in order, without self.
        defaults: values of the last arguments when they are not given, as in ``__defaults__``.
        dynamic_dims: argument -> its dynamic dimensions, perhaps negative.
    """

    owner: str
    forward: Callable[..., Any]
    arguments: tuple[str, ...]
    defaults: tuple[Any, ...]
    dynamic_dims: dict[str, tuple[int, ...]]

    @property
    def where(self) -> str:
        """What errors are about."""
        return f"{self.owner}.forward"

    @property
    def default_values(self) -> dict[str, Any]:
        """Argument -> default, for those that have one."""
        names = self.arguments[len(self.arguments) - len(self.defaults) :]
        return dict(zip(names, self.defaults, strict=True))

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Refuse what ``forward`` does not take, the lack of what it needs, and what is no tensor.

        Raises:
            CompileError: names the argument.
        """
        for name, value in arguments.items():
            if name not in self.arguments:
                raise _unknown(name, self.owner, self.arguments)
            if not (value is None or isinstance(value, (Tensor, IntermediateTensors))):
                raise CompileError(
                    f"the argument {name!r} is a {type(value).__name__}; compiled forwards take "
                    "tensors, IntermediateTensors and None",
                    where=self.where,
                    hint="The trace would keep its value for ever: make it an attribute of the model",
                )
        for name in self.arguments:
            if name not in arguments and name not in self.default_values:
                raise CompileError(f"the argument {name!r} has no value", where=self.where)

    def dynamic_tensors(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """Every (tensor, dimension >= 0) of a call that varies; arguments that are None have none.

        Raises:
            CompileError: a tensor lacks the dimension, or has size 0 or 1 there, which torch would
                take for a constant.
        """
        found = []
        for name, dims in self.dynamic_dims.items():
            for key, tensor in tensors_of(arguments.get(name)):
                label = f"{name}[{key!r}]" if key else name
                for dim in dims:
                    found.append((tensor, _checked_dim(label, tensor, dim, self.where)))
        return found


def tensors_of(value: Tensor | IntermediateTensors | None) -> list[tuple[str, Tensor]]:
    """The tensors of one argument, each with its key; the key of a plain tensor is empty."""
    if isinstance(value, Tensor):
        return [("", value)]
    return [] if value is None else [(key, value[key]) for key in value]


def _checked_dim(label: str, tensor: Tensor, dim: int, where: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise CompileError(
            f"dimension {dim} of {label} is dynamic, but its shape is {list(tensor.shape)}",
            where=where,
            hint="Correct dynamic_arg_dims of @support_torch_compile",
        )
    if tensor.shape[dim] < 2:
        raise CompileError(
            f"dimension {dim} of {label} has size {tensor.shape[dim]} in the example, which torch takes "
            "for a constant",
            where=where,
            hint="Trace with at least 2 in every dynamic dimension; afterwards every size is allowed",
        )
    return dim % tensor.dim()


@overload
def support_torch_compile(cls: Model) -> Model: ...
@overload
def support_torch_compile(
    *, dynamic_arg_dims: Mapping[str, int | Sequence[int]] | None = None
) -> Callable[[Model], Model]: ...
def support_torch_compile(
    cls: Model | None = None,
    *,
    dynamic_arg_dims: Mapping[str, int | Sequence[int]] | None = None,
) -> Model | Callable[[Model], Model]:
    """Class decorator: this ``nn.Module`` may be traced, and these dimensions vary.

    Without ``dynamic_arg_dims`` they are read off the annotations of ``forward``: dimension 0 of every
    ``Tensor``, ``Tensor | None`` and ``IntermediateTensors`` argument, the number of tokens.

    Args:
        cls: the class, when used without parentheses.
        dynamic_arg_dims: argument -> dimension or dimensions, negative ones counted from the end;
            arguments that are not listed have fixed shapes.

    Raises:
        CompileError: not a module class; an argument that ``forward`` does not take; no dynamic
            dimension at all; or an annotation that cannot be resolved.
    """

    def decorate(target: Model) -> Model:
        setattr(target, _ATTRIBUTE, _support_of(target, dynamic_arg_dims))
        return target

    return decorate if cls is None else decorate(cls)


def compile_support(model: nn.Module) -> CompileSupport:
    """The facts that ``@support_torch_compile`` stored on the class of ``model``.

    Raises:
        CompileError: the class, or the subclass that defines ``forward``, is not decorated.
    """
    support: CompileSupport | None = getattr(type(model), _ATTRIBUTE, None)
    name = type(model).__name__
    if support is None:
        raise CompileError(
            f"{name} does not say that it can be compiled",
            where=name,
            hint="Decorate the class with @support_torch_compile, or set compilation.level to 0",
        )
    if type(model).forward is not support.forward:
        raise CompileError(
            f"{name} overrides the forward of {support.owner}, which is the one that was decorated",
            where=name,
            hint="Decorate the class that defines forward with @support_torch_compile",
        )
    return support


def _support_of(
    cls: type[nn.Module], explicit: Mapping[str, int | Sequence[int]] | None
) -> CompileSupport:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise CompileError(
            f"@support_torch_compile is for nn.Module classes, not for {cls!r}",
            hint="Decorate the model's class",
        )
    forward = cls.forward
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    where = f"{cls.__name__}.forward"
    for parameter in parameters:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise CompileError(
                f"the argument {parameter.name!r} is {parameter.kind.description}",
                where=where,
                hint="Compiled forwards take plain named arguments",
            )
    names = tuple(parameter.name for parameter in parameters)
    dims: dict[str, tuple[int, ...]]
    if explicit is None:
        dims = {p.name: (0,) for p in parameters if _is_dynamic(p, forward, where)}
    else:
        for name in explicit:
            if name not in names:
                raise _unknown(name, cls.__name__, names)
        dims = {n: (d,) if isinstance(d, int) else tuple(d) for n, d in explicit.items()}
    if not any(dims.values()):
        raise CompileError(
            "no argument has a dynamic dimension",
            where=where,
            hint="Annotate tensors as torch.Tensor, or list them in dynamic_arg_dims",
        )
    defaults = tuple(p.default for p in parameters if p.default is not inspect.Parameter.empty)
    return CompileSupport(cls.__name__, forward, names, defaults, dims)


def _unknown(name: str, owner: str, names: Sequence[str]) -> CompileError:
    near = get_close_matches(name, names, n=3)
    return CompileError(
        f"there is no argument {name!r}",
        where=f"{owner}.forward",
        hint=f"Did you mean {', '.join(near)}?" if near else f"It takes {', '.join(names)}",
    )


def _is_dynamic(parameter: inspect.Parameter, forward: Callable[..., Any], where: str) -> bool:
    annotation = parameter.annotation
    if isinstance(annotation, str):
        # From ``from __future__ import annotations``: a name of the module that defines forward.
        try:
            annotation = eval(annotation, inspect.unwrap(forward).__globals__)
        except (NameError, AttributeError, SyntaxError) as error:
            raise CompileError(
                f"the annotation {annotation!r} of argument {parameter.name!r} cannot be resolved: {error}",
                where=where,
                hint="Import what it names at run time, or give dynamic_arg_dims",
            ) from error
    return _is_tensor_like(annotation)


def _is_tensor_like(annotation: Any) -> bool:
    """Tensor or IntermediateTensors, or one of them or None."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [a for a in get_args(annotation) if a is not types.NoneType]
        return len(members) == 1 and _is_tensor_like(members[0])
    return isinstance(annotation, type) and issubclass(annotation, (Tensor, IntermediateTensors))


class ArgumentPresence:
    """Which arguments were None when the model was traced: they stay None for the model's life.

    The trace has no branch for the other case, so a call that differs would silently compute
    something else.  The same holds for a default that is no tensor.

    Args:
        support: names all arguments.
        arguments: those of the traced call; one that is not listed has its default.
    """

    def __init__(self, support: CompileSupport, arguments: Mapping[str, object]) -> None:
        self.support = support
        values = {**support.default_values, **arguments}
        self.fixed = {n: v for n, v in values.items() if n not in arguments or v is None}

    def guard(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` behind the check, which costs tens of nanoseconds for each argument.

        Raises (when called):
            CompileError: an argument that was None is given, or the other way round; names it.
        """
        names = self.support.arguments
        differs = " or ".join(
            f"{name} is not {name}_" if name in self.fixed else f"{name} is None" for name in names
        )
        values = ", ".join(names)
        source = (
            f"def forward({values}):\n"
            f"    if {differs}:\n"
            f"        kerf_refuse(({values},))\n"
            f"    return kerf_forward({values})\n"
        )
        namespace: dict[str, Any] = {f"{name}_": value for name, value in self.fixed.items()}
        namespace |= {"kerf_forward": forward, "kerf_refuse": self._refuse}
        exec(compile(source, "<kerf argument check>", "exec"), namespace)
        guarded: Callable[..., Any] = namespace["forward"]
        guarded.__defaults__ = self.support.defaults
        return guarded

    def _refuse(self, values: tuple[object, ...]) -> None:
        for name, value in zip(self.support.arguments, values, strict=True):
            if name in self.fixed and value is not self.fixed[name]:
                raise presence_error(name, self.fixed[name], value, where=self.support.where)
            if name not in self.fixed and value is None:
                raise presence_error(name, "a tensor", value, where=self.support.where)


def presence_error(name: str, before: object, now: object, *, where: str) -> CompileError:
    """The error for an argument that is None, or has its default, in some calls only."""
    now = "a tensor" if isinstance(now, (Tensor, IntermediateTensors)) else now
    return CompileError(
        f"the argument {name!r} was {before} when the model was traced and is {now} now",
        where=where,
        hint="An argument that is None once must stay None for the life of the model, and one that is "
        "a tensor must stay a tensor",
    )
