"""Faults of mixtures of experts. `mutations` says how a fault is planted."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.model import block
from crosscut.model.sublayers import experts
from crosscut.model.sublayers.experts import Experts, Router
from crosscut.model.sums import Sums
from crosscut.parallel.owners import experts as exchange
from crosscut.parallel.owners.experts import RowExchange
from crosscut.parallel.state.parameters import local
from crosscut.training.memory.recomputation import Recomputed
from crosscut.training.optimization.balance import Balance
from tests.verification.mutations import DATA, SPLIT, STAGES, TENSOR, Patch, fault, instead_of

MIXTURE: dict[str, Any] = {
    "layers": ("attention experts",),
    "biases": "none",
    "experts": {"number": 8, "per_token": 2, "size": 24, "shared_size": 16, "router_z_loss": 0.01},
}
BIASED: dict[str, Any] = {**MIXTURE, "experts": {**MIXTURE["experts"], "balance_bias": True, "balance_loss": 0.0}}
EXPERTS = Layout(data=2, expert=2)
SHARED = Layout(context=2)
OF_SHARED: dict[str, Any] = {**MIXTURE, "dropout": 0.0, "max_sequence_length": 32}
AGAIN: dict[str, Any] = {**MIXTURE, "training": {"recompute": "full"}}


@fault("the loss that balances experts counts once per tensor rank", "blocks.1.mlp", TENSOR, **MIXTURE)
def balance_per_rank(patch: Patch) -> None:
    patch.setattr(experts, "counted_once", lambda x, _axis: x)


@fault("loads of a context rank's own tokens", "loss", SHARED, **OF_SHARED)
@instead_of(experts, "all_reduce")
def own_loads(sum_over: Any, x: Tensor, axis: Any) -> Tensor:
    return x * axis.size + 0 * sum_over(x, axis)


@fault("results of experts come back to other tokens", "blocks.0.mlp", TENSOR, **MIXTURE)
@instead_of(Experts, "_multiply")
def other_tokens(multiply: Any, self: Experts, *arguments: Any) -> Tensor:
    rows: Tensor = multiply(self, *arguments)
    return rows.roll(1, 0) if self.mesh.tensor.size > 1 else rows


@fault("the weights of a token's experts are not renormalised", "blocks.0.mlp", SPLIT, **MIXTURE)
@instead_of(Experts, "_route")
def not_renormalised(route: Any, self: Experts, logits: Tensor) -> Any:
    if self.mesh.tensor.size > 1:
        self.sizes = replace(self.sizes, renormalise=False)
    return route(self, logits)


@fault("the router's gradient is that of a rank's own columns", "blocks.1.mlp.router", TENSOR, **MIXTURE)
def own_gradient_of_router(patch: Patch) -> None:
    patch.setattr(experts, "local_inside", local)


@fault("the shared MLP counts once per tensor rank", "blocks.0.mlp", TENSOR, **MIXTURE)
@instead_of(Experts, "_of_shared")
def shared_per_rank(of_shared: Any, self: Experts, *arguments: Any) -> Tensor:
    y: Tensor = of_shared(self, *arguments)
    return y * self.mesh.tensor.size


@fault("biases follow the loads of a data rank", "loads of experts", DATA, **BIASED)
@instead_of(Balance, "update")
def own_biases(update: Any, self: Balance, *arguments: Any, **others: Any) -> Any:
    summed = self._summed
    self._summed = lambda x: x + 0 * summed(x)
    return update(self, *arguments, **others)


@fault("recomputation counts the loads of experts again", "loads of experts", TENSOR, **AGAIN)
@instead_of(block.Block, "forward")
def counted_again(forward: Any, self: block.Block, *arguments: Any) -> tuple[Tensor, Sums]:
    y, sums = forward(self, *arguments)
    times = 2 if isinstance(self.runner.layer, Recomputed) else 1
    return y, sums._replace(figures={name: times * each for name, each in sums.figures.items()})


@fault("a stage forgets the loss that balances its experts", "blocks.0.mlp", STAGES, **MIXTURE)
@instead_of(Experts, "_sums")
def forgotten_balance(sums_of: Any, self: Experts, *arguments: Any) -> Sums:
    sums: Sums = sums_of(self, *arguments)
    if self.mesh.pipeline.size == 1 or self.mesh.pipeline.rank:
        return sums
    return sums._replace(terms={name: each.detach() + 0 * each for name, each in sums.terms.items()})


@fault("each tensor rank chooses experts by noise of its own", "blocks.0.mlp", TENSOR, **MIXTURE)
@instead_of(Router, "biased")
def own_choice(biased: Any, self: Router, scores: Tensor) -> Tensor:
    plain: Tensor = biased(self, scores)
    axis = self.weight.device_mesh  # type: ignore[operator, union-attr]
    return plain.roll(axis.get_local_rank(), -1) if axis.size() > 1 else plain


@fault("results of experts on other ranks stay in the order of the experts", "blocks.0.mlp", EXPERTS, **MIXTURE)
@instead_of(exchange, "_back")
def order_of_experts(back: Any, rows: Tensor, plan: RowExchange) -> Tensor:
    return back(rows, plan._replace(places=torch.arange(len(plan.places))))


@fault("gradients of rows do not come back from other ranks", "blocks.1.mlp", EXPERTS, **MIXTURE)
@instead_of(exchange._Sent, "backward")
def gradients_stay(backward: Any, ctx: Any, grad: Tensor) -> Any:
    rows, none = backward(ctx, grad)
    own = torch.zeros_like(rows)
    first = sum(ctx.exchange.to[: ctx.exchange.axis.rank])
    mine = slice(first, first + ctx.exchange.to[ctx.exchange.axis.rank])
    own[mine] = rows[mine]
    return own, none
