"""A ModelDeployment's life against a real API server, with a stand-in for the kubelet."""

from __future__ import annotations

import pytest
from tests.operator.conftest import OperatorProcess, Place

pytestmark = pytest.mark.control_plane


def test_a_new_deployment_compiles_once_and_becomes_ready(
    place: Place, operator: OperatorProcess
) -> None:
    place.create()
    found = place.wait_ready()
    status = found["status"]
    assert status["phase"] == "Ready"
    assert status["cache"]["state"] == "Ready"
    assert status["graphs"]["effectiveMode"] == "FULL_AND_PIECEWISE"
    assert len(place.list("Job")) == 1
    assert len(place.list("CompileCache")) == 1
    assert place.names("Deployment") == ["smollm2"]
    hit = place.wait_reason("Hit", "CacheHit")
    assert hit["status"] == "True"
