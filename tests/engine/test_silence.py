"""When silence means that the engine is stuck."""

from __future__ import annotations

import pytest

from kerf_runtime.engine.silence import Silence


def listening(silence: Silence, *, start: float, seconds: int) -> None:
    for second in range(seconds + 1):
        silence.tick(start + second)


def test_nothing_is_counted_before_the_first_tick() -> None:
    silence = Silence(10)
    silence.tick(1e6)
    assert silence.seconds == 0


@pytest.mark.parametrize(
    ("seconds", "stalled", "final"),
    [(119, False, False), (120, True, False), (599, True, False), (600, True, True)],
)
def test_by_default_it_is_stalled_after_two_minutes_and_failed_after_ten(
    seconds: int, stalled: bool, final: bool
) -> None:
    silence = Silence()
    listening(silence, start=5.0, seconds=seconds)
    assert (silence.is_stalled, silence.is_final) == (stalled, final)


def test_any_word_ends_it() -> None:
    silence = Silence(100)
    listening(silence, start=0.0, seconds=50)
    silence.heard()
    assert silence.seconds == 0
    silence.tick(51.0)
    assert silence.seconds == 1
    assert not silence.is_stalled


def test_a_pause_of_the_listener_is_not_silence_of_the_engine() -> None:
    silence = Silence(100)
    silence.tick(0.0)
    silence.tick(3600.0)
    assert silence.seconds == 2
    silence.tick(3601.0)
    assert silence.seconds == 3
