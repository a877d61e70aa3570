"""Ranks that are not there take part at once, and leave nothing behind."""

import sys

import pytest
import torch
import torch.distributed as dist

from crosscut.config import Layout, LayoutError
from crosscut.parallel import make_mesh
from crosscut.parallel.collectives import all_gather, all_reduce
from crosscut.parallel.pretended import pretended_ranks


def test_this_process_is_the_rank_that_is_asked_for() -> None:
    hook = sys.excepthook
    with pretended_ranks(512, 300):
        mesh = make_mesh(Layout(tensor=8, data=64), torch.device("cpu"))
        assert (mesh.tensor.rank, mesh.data.rank) == (300 % 8, 300 // 8)
        assert all_gather(torch.ones(2, 3), mesh.tensor, 0).shape == (16, 3)
        assert all_reduce(torch.ones(2, 3), mesh.data).shape == (2, 3)
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_a_rank_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LayoutError) as error, pretended_ranks(4, 4):
        pass
    assert str(error.value) == (
        "`rank` must be from 0 to 3, the last rank of the layout, but is 4. Choose another rank, or a larger layout."
    )
