"""What a model says about its forward: which arguments there are and what varies in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import pytest
import torch
from tests.compilation import models
from torch import Tensor, nn

from kerf_runtime.compilation.decorator import (
    ArgumentPresence,
    IntermediateTensors,
    compile_support,
    support_torch_compile,
    tensors_of,
)
from kerf_runtime.errors import CompileError

if TYPE_CHECKING:
    from torch import Tensor as OnlyForTypeCheckers


@support_torch_compile
class Inferred(nn.Module):
    def forward(
        self,
        ids: Tensor,
        more: Tensor | None,
        older: Optional[Tensor],  # noqa: UP045 - the older form counts as well
        between: IntermediateTensors | None = None,
        scale: float = 1.0,
        untyped=None,
    ) -> Tensor:
        return ids


def test_dimension_0_of_tensors_optional_tensors_and_intermediate_tensors_is_dynamic():
    support = compile_support(Inferred())
    assert support.dynamic_dims == {"ids": (0,), "more": (0,), "older": (0,), "between": (0,)}
    assert support.arguments == ("ids", "more", "older", "between", "scale", "untyped")
    assert support.default_values == {"between": None, "scale": 1.0, "untyped": None}


def test_annotations_that_are_no_strings_count_the_same():
    def forward(self, x, y, z):
        return x

    forward.__annotations__ = {"x": Tensor, "y": Tensor | None, "z": int}
    cls = support_torch_compile(type("M", (nn.Module,), {"forward": forward}))
    assert compile_support(cls()).dynamic_dims == {"x": (0,), "y": (0,)}


def test_the_decorator_changes_nothing_of_how_the_model_runs():
    assert isinstance(Inferred, type)
    ids = torch.ones(3)
    assert Inferred()(ids, None, None) is ids


def test_explicit_dimensions_replace_the_inferred_ones_and_may_count_from_the_end():
    @support_torch_compile(dynamic_arg_dims={"x": 0, "y": (0, -1)})
    class Explicit(nn.Module):
        def forward(self, x, y, z: Tensor):
            return x

    support = compile_support(Explicit())
    assert support.dynamic_dims == {"x": (0,), "y": (0, -1)}
    x, y, z = torch.ones(2), torch.ones(2, 3, 4), torch.ones(5)
    found = support.dynamic_tensors({"x": x, "y": y, "z": z})
    assert [(id(tensor), dim) for tensor, dim in found] == [(id(x), 0), (id(y), 0), (id(y), 2)]


def test_every_tensor_of_intermediate_tensors_is_dynamic_and_none_has_no_dimension():
    tensors = IntermediateTensors({"hidden": torch.ones(4, 2), "residual": torch.ones(4, 2)})
    arguments = {"ids": torch.ones(4), "more": None, "between": tensors}
    found = compile_support(Inferred()).dynamic_tensors(arguments)
    assert [dim for _, dim in found] == [0, 0, 0]
    assert found[1][0] is tensors["hidden"]
    assert len(tensors) == 2
    assert [key for key, _ in tensors_of(tensors)] == list(tensors)


def test_an_unknown_dynamic_argument_is_an_error_that_names_it_and_near_matches():
    with pytest.raises(CompileError, match=r"Typo\.forward: there is no argument 'input_id'") as e:

        @support_torch_compile(dynamic_arg_dims={"input_id": 0})
        class Typo(nn.Module):
            def forward(self, input_ids, positions):
                return input_ids

    assert e.value.hint == "Did you mean input_ids?"


def test_without_a_near_match_the_arguments_are_listed():
    with pytest.raises(CompileError, match="It takes a, b"):

        @support_torch_compile(dynamic_arg_dims={"quite_different": 0})
        class Typo(nn.Module):
            def forward(self, a, b):
                return a


@pytest.mark.parametrize("dims", [None, {}, {"x": ()}])
def test_a_forward_without_a_dynamic_dimension_is_an_error(dims):
    with pytest.raises(CompileError, match="no argument has a dynamic dimension"):

        @support_torch_compile(dynamic_arg_dims=dims)
        class Fixed(nn.Module):
            def forward(self, x, n: int):
                return x


def test_an_annotation_that_cannot_be_resolved_is_an_error_that_names_the_argument():
    with pytest.raises(CompileError, match="'OnlyForTypeCheckers' of argument 'x'") as raised:

        @support_torch_compile
        class Unresolved(nn.Module):
            def forward(self, x: OnlyForTypeCheckers) -> Tensor:
                return x

    assert "dynamic_arg_dims" in raised.value.hint


@pytest.mark.parametrize("thing", [lambda x: x, dict, 3])
def test_only_module_classes_can_be_decorated(thing):
    with pytest.raises(CompileError, match=r"is for nn\.Module classes"):
        support_torch_compile(thing)


def test_arguments_without_a_name_of_their_own_are_refused():
    with pytest.raises(CompileError, match="the argument 'many' is variadic positional"):

        @support_torch_compile
        class Variadic(nn.Module):
            def forward(self, x: Tensor, *many: Tensor) -> Tensor:
                return x


def test_an_undecorated_model_is_an_error_that_says_what_to_do():
    with pytest.raises(CompileError, match="Linear does not say that it can be compiled") as raised:
        compile_support(nn.Linear(1, 1))
    assert "@support_torch_compile" in raised.value.hint
    assert "level to 0" in raised.value.hint


def test_a_subclass_is_covered_unless_it_overrides_forward():
    class Same(models.WithBuffer):
        pass

    class Other(models.WithBuffer):
        def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
            return input_ids

    assert compile_support(Same()).owner == "WithBuffer"
    with pytest.raises(CompileError, match="Other overrides the forward of WithBuffer"):
        compile_support(Other())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": 1, "more": None, "older": None}, "'ids' is a int"),
        ({"ids": torch.ones(2), "older": None}, "'more' has no value"),
        ({"idz": torch.ones(2)}, "no argument 'idz'.*Did you mean ids"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(arguments, message):
    with pytest.raises(CompileError, match=message):
        compile_support(Inferred()).check_arguments(arguments)


@pytest.mark.parametrize(
    ("shape", "dim", "message"),
    [
        ((4,), 1, r"dimension 1 of x is dynamic, but its shape is \[4\]"),
        ((4,), -2, r"dimension -2 of x is dynamic, but its shape is \[4\]"),
        ((1, 3), 0, "dimension 0 of x has size 1 in the example"),
        ((3, 0), -1, "dimension -1 of x has size 0 in the example"),
    ],
)
def test_an_example_without_the_dynamic_dimension_or_too_small_is_an_error(shape, dim, message):
    @support_torch_compile(dynamic_arg_dims={"x": dim})
    class OneDim(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(CompileError, match=message):
        compile_support(OneDim()).dynamic_tensors({"x": torch.ones(shape)})


def test_an_error_about_intermediate_tensors_names_the_tensor():
    between = IntermediateTensors({"hidden": torch.ones(1, 2)})
    with pytest.raises(CompileError, match=r"dimension 0 of between\['hidden'\] has size 1"):
        compile_support(Inferred()).dynamic_tensors({"between": between})


X = torch.ones(2)


def guarded(arguments):
    presence = ArgumentPresence(compile_support(Inferred()), arguments)
    return presence.guard(lambda *values: values)


def test_calls_that_are_like_the_trace_pass_through_with_their_defaults():
    forward = guarded({"ids": X, "more": None, "older": X})
    assert forward(X, None, X) == (X, None, X, None, 1.0, None)
    assert forward(older=X, more=None, ids=X)[2] is X


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((X, X, X), "argument 'more' was None when the model was traced and is a tensor now"),
        (
            (X, None, None),
            "argument 'older' was a tensor when the model was traced and is None now",
        ),
        ((None, None, X), "argument 'ids' was a tensor when the model was traced and is None now"),
        ((X, None, X, None, 2.0), r"argument 'scale' was 1\.0 when .* and is 2\.0 now"),
    ],
)
def test_an_argument_that_changes_between_none_and_a_tensor_is_an_error_that_names_it(
    values, message
):
    with pytest.raises(CompileError, match=message) as raised:
        guarded({"ids": X, "more": None, "older": X})(*values)
    assert raised.value.where == "Inferred.forward"
    assert "must stay None for the life of the model" in raised.value.hint
