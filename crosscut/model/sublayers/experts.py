"""Mixture of experts, with each expert's columns split over the tensor ranks (Shazeer et al. 2017, arXiv 1701.06538).

A router chooses K of E experts for each token. No token is dropped: the rows of all tokens are sorted by expert, and
each expert multiplies its own rows, however many there are. All tensor ranks have the same tokens and choose alike.

Balance does not depend on the layout. The loss looks at whole sequences, whose loads are summed over the context ranks
(DeepSeek-AI 2024, arXiv 2412.19437, equations 17 to 20; for a single sequence, the loss of Fedus et al. 2021, arXiv
2101.03961, divided by K). The bias follows the loads of all ranks and micro-batches once per step
(`training.balance`).

Shapes: B batch, S sequence, H hidden, F width of an expert, E experts, K experts of a token, N = B S K rows, T tensor
ranks.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crosscut.architecture import Parameter
from crosscut.architecture.sublayers import experts as architecture
from crosscut.architecture.sublayers.experts import BALANCE, ENTROPY, LOAD, ROUTER_Z
from crosscut.architecture.sublayers.gated_mlp import GatedMLP as GatedPart
from crosscut.config.parts.experts import ExpertsConfig, Scores
from crosscut.config.parts.kinds import FeedForward
from crosscut.kernels.experts import (
    Places,
    collect,
    in_turn,
    multiply_groups,
    sort_by_expert,
    spread,
    takes_turns,
    weigh,
    wide_linear,
)
from crosscut.kernels.functions import call
from crosscut.model.building import Builder
from crosscut.model.sublayers.gated_mlp import GATES, GatedMLP
from crosscut.model.sublayers.mlp import ACTIVATIONS, MLP
from crosscut.model.sums import NO_SUMS, Sums
from crosscut.parallel import enter_tensor_parallel, leave_tensor_parallel
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.linear import is_recomputing
from crosscut.parallel.operators import SEQUENCE_DIM, counted_once, part_of_sequence
from crosscut.parallel.owners.experts import plan_exchange, return_rows, send_rows
from crosscut.parallel.state.parameters import ParameterMaker, local, local_inside


class Routing(NamedTuple):
    """Experts of all tokens."""

    scores: Tensor
    """Score of each token for each expert [B, S, E]."""
    weights: Tensor
    """Weight of each of a token's experts [B S, K]."""
    loads: Tensor
    """Number of rows of each expert in each sequence [B, E], as integers."""
    places: Places


