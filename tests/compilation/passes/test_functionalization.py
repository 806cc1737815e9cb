"""Fix functionalization: calls write in place again exactly where nobody can notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.compilation.passes.attention import one_prompt
from tests.compilation.passes.harness import run_passes
from tests.compilation.passes.layers import (
    AttentionQuant,
    attention_layer_names,
    kerf,
    quantiser,
    tokens,
)
from torch import Tensor
from torch.library import Library

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.passes.nodes import auto_functionalized

aten = torch.ops.aten
COPIES = (aten.clone.default, aten.copy_.default, aten.copy.default, auto_functionalized)


@pytest.fixture(autouse=True, scope="module")
def writers() -> Iterator[None]:
    """Operators that write to one or two arguments, and return something or not."""
    library = Library("kerf", "FRAGMENT")
    library.define("test_fill(Tensor x, Tensor(a!) out) -> ()")
    library.define("test_fill_both(Tensor x, Tensor(a!) first, *, Tensor(b!) second) -> Tensor")
    library.define("test_fill_maybe(Tensor x, Tensor(a!)? out) -> (Tensor, Tensor)")

    def fill(x: Tensor, out: Tensor) -> None:
        out.copy_(x + 1)

    def fill_both(x: Tensor, first: Tensor, *, second: Tensor) -> Tensor:
        first.copy_(x + 1)
        second.copy_(x + 2)
        return x + 3

    def fill_maybe(x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        if out is not None:
            out.copy_(x + 1)
        return x + 2, x + 3

    for name, function in (
        ("test_fill", fill),
        ("test_fill_both", fill_both),
        ("test_fill_maybe", fill_maybe),
    ):
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"kerf::{name}", function, lib=library)
    yield
    library._destroy()


def test_every_attention_call_writes_to_its_buffer() -> None:
    model = AttentionQuant(3, quantiser("dynamic", "custom"))
    layers = one_prompt(6, attention_layer_names(3))
    with layers, compilation_counter.expect(functionalization_matches=3):
        result = run_passes(model, tokens(6))
    assert result.matches == {"fix_functionalization": 3}
    assert result.manager.left_functional == 0
    assert result.count(kerf.attention.default) == 3
    assert result.count(*COPIES) == 0


def check(model: Any, *arguments: Tensor, fixed: int, left: int = 0) -> Any:
    """Run ``model`` compiled and not, on equal copies of the arguments; both must do the same."""
    copies = [argument.clone() for argument in arguments]
    expected = model(*copies)
    result = run_passes(model, *arguments)
    assert result.manager.matches["fix_functionalization"] == fixed
    assert result.manager.left_functional == left
    torch.testing.assert_close(result.outputs, expected, rtol=0, atol=0)
    torch.testing.assert_close(list(arguments), copies, rtol=0, atol=0)
    return result


X = torch.arange(12.0).view(3, 4)


def test_a_fresh_buffer_is_written_in_place() -> None:
    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kerf.test_fill(x, out)
        return out * 2

    assert check(model, X.clone(), fixed=1).count(*COPIES) == 0


def test_a_buffer_written_twice_is_written_in_place_twice() -> None:
    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kerf.test_fill(x, out)
        kerf.test_fill(x * 2, out)
        return out * 2

    assert check(model, X.clone(), fixed=2).count(*COPIES) == 0


def test_a_write_through_a_reshape_is_in_place() -> None:
    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kerf.test_fill(x.view(-1, 2, 2), out.view(-1, 2, 2))
        return out + 1

    result = check(model, X.clone(), fixed=1)
    assert result.count(*COPIES) == 0


def test_an_argument_of_the_graph_is_written_in_place_and_not_copied_back() -> None:
    def model(x: Tensor, cache: Tensor) -> Tensor:
        kerf.test_fill(x, cache)
        return cache + x

    assert check(model, X.clone(), X.clone(), fixed=1).count(*COPIES) == 0


def test_several_arguments_and_a_result() -> None:
    def model(x: Tensor) -> Any:
        first, second = torch.empty_like(x), torch.empty_like(x)
        third = kerf.test_fill_both(x, first, second=second)
        return first * 2, second * 3, third * 4

    assert check(model, X.clone(), fixed=1).count(*COPIES) == 0


def test_several_results_and_an_argument_that_may_be_none() -> None:
    def model(x: Tensor) -> Any:
        out = torch.empty_like(x)
        one, two = kerf.test_fill_maybe(x, out)
        three, four = kerf.test_fill_maybe(x, None)
        return out * 2, one, two * 2, three, four

    assert check(model, X.clone(), fixed=2).count(*COPIES) == 0


def test_a_buffer_whose_old_content_is_read_later_is_left() -> None:
    def model(x: Tensor) -> Any:
        old = torch.sin(x)
        out = old.clone()
        kerf.test_fill(x, out)
        return out * 2, old * 3

    check(model, X.clone(), fixed=0, left=1)


def test_old_content_that_is_read_through_a_view_counts_as_read() -> None:
    def model(x: Tensor) -> Any:
        old = torch.sin(x)
        view = old.view(-1, 2, 2)
        out = old.clone()
        kerf.test_fill(x, out)
        return out * 2, view * 3

    check(model, X.clone(), fixed=0, left=1)


def test_old_content_that_was_read_before_does_not_matter() -> None:
    def model(x: Tensor) -> Any:
        out = torch.sin(x)
        kerf.test_fill(out * 3, out)
        return out + 1

    assert check(model, X.clone(), fixed=1).count(*COPIES) == 0


def test_an_argument_of_the_graph_that_must_not_change_is_left() -> None:
    def model(x: Tensor) -> Tensor:
        out = x.clone()
        kerf.test_fill(x, out)
        return out

    check(model, X.clone(), fixed=0, left=1)


def test_operators_of_others_are_left_to_inductor() -> None:
    library = Library("kerf_test_others", "FRAGMENT")
    library.define("fill(Tensor x, Tensor(a!) out) -> ()")

    def fill(x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    library.impl("fill", fill, "CPU")
    torch.library.register_fake("kerf_test_others::fill", fill, lib=library)

    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.kerf_test_others.fill(x, out)
        return out * 2

    result = run_passes(model, X.clone())
    assert result.matches == {}
    assert torch.equal(result.outputs, X * 2)
    library._destroy()


def test_a_part_of_a_buffer_is_left_and_right() -> None:
    def model(x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], 8)
        kerf.test_fill(x, out[:, :4])
        return out

    result = run_passes(model, X.clone())
    assert torch.equal(result.outputs, model(X.clone()))
