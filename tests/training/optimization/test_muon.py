"""Muon: the update of the whole matrix on every layout, held steps, checkpoints, and momentum in host memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.architecture import describe
from crosscut.config import ModelConfig, OptimizerConfig, RunConfig
from crosscut.parallel.state.parameters import whole
from crosscut.training.memory.host_moments import InHostMemory
from crosscut.training.optimization.muon import orthogonalized
from crosscut.training.optimization.optimizer import Rules, make_optimizer
from tests.training.jobs import parts
from tests.training.pipeline.jobs import LLAMA as TIED_LLAMA
from tests.training.test_resume import LAYOUTS, train

MUON = ('optimizer.matrices="muon"', "optimizer.matrix_learning_rate=0.02", "optimizer.weight_decay=0.1")
LLAMA = (*TIED_LLAMA, "model.tied=false")
EXACT = ("model.dropout=0.0", "training.precision=float64")


def newton_schulz(matrix: Tensor) -> Tensor:
    """The iteration as it is published, in float64: always on the matrix as it stands."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T).T
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def reference(weight: Tensor, update: Tensor, rate: float, decay: float) -> Tensor:
    """The uncut update of one matrix."""
    rows, columns = weight.shape
    return weight * (1 - rate * decay) - rate * max(1, rows / columns) ** 0.5 * newton_schulz(update)


def matrices_of(name: str, tensor: Tensor, run: RunConfig) -> list[Tensor]:
    """The matrices of the model in a parameter: keys and values apart."""
    if "key_value" not in name:
        return [tensor]
    by_head = tensor.view(run.model.num_kv_heads, 2, run.model.head_size, -1)
    return [by_head[:, i].reshape(-1, tensor.shape[1]) for i in range(2)]


def stepped(run: RunConfig) -> dict[str, Any]:
    """Two steps: the matrices' distance from a plain program, given the same gradients, and the weights at the end."""
    trainer, batches = parts(run)
    names = {p.name for p in describe(run.model).parameters() if p.role.group == "matrix"}
    momentum: dict[str, Tensor] = {}
    distance = 0.0
    for step in range(2):
        named = dict(trainer.model.named_parameters())
        before = {name: whole(named[name].detach()).clone() for name in names}
        loss = trainer.accumulate(step, batches.micro_batches(step))
        result = trainer.update(step, loss)
        rate = result.learning_rate * 0.02 / run.optimizer.learning_rate
        for name in sorted(names):
            gradient = whole(named[name].grad)
            momentum[name] = 0.95 * momentum.get(name, torch.zeros_like(gradient)) + 0.05 * gradient
            update = 0.05 * gradient + 0.95 * momentum[name]
            triples = zip(*(matrices_of(name, t, run) for t in (before[name], update)), strict=True)
            expected = [reference(weight, change, rate, 0.1) for weight, change in triples]
            got = matrices_of(name, whole(named[name].detach()), run)
            distance = max(distance, *((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)))
        trainer.optimizer.zero_grad()
    vocabulary = run.model.vocab_size
    weights = {n: whole(p.detach())[: vocabulary if n in ("tokens.weight", "output.weight") else None].clone()
               for n, p in trainer.model.named_parameters()}  # fmt: skip
    return {"distance": distance, "weights": weights}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("model", [LLAMA, ()], ids=["Llama", "GPT-2"])
@pytest.mark.parametrize("layout", ["2x2 split zero2", "zero3", "tensor 2"])
def test_the_update_is_that_of_whole_matrices_on_every_layout(ranks, run_with, once, layout, model):
    run = run_with(*EXACT, *MUON, *model, *LAYOUTS[layout])
    told = ranks.run(run.layout.world_size, stepped, run)
    uncut = once(model, lambda: ranks.run(1, stepped, run_with(*EXACT, *MUON, *model))[0]["weights"])
    for rank in told:
        assert rank["distance"] < 1e-10
        for name, weight in uncut.items():
            assert (weight - rank["weights"][name]).abs().max() < 1e-10, name


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_singular_vectors_stay_and_singular_values_become_about_one(shape):
    torch.manual_seed(1)
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = torch.linspace(1, 20, min(shape), dtype=torch.float64)
    inner = u.T @ orthogonalized(u @ values.diag() @ v) @ v.T
    assert (inner - inner.diag().diag()).abs().max() < 1e-9
    assert 0.5 < inner.diag().min() < inner.diag().max() < 1.3