class Experts(nn.Module):
    """Mixture of experts. Maps [B, S, H] to [B, S, H] or, under sequence parallelism, [B, S/T, H] to [B, S/T, H]."""

    def __init__(self, part: architecture.Experts, build: Builder) -> None:
        super().__init__()
        self.sizes, self.mesh, self.runner = part.sizes, build.mesh, build.runner
        self.terms = {term.name for term in part.terms}
        self.router = Router(part.router, part.bias, build)
        make = ParameterMaker(build.mesh, build.dtype)
        self.names = [_own_name(weight) for weight in (*part.expand, part.contract)]
        """Names of the experts' matrices, in the order of their use."""
        for weight in (*part.expand, part.contract):
            dim = weight.dim_cut(build.mesh.tensor.size)
            assert dim is not None
            self.register_parameter(_own_name(weight), make.stacked(*weight.shape, dim=dim))
        self.activate = GATES[part.sizes.mlp] if part.sizes.mlp in GATES else ACTIVATIONS[part.sizes.mlp]
        self.shared: MLP | GatedMLP | None = None
        if part.shared is not None:
            self.shared = (
                GatedMLP(part.shared, build) if isinstance(part.shared, GatedPart) else MLP(part.shared, build)
            )
        self.shared_gate = None if part.shared_gate is None else Router(part.shared_gate, None, build)

    def forward(self, x: Tensor, *_others: object) -> tuple[Tensor, Sums]:
        """Return the weighted sum of the results of each token's experts, and the sums beside it."""
        entered = enter_tensor_parallel(x, self.mesh)
        logits = self.router.logits(entered)
        routing = self._route(logits)
        sums = self._sums(logits, routing)
        counts, num_rows = routing.loads.sum(0), len(routing.places.slots)
        exchange = plan_exchange(counts, num_rows, self.mesh.expert, is_traced=self._is_traced)
        rows = send_rows(spread(entered.flatten(0, 1), routing.places), exchange)
        weights = send_rows(routing.weights.flatten().index_select(0, routing.places.slots), exchange)
        ends = routing.places.ends if exchange is None else exchange.ends
        rows = return_rows(self._multiply(rows, weights, ends), exchange, skips=self._skips_now)
        y = collect(rows, routing.places, routing.weights.shape[0]).view_as(entered)
        if self.shared is not None:
            y = y + self._of_shared(self.shared, entered)
        return self._left(y), sums

    def _left(self, y: Tensor) -> Tensor:
        """Leave the parallel region. A repetition whose result no code reads sends nothing."""
        return part_of_sequence(y, self.mesh, SEQUENCE_DIM) if self._skips_now else leave_tensor_parallel(y, self.mesh)

    @property
    def _is_traced(self) -> bool:
        return self.runner.compiler is not None and not self.runner.compiler.is_paused

    @property
    def _skips_now(self) -> bool:
        return self.runner.skips_last_product and is_recomputing()

    def _multiply(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Pass the rows [N, H] through their experts, and multiply the results by the rows' weights [N]: [N, H], a
        summand on each tensor rank. `ends` is the index after the last row of each of this rank's experts.
        """
        dtype = rows.dtype
        own = [local(getattr(self, name), dtype) for name in self.names]
        is_plain = self.runner.compiler is None and self.runner.cheap is call and not self.runner.skips_last_product
        is_plain &= self.sizes.mlp is not FeedForward.GELU  # whose kernel, and so its bits, depends on the rows
        if is_plain and takes_turns(rows, weights, own[0]):
            return in_turn(self.activate, rows, weights, ends, *own)
        inner = [multiply_groups(rows, weight, ends) for weight in own[:-1]]
        activated = self.runner.cheap(partial(weigh, self.activate), weights, *inner)
        return multiply_groups(activated, own[-1], ends, skips=self._skips_now)

    def _of_shared(self, shared: MLP | GatedMLP, entered: Tensor) -> Tensor:
        """Pass all tokens through the shared MLP: a summand on each tensor rank."""
        if self.shared_gate is None:
            return shared.inside(entered)
        return shared.inside(entered, self.shared_gate.logits(entered).sigmoid().squeeze(-1))

    def _route(self, logits: Tensor) -> Routing:
        """Choose the experts of each token, given the logits [B, S, E]."""
        sizes = self.sizes
        scores = logits.softmax(-1) if sizes.scores is Scores.SOFTMAX else logits.sigmoid()
        with torch.no_grad():
            chosen = choose(self.router.biased(scores.detach()), sizes)
            sequences = torch.arange(len(chosen), device=chosen.device).view(-1, 1, 1) * sizes.number
            slots = (chosen + sequences).flatten()
            loads = torch.zeros(len(chosen) * sizes.number, dtype=slots.dtype, device=slots.device)
            loads = loads.index_add(0, slots, torch.ones_like(slots)).view(-1, sizes.number)
            places = sort_by_expert(chosen.flatten(0, 1), loads.sum(0))
        weights = scores.gather(-1, chosen)
        if sizes.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        weights = weights if sizes.scaling == 1.0 else weights * sizes.scaling
        return Routing(scores, weights.flatten(0, 1), loads, places)

    def _sums(self, logits: Tensor, routing: Routing) -> Sums:
        """Return the terms of the loss and the figures of a forward pass; empty if gradients are off."""
        if not torch.is_grad_enabled():
            return NO_SUMS
        shares = routing.scores
        if self.sizes.scores is Scores.SIGMOID and BALANCE in self.terms:
            shares = shares / (shares.sum(-1, keepdim=True) + _TINY)
        terms = {}
        if BALANCE in self.terms:
            terms[BALANCE] = self._balance(shares, routing.loads)
        if ROUTER_Z in self.terms:
            terms[ROUTER_Z] = logits.logsumexp(-1).square().sum()
        with torch.no_grad():
            normal = shares.detach() / shares.detach().sum(-1, keepdim=True)
            entropy = torch.special.entr(normal).sum().view(1)
            figures = {LOAD: routing.loads.sum(0).to(entropy.dtype), ENTROPY: entropy}
        return Sums({name: counted_once(term, self.mesh.tensor) for name, term in terms.items()}, figures)

    def _balance(self, shares: Tensor, loads: Tensor) -> Tensor:
        """Return the loss that balances the loads: for each sequence, the sum over the experts of E / K x load x mean
        share of the score, times the number of tokens. Loads are fractions of the sequence's rows.

        `shares` [B, S, E] are the scores, normalised over the experts, and `loads` [B, E] numbers of rows. The result
        is the part of this rank's tokens. Communication: an all-reduce of the loads over the context ranks.
        """
        whole = all_reduce(loads.to(shares.dtype), self.mesh.context)
        tokens = shares.shape[1] * self.mesh.context.size
        fractions = whole * (self.sizes.number / (self.sizes.per_token * tokens))
        return (fractions * shares.sum(1)).sum()


_TINY = 1e-20
"""Number that keeps a sum of scores above zero, as in DeepSeek-V3."""


class Router(nn.Module):
    """Product with a weight [O, H] that every rank holds whole, in float32 or wider, inside a parallel region: [B, S,
    H] to [B, S, O]. Each rank's gradient of the weight is partial.
    """

    def __init__(self, weight: Parameter, bias: Parameter | None, build: Builder) -> None:
        super().__init__()
        make = ParameterMaker(build.mesh, build.dtype).wide
        self.weight = make.replicated(*weight.shape)
        self.bias = None if bias is None else make.replicated(*bias.shape)
        self.offset: Tensor | None = None
        """Number that is added to each expert's score for the choice [E], to force a routing in a test; usually
        None."""

    def logits(self, x: Tensor) -> Tensor:
        """Compute the product. Sends nothing."""
        return wide_linear(x, local_inside(self.weight, torch.promote_types(x.dtype, torch.float32)))

    def biased(self, scores: Tensor) -> Tensor:
        """Return the scores [..., E] by which experts are chosen."""
        biased = scores if self.bias is None else scores + local(self.bias, scores.dtype)
        return biased if self.offset is None else biased + self.offset.to(scores)


def choose(scores: Tensor, sizes: ExpertsConfig) -> Tensor:
    """Return the experts with the highest scores [..., E] of each token, highest first: [..., K]. With groups, only
    experts of the groups with the highest scores count.
    """
    if sizes.groups > 1:
        grouped = scores.unflatten(-1, (sizes.groups, -1))
        best = grouped.topk(sizes.group_top, -1).values.sum(-1).topk(sizes.groups_per_token, -1).indices
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        scores = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.topk(sizes.per_token, -1).indices


def _own_name(parameter: Parameter) -> str:
    return parameter.name.rpartition(".")[2]
