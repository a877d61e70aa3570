"""Learning rates of groups of parameters."""

import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config import ConfigError, OptimizerConfig, RunConfig
from crosscut.parallel.state.gradient_norm import clip_factor
from crosscut.training.memory.host_moments import InHostMemory
from crosscut.training.optimization.optimizer import OnDevice, Rules, make_optimizer
from crosscut.training.optimization.schedule import learning_rate
from tests.refusals import refusal
from tests.training.jobs import parts
from tests.training.optimization.test_muon import describe_tiny
from tests.training.test_resume import LAYOUTS, checkpoint_of, record, train

RATES = {"embedding": 0.02, "head": 0.004, "matrix": 0.003, "scalar": 0.05}
OWN = ("model.tied=false", *(f"optimizer.{group}_learning_rate={rate}" for group, rate in RATES.items()))
EXACT = ("model.dropout=0.0", "training.precision=float64", "optimizer.weight_decay=0.0", "optimizer.epsilon=1e-30")


def group_of(name: str, *, tied: bool = False) -> str:
    """The group of a GPT-2's parameter, from its name."""
    if name in ("tokens.weight", "positions.weight"):
        return "embedding"
    if name == "output.weight" and not tied:
        return "head"
    return "scalar" if "norm" in name or name.endswith("bias") else "matrix"


def moves(run: RunConfig) -> dict[str, float]:
    """The largest change of each parameter in the first step of AdamW. Its size is the learning rate: without decay and
    epsilon, the step divides each gradient by its own size.
    """
    trainer, batches = parts(run)
    before = {name: p.detach().full_tensor().clone() for name, p in trainer.model.named_parameters()}
    trainer.step(0, batches.micro_batches(0)).wait()
    after = {name: p.detach().full_tensor() for name, p in trainer.model.named_parameters()}
    return {name: (after[name] - before[name]).abs().max().item() for name in before}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", ["2x2 split zero2", "zero3", "1x1"])
def test_every_group_of_parameters_has_its_own_rate(ranks, run_with, layout):
    run = run_with(*EXACT, *OWN, *LAYOUTS[layout])
    share = learning_rate(0, config=run.optimizer, num_steps=6) / run.optimizer.learning_rate
    for told in ranks.run(run.layout.world_size, moves, run):
        assert {group_of(name) for name in told} == set(RATES)
        for name, size in told.items():
            assert size == pytest.approx(RATES[group_of(name)] * share, rel=1e-6), name


def test_a_tied_vocabulary_has_the_rate_of_the_embedding(ranks, run_with):
    told = ranks.run(1, moves, run_with(*EXACT, "optimizer.embedding_learning_rate=0.02"))[0]
    assert told["tokens.weight"] == pytest.approx(0.02 / 3, rel=1e-6)
    assert told["blocks.0.mlp.expand.weight"] == pytest.approx(1e-3 / 3, rel=1e-6)


def test_moments_in_host_memory_have_the_same_rates(ranks, run_with):
    here, there = (
        ranks.run(2, moves, run_with(*EXACT, *OWN, "layout.tensor=2", *offload))[0]
        for offload in ((), ('training.offload=["optimizer"]',))
    )
    assert here == there


SHORT = ("model.tied=false", "training.steps=3", "training.validate_every=0", "checkpoint.every=2", "checkpoint.keep=9")


def test_a_rate_that_is_the_learning_rate_changes_no_bit_and_a_run_resumes_with_other_rates(ranks, run_with):
    """The rates are no part of a checkpoint."""
    run = run_with(*SHORT)
    plain = ranks.run(1, record, run)[0]["weights"]
    resumed = train(ranks, run_with(*SHORT, *OWN), checkpoint_of(run, 2))[0]
    assert sorted(resumed["losses"]) == [2]
    shutil.rmtree(run.output.folder)
    same = ranks.run(1, record, run_with(*SHORT, *(f"optimizer.{g}_learning_rate=1e-3" for g in RATES)))[0]["weights"]
    assert all(torch.equal(plain[name], same[name]) for name in plain)


def test_a_group_that_the_model_lacks_is_refused(run_with):
    assert refusal(ConfigError, run_with, "optimizer.head_learning_rate=0.004") == (
        "`optimizer.head_learning_rate` must be 0 for a model whose output projection shares the weight of the "
        "embedding, but is 0.004. Set `optimizer.embedding_learning_rate`, or set model.tied=false."
    )


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


def operators_of_update(run: RunConfig) -> set[str]:
    trainer, batches = parts(run)
    loss = trainer.accumulate(0, batches.micro_batches(0))
    with Operators() as seen:
        trainer.update(0, loss)
    return seen.names


def test_clipping_takes_no_pass_of_its_own_over_the_gradients_of_adamw(ranks, run_with):
    for precision, is_apart in (("bfloat16", False), ("float64", True)):  # the kernel divides by a float32 only
        names = ranks.run(1, operators_of_update, run_with(f"training.precision={precision}"))[0]
        assert "aten::_fused_adamw_" in names
        assert ("aten::_foreach_mul_" in names) == is_apart


@pytest.mark.parametrize("home", [OnDevice, InHostMemory])
@pytest.mark.parametrize("has_muon", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_step_clips_as_a_product_with_the_factor_does(dtype, has_muon, home):
    """Also the gradients that it leaves, and a step that is held. Gradients that need no clipping keep every bit."""
    results, equal = [], dtype == torch.float64
    for inside in (False, True):
        torch.manual_seed(1)
        layer = torch.nn.Linear(6, 4).to(dtype)
        (described,) = (p for p in describe_tiny() if p.name == "blocks.0.mlp.expand.weight")
        config = OptimizerConfig(
            learning_rate=0.1, **({"matrices": "muon", "matrix_learning_rate": 0.1} if has_muon else {})
        )
        rules = Rules(undecayed=("bias",), matrices={"weight": described} if has_muon else {})
        optimizer = make_optimizer(layer, config, rules=rules, home=home())
        for norm, held in ((7.3, 0.0), (0.5, 0.0), (float("nan"), 1.0), (3.0, 0.0)):
            gradients = [torch.randn_like(p) * norm for p in layer.parameters()]
            factor = clip_factor(torch.tensor(norm, dtype=torch.float64), 1.0)
            for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone() if inside else gradient * factor.to(dtype)
            optimizer.clip, optimizer.found_inf = factor if inside else None, torch.tensor(held)
            optimizer.step()
            state = [t for s in optimizer.state.values() for t in s.values()]
            kept = [] if held else [p.grad for p in layer.parameters()]
            results.append([t.detach().clone() for t in (*layer.parameters(), *state, *kept)])
            if norm < 1.0:
                assert all(map(torch.equal, kept, gradients))
    for clipped, expected in zip(results[4:], results[:4], strict=True):
        for one, other in zip(clipped, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0 if equal else 3e-6, atol=0.0 if equal else 1e-7)
