"""Moments in host memory: the same numbers and the same checkpoints as on the device, in pieces."""

from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.config import OptimizerConfig
from crosscut.training.memory.host_moments import InHostMemory, cut_in_pieces
from crosscut.training.optimization.optimizer import AdamCall, LocalAdamW, OnDevice, Rules, make_optimizer
from tests.training.jobs import are_equal, loop, parts

OFFLOAD = 'training.offload=["optimizer"]'
LAYOUTS = {"zero2": ("layout.data=2", 'layout.sharding="zero2"'), "tensor 2": ("layout.tensor=2",), "one rank": ()}


def test_a_rank_that_holds_nothing_has_no_pieces():
    """The last data ranks of a sharded model may hold only empty parts."""
    nothing = [torch.zeros(0, 3, device="meta")]
    assert list(InHostMemory().pieces(AdamCall(nothing, nothing, nothing, nothing, []))) == []


@pytest.mark.parametrize(
    ("sizes", "piece", "pieces"),
    [
        ([], 4096, []),
        ([0, 5, 0], 4096, [[(1, 0, 5)]]),
        ([4096, 1], 4096, [[(0, 0, 4096)], [(1, 0, 1)]]),
        ([100, 9000], 4096, [[(0, 0, 100), (1, 0, 3072)], [(1, 3072, 7168)], [(1, 7168, 9000)]]),
        ([4000, 300], 4096, [[(0, 0, 4000)], [(1, 0, 300)]]),
        ([1000, 96, 3000], 4096, [[(0, 0, 1000), (1, 0, 96), (2, 0, 3000)]]),
    ],
)
def test_pieces_hold_everything_once_and_are_cut_where_vectors_begin(sizes, piece, pieces):
    assert [[tuple(part) for part in of] for of in cut_in_pieces(sizes, piece)] == pieces


def test_no_piece_is_larger_than_asked():
    sizes = [50_257 * 3, 7, 0, 1_000_000, 4097]
    pieces = cut_in_pieces(sizes, 1 << 14)
    assert max(sum(last - first for _, first, last in piece) for piece in pieces) <= 1 << 14
    held = [sum(last - first for piece in pieces for entry, first, last in piece if entry == i) for i in range(5)]
    assert held == sizes


def updated(home: Any, device: str = "cpu") -> list[torch.Tensor]:
    """Parameters and moments after three steps of a layer of awkward sizes, the second of them held."""
    torch.manual_seed(1)
    layer = torch.nn.Sequential(torch.nn.Linear(77, 131), torch.nn.Linear(131, 3)).to(device)
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.1)
    optimizer = make_optimizer(layer, config, rules=Rules(undecayed=("0.bias", "1.bias")), home=home)
    optimizer.found_inf = torch.zeros((), device=device)
    for held in (0.0, 1.0, 0.0):
        optimizer.found_inf.fill_(held)
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape).to(device)
        optimizer.step()
    states = [optimizer.state[p] for p in layer.parameters()]
    moments = [state[name].cpu() for state in states for name in ("step", "exp_avg", "exp_avg_sq")]
    return [p.detach().cpu() for p in layer.parameters()] + moments


def test_numbers_are_those_of_pytorchs_adamw_bit_for_bit():
    here, away = updated(OnDevice()), updated(InHostMemory(piece_elements=2048))
    assert are_equal(here, away)
    torch.manual_seed(1)
    layer = torch.nn.Sequential(torch.nn.Linear(77, 131), torch.nn.Linear(131, 3))
    groups = [
        {"params": [p for p in layer.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in layer.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.1, fused=True)
    for held in (False, True, False):
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape)
        if not held:
            theirs.step()
    for one, other in zip(here, (p.detach() for p in layer.parameters()), strict=False):
        assert torch.equal(one, other)


class Watched(InHostMemory):
    """Notes how many elements of a moment are on the device at once."""

    def __init__(self) -> None:
        super().__init__(piece_elements=1 << 15)
        self.largest = 0

    def pieces(self, whole: AdamCall) -> Any:
        for piece in super().pieces(whole):
            self.largest = max(self.largest, sum(moment.numel() for moment in piece.averages))
            yield piece


def steps_in_pieces(run: Any, watched: bool) -> tuple[list[torch.Tensor], int]:
    trainer, batches = parts(run)
    home = Watched() if watched else OnDevice()
    trainer.optimizer = LocalAdamW(trainer.optimizer.param_groups, run.optimizer, home=home)
    for step in range(3):
        trainer.step(step, batches.micro_batches(step)).wait()
    state = [trainer.optimizer.state[p] for p in trainer.parameters]
    tensors = [*trainer.parameters, *(s[name] for s in state for name in ("exp_avg", "exp_avg_sq"))]
    return [t.detach().to_local() for t in tensors], home.largest if isinstance(home, Watched) else 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_model_trains_bit_for_bit_alike_in_pieces(ranks, run_with, options):
    run = run_with(*options)
    here = ranks.run(run.layout.world_size, steps_in_pieces, run, False)
    away = ranks.run(run.layout.world_size, steps_in_pieces, run, True)
    for (ours, _), (theirs, largest) in zip(here, away, strict=True):
        assert 0 < largest <= 1 << 15
        assert are_equal(ours, theirs)


def test_checkpoints_are_those_of_runs_without(ranks, run_with):
    """Each run resumes from the checkpoint of the other."""
    plain = run_with("training.validate_every=0", "checkpoint.keep=5")
    away = run_with(
        "training.validate_every=0", "checkpoint.keep=5", OFFLOAD, f"output.folder={plain.output.folder}-away"
    )
    whole = [ranks.run(1, loop, run)[0] for run in (plain, away)]
    saved = [Path(run.checkpoints_folder) / "step-00000003" for run in (away, plain)]
    again = [ranks.run(1, loop, run, place)[0] for run, place in zip((plain, away), saved, strict=True)]
    for name, weight in whole[0]["weights"].items():
        assert all(torch.equal(weight, other["weights"][name]) for other in (whole[1], *again)), name


def test_run_without_offload_keeps_moments_on_the_device(ranks, run_with):
    assert ranks.run(1, home_of, run_with()) == ["OnDevice"]
    assert ranks.run(1, home_of, run_with(OFFLOAD)) == ["InHostMemory"]


def home_of(run: Any) -> str:
    return type(parts(run)[0].optimizer.home).__name__


@pytest.mark.gpu
def test_on_a_gpu_moments_lie_in_pinned_host_memory_and_give_the_same_numbers():
    assert are_equal(updated(OnDevice(), "cuda"), updated(InHostMemory(2048), "cuda"))
    weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    home = InHostMemory(1 << 16)
    moment = home.new(weight)
    assert moment.is_pinned()
    assert home.keep(moment, weight) is moment
    optimizer = make_optimizer(torch.nn.ParameterList([weight]), OptimizerConfig(), home=home)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 4 * (1 << 16) * 4 + (1 << 16)
