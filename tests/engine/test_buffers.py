"""Inputs of a step lie in one piece, each where kernels may expect it; of the block table only changes are sent."""

from __future__ import annotations

from dataclasses import asdict

import torch

from kerf_runtime.engine.buffers import BlockTable, StepInputs

CPU = torch.device("cpu")


def test_every_input_has_a_place_of_its_own_that_kernels_may_count_on() -> None:
    inputs = StepInputs(37, 5, device=CPU)
    tensors = vars(inputs.device)
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    assert sizes.pop("query_start") == 6
    assert [sizes.pop(name) for name in ("input_ids", "positions", "slots")] == [37, 37, 37]
    assert set(sizes.values()) == {5}
    for number, tensor in enumerate(tensors.values()):
        assert (tensor.data_ptr() - next(iter(tensors.values())).data_ptr()) % 256 == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors.values()):
        assert set(tensor.tolist()) == {number}


def test_what_is_written_is_what_the_device_has() -> None:
    inputs = StepInputs(4, 2, device=CPU)
    for step in range(3):
        inputs.turn()
        inputs.host.positions[:] = [step, 1, 2, 3]
        inputs.host.seq_lens[:] = [7, step]
        inputs.send()
        assert inputs.device.positions.tolist() == [step, 1, 2, 3]
        assert inputs.device.seq_lens.tolist() == [7, step]
    assert set(asdict(inputs.host)) == set(vars(inputs.device))


def test_only_rows_that_changed_are_sent_with_those_between() -> None:
    table = BlockTable(6, 4, device=CPU)
    blocks = [5, 6]
    table.write(1, blocks)
    table.write(4, [9])
    assert table.send() == range(1, 5)
    table.write(1, blocks)
    assert table.send() == range(0)
    blocks.append(7)
    table.write(1, blocks)
    assert table.send() == range(1, 2)
    assert table.device[1].tolist() == [5, 6, 7, 0]
    table.clear()
    assert table.send() == range(6)
    assert not table.device.any()
    table.write(1, blocks)
    assert table.send() == range(1, 2)
    assert table.device[1].tolist() == [5, 6, 7, 0]
