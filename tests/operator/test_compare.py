"""When a write is needed: comparing what is with what should be."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kerf_operator.api.names import APPLIED
from kerf_operator.compare import covers, is_applied, same_quantity, stamped

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(tree=TREES)
def test_everything_covers_itself(tree: Any) -> None:
    assert covers(copy.deepcopy(tree), tree)


@given(tree=st.dictionaries(st.text(max_size=3), TREES, max_size=4), extra=TREES)
def test_what_others_add_does_not_matter(tree: dict[str, Any], extra: Any) -> None:
    assert covers({**tree, "added by others": extra}, tree)


def test_a_changed_value_is_seen_wherever_it_is() -> None:
    desired = {"spec": {"containers": [{"name": "kerf", "image": "a"}], "args": ["x", "y"]}}
    assert not covers(
        {"spec": {"containers": [{"name": "kerf", "image": "b"}], "args": ["x", "y"]}}, desired
    )
    assert not covers(
        {"spec": {"containers": [{"name": "kerf", "image": "a"}], "args": ["y", "x"]}}, desired
    )
    assert not covers(
        {"spec": {"containers": [{"name": "other", "image": "a"}], "args": ["x", "y"]}}, desired
    )


def test_entries_are_found_by_their_name_and_not_by_their_place() -> None:
    observed = [{"name": "sidecar"}, {"name": "kerf", "image": "a", "imagePullPolicy": "Always"}]
    assert covers(observed, [{"name": "kerf", "image": "a"}])


def test_empty_maps_and_lists_may_be_left_out_by_the_server() -> None:
    assert covers({}, {"resources": {}, "imagePullSecrets": []})
    assert not covers({}, {"resources": {"limits": {}} | {"requests": {"cpu": "1"}}})


def test_amounts_are_compared_by_value() -> None:
    for one, other in (
        ("1024Mi", "1Gi"),
        ("0.5", "500m"),
        ("1000m", "1"),
        ("0.5Ti", "512Gi"),
        ("1k", "1000"),
    ):
        assert same_quantity(one, other)
        assert covers({"memory": one}, {"memory": other})
    assert not same_quantity("1Gi", "1G")
    assert not same_quantity("1.2.3.4", "1.2.3.4")


def test_a_field_that_left_the_manifest_is_seen_by_the_digest() -> None:
    before = stamped({"metadata": {"name": "a"}, "spec": {"one": 1, "two": 2}})
    after = stamped({"metadata": {"name": "a"}, "spec": {"one": 1}})
    assert before["metadata"]["annotations"][APPLIED] != after["metadata"]["annotations"][APPLIED]
    assert is_applied(before, before)
    assert not is_applied(before, after)
    assert not is_applied(None, after)
