"""A model with low-rank adapters against the plain model with the merged weights, on many layouts."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.architecture import describe
from crosscut.config import Layout, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from crosscut.model import GPT
from crosscut.parallel import disturb_, make_mesh
from crosscut.parallel.state.parameters import whole
from crosscut.training.optimization.optimizer import MOMENTS
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer
from tests.model.twins import CPU, FAMILIES, PlainGPT, batch, reordered
from tests.ranks import RankPool

RANK = 3
ADAPTED = {
    name: dataclasses.replace(FAMILIES[name], lora_rank=RANK, lora_alpha=4.5)
    for name in ("GPT-2", "Llama grouped-query", "Llama multi-query")
}
LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4, sequence_parallel=True),
    Layout(tensor=2, data=2),
    Layout(tensor=2, data=2, sharding="zero2", sequence_parallel=True),
    Layout(data=2, sharding="zero3"),
]


def trainer(config: ModelConfig, layout: Layout, **training: Any) -> Trainer:
    """On a rank: a trainer whose adapters are not zero."""
    options = {"batch_size": 4, "sequence_length": 16, "precision": "float64", "compile": "off", "steps": 9, **training}
    run = RunConfig(
        model=config,
        layout=layout,
        training=TrainingConfig(**options),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, clip_norm=0.05),
    )
    made = Trainer(resolve_on(run, CPU), make_mesh(layout, CPU))
    for name, parameter in made.model.named_parameters():
        if parameter.dim() == 1 or name.endswith("adapter.up"):
            disturb_(parameter, std=0.1, seed=7, name=name)
    return made


def wholes(model: GPT) -> dict[str, Tensor]:
    return {name: whole(p.detach())[: model.padded_rows.get(name)].clone() for name, p in model.named_parameters()}


def trained(
    config: ModelConfig, layout: Layout, num_steps: int, training: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """On a rank: gradients of the first step, and the losses, norms and weights of some steps."""
    made = trainer(config, layout, **training)
    before, told = wholes(made.model), []
    gradients: dict[str, Tensor] = {}
    for step in range(num_steps):
        data = made.mesh.data
        own = batch(step).chunk(data.size)[data.rank]
        loss = made.accumulate(step, own.chunk(made.run.config.num_micro_batches))
        if step == 0:
            gradients = {name: whole(p.grad).clone() for name, p in made.model.named_parameters() if p.grad is not None}
        result = made.update(step, loss)
        told.append((result.loss, result.gradient_norm))
        made.optimizer.zero_grad()
    state = {name for name, p in made.model.named_parameters() if p in made.optimizer.state}
    assert all(set(MOMENTS) <= made.optimizer.state[p].keys() for p in made.parameters)
    return {"told": told, "gradients": gradients, "before": before, "after": wholes(made.model), "state": state}


def merged(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the model without adapters, by the equation W + alpha / r U D."""
    plain = {name: tensor for name, tensor in weights.items() if ".adapter." not in name}
    for name in plain:
        prefix = name.removesuffix("weight") + "adapter."
        if f"{prefix}up" in weights:
            down, up = weights[f"{prefix}down"].unflatten(0, (-1, RANK)), weights[f"{prefix}up"]
            of_row = torch.arange(len(up)) // config.head_size % len(down)
            plain[name] = plain[name] + config.lora_alpha / RANK * torch.einsum("or,ori->oi", up, down[of_row])
    return plain


class PlainLoss(torch.nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = PlainGPT(config).double()

    def forward(self) -> Tensor:
        return self.model.loss(batch(0))


def loss_of(config: ModelConfig, weights: dict[str, Tensor]) -> Tensor:
    """Loss of the plain model with the merged weights, as a function of the adapters."""
    values = {f"model.{name}": reordered(name, each, config) for name, each in merged(config, weights).items()}
    if config.tied:
        values["model.output.weight"] = values["model.tokens.weight"]
    return torch.func.functional_call(PlainLoss(config), values, ())


@pytest.mark.parametrize("family", ADAPTED)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.one_in(5)
def test_loss_and_gradients_are_those_of_the_merged_model(ranks: RankPool, layout: Layout, family: str) -> None:
    config = ADAPTED[family]
    for found in ranks.run(layout.world_size, trained, config, layout, 1):
        leaves = {name: t.requires_grad_(".adapter." in name) for name, t in found["before"].items()}
        loss = loss_of(config, leaves)
        loss.backward()
        assert found["told"][0][0] == pytest.approx(loss.item(), rel=1e-12)
        adapters = {name for name in leaves if ".adapter." in name}
        assert found["gradients"].keys() == found["state"] == adapters
        for name in adapters:
            torch.testing.assert_close(found["gradients"][name], leaves[name].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("layout", "training"),
    [
        (Layout(tensor=2), {"recompute": "operators", "micro_batch_size": 2}),
        (Layout(tensor=4), {}),
        (Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True), {"recompute": "full"}),
    ],
    ids=str,
)
def test_every_layout_trains_the_same_adapters(ranks: RankPool, layout: Layout, training: dict[str, Any]) -> None:
    config = ADAPTED["Llama grouped-query"]
    (alone,) = ranks.run(1, trained, config, Layout(), 3)
    found = ranks.run(layout.world_size, trained, config, layout, 3, training)[0]
    for ours, theirs in zip(found["told"], alone["told"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    for name, tensor in found["after"].items():
        torch.testing.assert_close(tensor, alone["after"][name], rtol=1e-8, atol=1e-10)
        is_same = torch.equal(tensor, found["before"][name])
        assert is_same == (".adapter." not in name), name
    losses = [loss for loss, _ in found["told"]]
    assert losses[-1] != losses[0]


def test_everything_but_the_adapters_is_frozen() -> None:
    for config in ADAPTED.values():
        frozen = {p.name for p in describe(config).parameters() if p.is_frozen}
        assert frozen == {p.name for p in describe(config.without_adapters).parameters()}
        assert not any(p.is_frozen for p in describe(config.without_adapters).parameters())
