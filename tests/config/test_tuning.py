"""Who asks for tuning is told for which code it is in force."""

from __future__ import annotations

import pytest
from tests.config.test_resolve import resolved

from kerf_runtime.config.tuning import tuning_warnings
from kerf_runtime.reasons import ConfigReason

ASKED = {"max_autotune": True, "triton.multi_kernel": 1, "size_asserts": True}


def test_each_option_that_times_candidates_is_named_with_the_reason():
    warnings = tuning_warnings(ASKED, (8,))
    assert [(w.field, w.effective) for w in warnings] == [
        ("inductorConfig.max_autotune", "True"),
        ("inductorConfig.triton.multi_kernel", "1"),
    ]
    assert {w.reason for w in warnings} == {ConfigReason.STATIC_SIZES_ONLY}
    assert all("only the sizes of compileSizes are tuned" in w.message for w in warnings)


def test_without_static_sizes_it_says_that_nothing_is_tuned():
    assert all("there are none" in warning.message for warning in tuning_warnings(ASKED, ()))


def test_what_is_switched_off_anyway_is_not_told():
    assert tuning_warnings({"max_autotune": False, "triton.multi_kernel": 0}, ()) == ()


@pytest.mark.parametrize(("level", "told"), [(3, 1), (2, 0)])
def test_the_effective_configuration_warns_at_level_3_and_strict_does_not_refuse(level, told):
    options = {"max_autotune": True}
    effective = resolved("NONE", level=level, inductorConfig=options, strict=True)
    assert effective.changes == ()
    assert [w.reason for w in effective.warnings] == [ConfigReason.STATIC_SIZES_ONLY] * told
