"""Random numbers without state: their range, their spread, and that nothing correlates."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.engine.seeds import seed_of_choice, uniform


def test_uniform_numbers_are_in_range_and_evenly_spread() -> None:
    numbers = [uniform(seed, step) for seed in range(100) for step in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    counts = torch.histc(torch.tensor(numbers), bins=20, min=0, max=1)
    chi_squared = float(((counts - 500) ** 2 / 500).sum())
    assert chi_squared < 43.8  # 99.9 % quantile with 19 degrees of freedom


def test_neighbouring_seeds_and_steps_are_unrelated() -> None:
    numbers = torch.tensor([[uniform(seed, step) for step in range(200)] for seed in range(200)])
    for rows in (numbers, numbers.T):
        pairs = torch.stack([rows[:-1].flatten(), rows[1:].flatten()])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02


@given(st.integers(-(2**63), 2**64), st.integers(0, 2**20))
def test_any_seed_gives_a_number(seed: int, step: int) -> None:
    assert 0 <= uniform(seed, step) < 1


@given(st.integers(-(2**63), 2**63 - 1))
def test_the_first_choice_has_the_seed_itself_and_others_have_their_own(seed: int) -> None:
    seeds = [seed_of_choice(seed, choice) for choice in range(64)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 64
    assert all(0 <= other < 2**63 for other in seeds[1:])
    assert seeds == [seed_of_choice(seed, choice) for choice in range(64)]


def test_choices_of_neighbouring_seeds_share_no_seed() -> None:
    seeds = [seed_of_choice(seed, choice) for seed in range(200) for choice in range(20)]
    assert len(set(seeds)) == len(seeds)