def test_a_gradient_of_zeros_changes_nothing_but_the_decay():
    assert torch.equal(orthogonalized(torch.zeros(4, 6)), torch.zeros(4, 6))


def one_layer() -> tuple[torch.nn.Linear, Any]:
    torch.manual_seed(1)
    layer = torch.nn.Linear(6, 4)
    config = OptimizerConfig(learning_rate=0.1, matrices="muon", matrix_learning_rate=0.1)
    (described,) = (p for p in describe_tiny() if p.name == "blocks.0.mlp.expand.weight")
    return layer, make_optimizer(layer, config, rules=Rules(undecayed=("bias",), matrices={"weight": described}))


def describe_tiny() -> list[Any]:
    return list(describe(ModelConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=300)).parameters())


def test_a_held_step_changes_neither_weights_nor_momentum():
    layer, optimizer = one_layer()
    optimizer.found_inf = torch.zeros(())
    seen = []
    for held, value in ((0.0, 1.0), (1.0, float("nan")), (1.0, float("inf"))):
        optimizer.found_inf.fill_(held)
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape) * value
        optimizer.step()
        momentum = optimizer.state[layer.weight]["momentum_buffer"]
        seen.append([t.detach().clone() for t in (layer.weight, layer.bias, momentum)])
    for later in seen[1:]:
        assert all(map(torch.equal, seen[0], later))
    assert seen[0][2].abs().max() > 0


def test_a_matrix_has_one_moment_and_all_others_two(ranks, run_with):
    states = ranks.run(1, states_of, run_with(*MUON))[0]
    for name, kept in states.items():
        is_matrix = name.startswith("blocks") and name.endswith("weight") and "norm" not in name
        assert kept == (["momentum_buffer"] if is_matrix else ["exp_avg", "exp_avg_sq", "step"]), name


def states_of(run: RunConfig) -> dict[str, list[str]]:
    trainer, _ = parts(run)
    trainer.optimizer.prepare()
    return {name: sorted(trainer.optimizer.state[p]) for name, p in trainer.model.named_parameters()}


def test_a_loss_scale_holds_steps(ranks, run_with):
    """The scale begins too high: the first steps overflow."""
    short = ("training.steps=5", "training.validate_every=0", "checkpoint.every=0")
    run = run_with(*short, *MUON, "training.precision=float16", "layout.tensor=2")
    told = train(ranks, run)[0]
    assert told["scales"][0] > told["scales"][4]
    assert all(weight.isfinite().all() for weight in told["weights"].values())


def test_momentum_in_host_memory_gives_the_same_bits(ranks, run_with):
    short = ("training.steps=3", "training.validate_every=0", "checkpoint.every=0", *MUON)
    here, there = (train(ranks, run_with(*short, *offload))[0] for offload in ((), ('training.offload=["optimizer"]',)))
    assert all(torch.equal(weight, there["weights"][name]) for name, weight in here["weights"].items())


@pytest.mark.gpu
def test_on_a_gpu_momentum_lies_in_pinned_host_memory_between_steps():
    weight, home = torch.nn.Parameter(torch.zeros(8, 8, device="cuda")), InHostMemory()
    moment = home.new(weight)
    with home.borrowed(moment, weight) as there:
        assert there.is_cuda
        there.add_(1)
    torch.cuda.synchronize()
    assert moment.is_pinned()
    assert bool((moment == 1).all())
