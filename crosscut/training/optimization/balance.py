"""Sums that the layers return beside the residual stream, over all ranks and micro-batches of a step, and the biases
that follow them.

All sums of a step are one vector, which every rank gets. It holds the terms of the loss and, for each mixture of
experts, the loads of its experts and the entropy of the router. Each rank counts the tokens of its own forward passes,
once, so the vector does not depend on the layout, on the micro-batches or on recomputation.

The bias of an expert rises by a fixed amount if the expert's load is below the mean load, and falls if it is above
(Wang et al. 2024, arXiv 2408.15664, algorithm 1).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from crosscut.architecture import describe
from crosscut.architecture.sublayers.experts import ENTROPY, LOAD
from crosscut.model import GPT
from crosscut.model.sums import LayerSums
from crosscut.parallel.state.parameters import local_offsets, local_part
from crosscut.training.loads.step_loads import StepLoads

Figures = dict[str, Tensor]
"""Scalars on the device by the names under which they are reported."""


class Balance:
    """Sums of a model's layers in a step, and the biases of this rank's experts. `summed` adds up a tensor over all
    ranks that have different layers or different tokens.
    """

    def __init__(self, model: GPT, summed: Callable[[Tensor], Tensor]) -> None:
        self._summed, self._sizes = summed, model.config.experts
        whole = describe(model.config)
        self.terms = [term.name for term in whole.layer_terms]
        self.figures = whole.layer_figures
        self.sums = LayerSums()
        """Sums of this rank's layers in the current step."""
        self.loads: list[Tensor] = []
        """Number of rows of each expert [E] in the last step, on all ranks, for each mixture of experts."""
        self.step_loads: StepLoads | None = None
        """Loads and entropies of the last step; None without experts."""
        # Adapters leave the model as it is, and an exported adapter would lose changed biases.
        self._biases = {
            key: model.get_parameter(f"blocks.{layer}.{part}.router.bias")
            for key in model.part.layer_figures
            for layer, part, name in [key]
            if name == LOAD and self._sizes.balance_bias and not model.config.lora_rank
        }

    def begin(self) -> None:
        """Begin a step: forget the sums of the step before."""
        self.sums = LayerSums()

    @torch.no_grad()
    def update(self, *, held: Tensor) -> Figures:
        """Sum the step's sums over the ranks, and change the biases, unless the scalar `held` is 1. Return the figures
        to report; empty for a model whose layers return no sums.

        Communication: an all-reduce over the ranks that see different tokens, and one over the stages of a pipeline.
        """
        if not self.figures:
            return {}
        missing = [torch.zeros(size, dtype=torch.float64, device=held.device) for size in self.figures.values()]
        own = [self.sums.totals.get(name, held.double() * 0).double().view(1) for name in self.terms]
        own += [self.sums.figures.get(key, zeros).double() for key, zeros in zip(self.figures, missing, strict=True)]
        parts = self._summed(torch.cat(own)).split([*(1 for _ in self.terms), *self.figures.values()])
        of_layers = dict(zip(self.figures, parts[len(self.terms) :], strict=True))
        self.loads = [each for (_, _, name), each in of_layers.items() if name == LOAD]
        for key, bias in self._biases.items():
            self._follow(bias, of_layers[key], applies=1 - held)
        return self._reported(dict(zip(self.terms, parts, strict=False)), of_layers)

    def _follow(self, bias: Tensor, load: Tensor, *, applies: Tensor) -> None:
        """Change this rank's part of a bias by the loads [E] of all experts."""
        own, (first,) = local_part(bias), local_offsets(bias)
        change = torch.sign(load.mean() - load)[first : first + len(own)]
        own.add_(change.to(own.dtype) * (self._sizes.balance_rate * applies).to(own.dtype))

    def _reported(self, terms: dict[str, Tensor], of_layers: dict[tuple[int, str, str], Tensor]) -> Figures:
        """Return the means of the terms and of the entropy over tokens and layers, and the largest load of an expert as
        a multiple of the mean load. Keep the loads and entropies of each layer in `step_loads`.
        """
        loads = torch.stack(self.loads)
        tokens = loads.sum(1, keepdim=True) / self._sizes.per_token
        entropies = torch.stack([each for (_, _, name), each in of_layers.items() if name == ENTROPY]) / tokens
        names = tuple(f"blocks.{layer}.{part}" for layer, part, name in of_layers if name == LOAD)
        self.step_loads = StepLoads(names, torch.cat([loads, entropies], 1))
        told = {name: term.squeeze() / tokens.sum() for name, term in terms.items()}
        largest = (loads.amax(1) / loads.mean(1)).max()
        return {**told, "largest_load": largest, "router_entropy": entropies.mean()}
