"""Costs of grids of ranks that share images: beside those of real ranks, and beside positions counted by hand."""

import os
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.planner.grids import excess, planned, record_in_group
from crosscut.config import ConfigError, LayoutError
from crosscut.parallel import Sent
from crosscut.parallel.spatial import SpatialConv2d
from crosscut.planner.hardware import Hardware, named_hardware
from crosscut.rehearsal import GridCost, plan_grids, print_grids
from tests.parallel.spatial.cases import overlapped
from tests.ranks import RankPool
from tests.refusals import refusal

GRIDS = [("U-Net", (1, 2, 2)), ("residual", (4, 1)), ("residual", (1, 2)), ("U-Net", (2, 1, 1)), ("residual", (2, 2))]
QUICK = ("residual", (1, 2))
H100 = named_hardware("h100")
CASES = [pytest.param(*case, marks=[] if case == QUICK else pytest.mark.slow) for case in GRIDS]  # one mechanism


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_planned_messages_and_memory_are_those_of_real_ranks(
    ranks: RankPool, name: str, sizes: tuple[int, ...]
) -> None:
    for rank, recorded in enumerate(ranks.run(prod(sizes), record_in_group, name, 1, sizes)):
        cost = planned(name, 1, sizes, rank)
        assert list(cost.sent) == recorded.sent
        assert cost.kept == pytest.approx(recorded.kept, rel=1e-3)  # real ranks keep matrices of means for later steps


@pytest.mark.slow  # dry runs on larger images; the quick tests compare them with real ranks
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("U-Net", (1, 1, 2)),
        ("U-Net", (2, 2, 2)),
        ("U-Net", (8, 1, 1)),
        ("residual", (1, 2)),
        ("residual", (2, 2)),
        ("residual", (1, 4)),
        ("residual", (4, 2)),
    ],
)
def test_a_rank_keeps_its_share_of_the_activations_and_its_halos(name: str, sizes: tuple[int, ...]) -> None:
    whole = planned(name, 4, (1,) * len(sizes))
    costs = [planned(name, 4, sizes, rank) for rank in sorted({0, prod(sizes) // 2, prod(sizes) - 1})]
    assert max(excess(cost, whole) for cost in costs) < 0.005  # the aim is 0.02
    assert max(cost.halos for cost in costs) > 0


def test_halos_that_arrive_late_are_kept_without_padding() -> None:
    with overlapped():
        whole, cost = (planned("U-Net", 1, sizes) for sizes in ((1, 1, 1), (1, 1, 2)))
    assert excess(cost, whole) < 0.02


def _plan(num_ranks: int = 4, hardware: Hardware = H100, dtype: torch.dtype = torch.float32) -> list[GridCost]:
    """Plan of a convolution with a kernel of 3 x 3 on one image of 16 x 16 positions."""
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    return plan_grids(
        lambda mesh: SpatialConv2d(layer, mesh=mesh), torch.empty(1, 1, 16, 16, dtype=dtype), num_ranks, hardware
    )


def test_grids_are_ordered_by_time_with_figures_counted_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    square, rows, columns = costs = _plan()
    assert [cost.sizes for cost in costs] == [(2, 2), (4, 1), (1, 4)]
    assert [cost.rank for cost in costs] == [3, 2, 2]
    assert square.sent == (Sent("send", "height", 8), Sent("send", "width", 10))  # with a halo and a row of padding
    assert rows.sent == (Sent("send", "height", 16),) * 2
    assert [cost.halos for cost in costs] == [4 * (8 + 10), 4 * 2 * 16, 4 * 2 * 18]
    assert square.kept == 4 * (8 * 8 + 9 * 9 - 8 * 8)  # outputs, and halos without padding
    assert {(cost.share, cost.flops) for cost in costs} == {(1 / 4, 2 * 2 * 9 * 8 * 8)}  # the image needs no gradient
    products = columns.flops / (H100.flops["float32"] * H100.products_attained)
    assert columns.seconds(H100) == pytest.approx(products + 2 * H100.node.latency + 4 * 2 * 18 / H100.node.rate)
    nodes = replace(H100, ranks_per_node=2)
    assert nodes.network is not None
    assert columns.seconds(nodes) == pytest.approx(products + 2 * nodes.network.latency + 144 / nodes.network.rate)
    print_grids(costs, H100)
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if " x " in line]
    assert [line[:4] for line in printed] == [
        ["2", "x", "2", "25.0%"],
        ["4", "x", "1", "25.0%"],
        ["1", "x", "4", "25.0%"],
    ]


def test_impossible_plans_are_refused() -> None:
    assert refusal(LayoutError, _plan, 17).startswith(
        "The number of ranks must be a product of at most 16 x 16, the positions of the images, but is 17."
    )
    single = replace(H100, flops={"float32": 1.0})
    assert refusal(ConfigError, _plan, 4, single, torch.float64).startswith(
        "The element type of the images must be one of float32 on H100 SXM, but is float64."
    )


EXAMPLE = Path(__file__).parents[2] / "examples" / "unet.py"


@pytest.mark.slow  # it starts processes that import torch
def test_the_example_learns_as_plain_pytorch() -> None:
    command = [sys.executable, str(EXAMPLE), "--size", "16", "--precision", "float64", "--grids", "1x1x2"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert ended.returncode == 0, ended.stderr
    plain, shared = (line.split() for line in ended.stdout.splitlines()[2:4])
    assert shared[9:12] == plain[1:]
    assert shared[5] == shared[6]  # recorded and planned memory
