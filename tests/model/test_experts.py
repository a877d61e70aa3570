"""Experts against a twin that runs every expert on every token, and against the blocks of transformers."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from crosscut.config import ModelConfig, RunConfig, TrainingConfig
from crosscut.config.parts.experts import ExpertsConfig
from crosscut.kernels import experts as kernel
from crosscut.model import GPT, Batch, initialize
from crosscut.model.sublayers import experts as module
from crosscut.model.sublayers.experts import Experts
from crosscut.parallel import make_mesh
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer
from tests.model.mixers import model_of, saved_and_planned
from tests.model.plain_experts import mixture
from tests.ranks import RankPool

HIDDEN, LENGTH = 16, 9
DEEPSEEK: dict[str, Any] = {
    "number": 12, "per_token": 3, "scores": "sigmoid", "balance_bias": True, "groups": 4, "groups_per_token": 2,
    "scaling": 2.5, "shared_size": 10,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "not renormalised, with a shared MLP": {"renormalise": False, "shared_size": 12, "router_z_loss": 0.001},
    "DeepSeek-V3": {**DEEPSEEK, "router_z_loss": 0.001},
    "DeepSeek-V2": {"groups": 2, "group_top": 1, "renormalise": False, "mlp": "geglu", "scaling": 16.0},
    "Qwen3-Next": {"shared_size": 12, "shared_gate": True},
    "one expert, without a gate": {"per_token": 1, "mlp": "relu2", "shared_size": 8, "shared_gate": True},
    "all experts": {"number": 3, "per_token": 3, "mlp": "gelu"},
    "not balanced": {"balance_loss": 0.0, "mlp": "gelu_exact", "scores": "sigmoid"},
}


def options(of_experts: dict[str, Any]) -> dict[str, Any]:
    sizes = ExpertsConfig(**{"number": 8, "per_token": 2, "size": 12, **of_experts})
    return {"hidden_size": HIDDEN, "layers": ("experts",), "experts": sizes, "biases": "none", "dropout": 0.0}


def experts_of(of_experts: dict[str, Any]) -> tuple[GPT, Experts]:
    gpt = model_of(options(of_experts), torch.float64)
    initialize(gpt, 3)
    experts: Experts = gpt.blocks[0].mlp  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        parameter.data.to_local().add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return gpt, experts


def weights_of(experts: Experts) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor().requires_grad_() for name, p in experts.named_parameters()}


def inputs(offset: float = 0.0) -> Tensor:
    x = torch.randn(3, LENGTH, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return (x + offset).requires_grad_()


def against_the_twin(of_experts: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    _, experts = experts_of(of_experts)
    weights, sizes = weights_of(experts), experts.sizes
    ours, theirs = inputs(), inputs()
    y, sums = experts(ours)
    reference, terms, loads = mixture(sizes, weights, theirs)
    assert sums.figures["load"].tolist() == loads
    assert sums.terms.keys() == experts.terms
    factors = {"balance": 0.7, "router_z": 0.3}
    grad = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    ((y * grad).sum() + sum(factors[name] * term for name, term in sums.terms.items())).backward()
    ((reference * grad).sum() + sum(factors[name] * terms[name] for name in sums.terms)).backward()
    trained = {name: p for name, p in experts.named_parameters() if p.requires_grad}
    assert set(weights) - set(trained) <= {"router.bias"}
    return (
        [y, ours.grad, *sums.terms.values(), *(p.grad.full_tensor() for p in trained.values())],
        [reference, theirs.grad, *(terms[name] for name in sums.terms), *(weights[name].grad for name in trained)],
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_the_mixture_is_that_of_every_expert_on_every_token(ranks: RankPool, name: str) -> None:
    for mine, other in zip(*ranks.run(1, against_the_twin, CASES[name])[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def their_block(name: str) -> nn.Module:
    if name == "Mixtral":
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config = MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=12, num_local_experts=8, num_experts_per_tok=2,
            experts_implementation="eager",
        )  # fmt: skip
        return MixtralSparseMoeBlock(config)
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    qwen: Any = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False,
        experts_implementation="eager",
    )  # fmt: skip
    return Qwen3MoeSparseMoeBlock(qwen)


def against_transformers(name: str) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    theirs = their_block(name).double()
    for parameter in theirs.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    _, experts = experts_of({"renormalise": name == "Mixtral"})
    gate, up = theirs.experts.gate_up_proj.chunk(2, 1)
    named = {"router.weight": theirs.gate.weight, "gate": gate, "up": up, "contract": theirs.experts.down_proj}
    for own, parameter in experts.named_parameters():
        parameter.data.to_local().copy_(named[own].detach())
    ours, other = inputs(), inputs()
    with pytest.MonkeyPatch.context() as patch:  # their softmax is in float32
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        reference = theirs(other)
    y, _ = experts(ours)
    for result in (y, reference):
        result.square().sum().backward()
    gate, up = theirs.experts.gate_up_proj.grad.chunk(2, 1)
    published = {"router.weight": theirs.gate.weight.grad, "gate": gate, "up": up}
    published["contract"] = theirs.experts.down_proj.grad
    gradients = {name: parameter.grad.full_tensor() for name, parameter in experts.named_parameters()}
    return [y, ours.grad, *(gradients[name] for name in published)], [reference, other.grad, *published.values()]


@pytest.mark.parametrize("name", ["Mixtral", pytest.param("Qwen3-MoE", marks=pytest.mark.slow)])
def test_the_block_is_that_of_transformers(ranks: RankPool, name: str) -> None:
    for mine, other in zip(*ranks.run(1, against_transformers, name)[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3", "one expert, without a gate", "not balanced"])
def test_the_planner_counts_saved_values_to_the_byte(ranks: RankPool, name: str, dtype: torch.dtype) -> None:
    saved, planned = ranks.run(1, saved_and_planned, options(CASES[name]), 16, dtype)[0]
    assert saved == planned


def with_two_threads() -> set[bytes]:
    torch.set_num_threads(2)
    try:
        gpt = model_of({**options({"shared_size": 12}), "hidden_size": 64}, torch.float32)
        initialize(gpt, 3)
        found = set()
        for _ in range(20):
            x = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
            y, sums = gpt.blocks[0](x)
            (y.square().sum() + sums.terms["balance"]).backward()
            of_weights = [p.grad.full_tensor() for p in gpt.blocks[0].parameters()]
            found.add(b"".join(t.detach().numpy().tobytes() for t in (y, x.grad, *of_weights)))
            gpt.zero_grad()
        return found
    finally:
        torch.set_num_threads(1)


def test_two_threads_repeat_every_bit(ranks: RankPool) -> None:
    assert len(ranks.run(1, with_two_threads)[0]) == 1


def without_the_others() -> tuple[Tensor, Tensor, list[int]]:
    """Result of one token, and the same if all matrices of the other experts are NaN."""
    _, experts = experts_of({})
    x = inputs()[:1, :1].detach()
    with torch.no_grad():
        whole, _ = experts(x)
        chosen = experts._route(experts.router.logits(x)).loads[0]
        for name in experts.names:
            weight = experts.get_parameter(name).to_local()
            weight[chosen == 0] = torch.nan
        alone, _ = experts(x)
    return whole, alone, chosen.tolist()


def test_a_token_reads_only_its_own_experts(ranks: RankPool) -> None:
    whole, alone, chosen = ranks.run(1, without_the_others)[0]
    assert sorted(chosen) == [0] * 6 + [1] * 2
    assert torch.equal(whole, alone)


def sums_in_inference() -> Any:
    gpt, _ = experts_of({})
    with torch.no_grad():
        return gpt.blocks[0](inputs())[1]


def test_nothing_is_counted_without_gradients(ranks: RankPool) -> None:
    assert ranks.run(1, sums_in_inference)[0] == ({}, {})


def recomputed(mode: str) -> tuple[int, list[Tensor]]:
    """On a rank: number of layers that pass the rows of their experts in turn, loss and gradients of a step."""
    model = ModelConfig(**{**options({"mlp": "swiglu"}), "layers": ("attention experts",), "num_layers": 2,
                           "num_heads": 2, "vocab_size": 64, "max_sequence_length": 16})  # fmt: skip
    training = TrainingConfig(batch_size=2, sequence_length=16, precision="float64", compile="off", recompute=mode)
    run = resolve_on(RunConfig(model=model, training=training), torch.device("cpu"))
    trainer = Trainer(run, make_mesh(run.layout, torch.device("cpu")))
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    with (
        mock.patch.object(kernel, "_LEAST_IN_TURN", 0),
        mock.patch.object(module, "in_turn", side_effect=kernel.in_turn) as in_turn,
    ):
        loss = trainer.accumulate(0, [Batch.from_ids(tokens)])
    return in_turn.call_count, [loss.detach(), *(p.grad.to_local().clone() for p in trainer.parameters)]


def test_recomputed_layers_take_the_same_way_through_large_experts(ranks: RankPool) -> None:
    (plain_calls, plain), (calls, again) = (ranks.run(1, recomputed, mode)[0] for mode in ("none", "full"))
    assert (plain_calls, calls) == (2, 0)
    for mine, other in zip(again, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-15)
