"""The passes as the configuration knows them: their switches, their order, their identity."""

from __future__ import annotations

import hashlib

import pytest
from tests.config.builders import MODEL, document

from kerf_runtime.config import PASS_VERSIONS, PassConfig, parse_document, pass_uuids
from kerf_runtime.config.passes import (
    DISTRIBUTED_PASSES,
    FUSION_PASSES,
    PERMANENT_PASSES,
    enabled_passes,
    pass_uuid,
)
from kerf_runtime.errors import ConfigError

ALL_ON = PassConfig(**dict.fromkeys(FUSION_PASSES, True))


def test_every_pass_but_the_first_and_the_last_has_a_switch_and_every_switch_has_a_pass():
    first, *switched, last = PASS_VERSIONS
    assert (first, last) == PERMANENT_PASSES
    assert set(PassConfig.model_fields) == {*switched, *DISTRIBUTED_PASSES}


def test_noop_elimination_is_on_and_fusions_are_off_by_default():
    assert enabled_passes(PassConfig()) == (
        "unfuse_matrix_adds",
        "noop_elimination",
        "fix_functionalization",
    )


def test_enabled_passes_are_in_the_order_in_which_they_run():
    assert enabled_passes(ALL_ON) == tuple(PASS_VERSIONS)


def test_the_first_and_the_last_pass_cannot_be_switched_off():
    assert enabled_passes(PassConfig.off()) == PERMANENT_PASSES


def test_a_uuid_is_the_digest_of_name_and_version(monkeypatch):
    before = pass_uuids(ALL_ON)
    assert list(before) == list(PASS_VERSIONS)
    assert before["norm_quant_fusion"] == hashlib.sha256(b"norm_quant_fusion:1").hexdigest()
    monkeypatch.setitem(PASS_VERSIONS, "norm_quant_fusion", 2)
    changed = {name for name, uuid in pass_uuids(ALL_ON).items() if uuid != before[name]}
    assert changed == {"norm_quant_fusion"}
    with pytest.raises(KeyError):
        pass_uuid("no_such_pass")


@pytest.mark.parametrize(
    "field", ["sequenceParallelism", "asyncTensorParallelism", "allReduceFusion"]
)
def test_a_distributed_pass_is_refused_by_name_until_there_is_tensor_parallelism(field):
    data = document({"model": MODEL, "compilation": {"passes": {field: True}}})
    words = (
        rf"compilation\.passes\.{field}: {field} needs tensor parallelism, which does not exist yet"
    )
    with pytest.raises(ConfigError, match=words):
        parse_document(data, where="file")
    data["spec"]["compilation"]["passes"][field] = False
    parse_document(data, where="file")
