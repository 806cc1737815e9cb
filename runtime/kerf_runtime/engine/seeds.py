"""Random numbers as a pure function of a seed and a position.  No torch: the HTTP process uses it too.

Nothing is kept between steps, so a request draws the same numbers whatever it is batched with and after
a preemption.  The mixing is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

__all__ = ["seed_of_choice", "uniform"]

_MASK = (1 << 64) - 1
_CHOICES = 0xD1B54A32D192ED03
"""Set apart from steps, so that the seed of a choice is no number that a step draws."""


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on ``seed`` and ``step`` only.

    Mixed once for the seed and once for the position, so that neighbouring seeds and steps give
    unrelated numbers.
    """
    return (_mix(_mix(seed & _MASK) + step) >> 11) * 2.0**-53


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of one of several answers to a prompt; the first is what one answer would be.

    Returns:
        ``seed`` for choice 0, else a number in [0, 2**63).
    """
    return seed if choice == 0 else _mix(_mix((seed & _MASK) ^ _CHOICES) + choice) >> 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
