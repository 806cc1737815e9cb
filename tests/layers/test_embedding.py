"""The tables of tokens and positions."""

from __future__ import annotations

import torch

from kerf_runtime.layers.embedding import Embedding, LearnedPositions


def test_an_embedding_looks_rows_up() -> None:
    layer = Embedding(5, 3)
    layer.weight.data = torch.arange(15.0).view(5, 3)
    assert layer(torch.tensor([4, 0])).tolist() == [[12.0, 13.0, 14.0], [0.0, 1.0, 2.0]]


def test_positions_are_added_from_their_offset_on() -> None:
    layer = LearnedPositions(4, 2, offset=2)
    assert layer.weight.shape == (6, 2)
    layer.weight.data = torch.arange(6.0).repeat_interleave(2).view(6, 2)
    x = torch.full((3, 2), 10.0)
    assert layer(x, torch.tensor([0, 3, 1]))[:, 0].tolist() == [12.0, 15.0, 13.0]


def test_without_an_offset_position_0_is_the_first_row() -> None:
    layer = LearnedPositions(2, 1)
    layer.weight.data = torch.tensor([[7.0], [8.0]])
    assert layer(torch.zeros(2, 1), torch.tensor([0, 1])).tolist() == [[7.0], [8.0]]
