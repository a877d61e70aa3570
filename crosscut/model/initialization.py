"""Draw the initial weights, by default as in the paper's section 4.1.1. Each weight depends only on the seed and the
parameter's name.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from crosscut.architecture import Role, describe
from crosscut.architecture.parameters import ZEROS, Law, Start
from crosscut.config.training import InitialSpread
from crosscut.model.gpt import GPT
from crosscut.parallel import normal_
from crosscut.parallel.random import uniform_
from crosscut.parallel.state.parameters import local_offsets, local_part


def initialize(
    model: GPT, seed: int, *, spread: InitialSpread = InitialSpread.PAPER, zero_outputs: bool = False
) -> None:
    """Set the initial weights by the rules of the model's description (`Parameter.initial`). Matrices and embeddings
    are drawn from a normal distribution. Its standard deviation is 0.02, unless `spread` selects another rule. For
    matrices directly before a residual sum, the deviation is divided by the square root of the number of residual
    sums. With `zero_outputs`, these matrices are zero.

    Biases are zero and norms are the identity. Padding rows of the vocabulary are set to zero, so that they are the
    same on every layout. Call this after `parallel.shard_model`, when the parameters have their final placement.
    """
    decoder = describe(model.config)
    described = {parameter.name: parameter for parameter in decoder.parameters()}
    for name, parameter in model.named_parameters():
        is_zero = zero_outputs and described[name].role is Role.BEFORE_RESIDUAL
        start = ZEROS if is_zero else described[name].initial(decoder.num_residual_sums, spread)
        _fill(parameter, start, seed=seed, name=name)
    zero_padding(model)


@torch.no_grad()
def _fill(parameter: nn.Parameter, start: Start, *, seed: int, name: str) -> None:
    """Set the initial values of a parameter by a rule."""
    if start.law is Law.CONSTANT:
        local_part(parameter).fill_(start.first)
    elif start.law is Law.LOG_INDEX:
        part = local_part(parameter)
        part.copy_(torch.arange(1, part.shape[1] + 1, device=part.device).log())
    elif start.law is Law.NORMAL:
        normal_(parameter, std=start.first, seed=seed, name=name)
    else:
        uniform_(parameter, lambda u: _LAWS[start.law](u, start.first, start.last), seed=seed, name=name)


def _log_uniform(u: Tensor, first: float, last: float) -> Tensor:
    return torch.log(first + (last - first) * u)


def _step_size(u: Tensor, first: float, last: float) -> Tensor:
    size = torch.exp(math.log(first) + (math.log(last) - math.log(first)) * u)
    return size + torch.log(-torch.expm1(-size))


_LAWS: dict[Law, Callable[[Tensor, float, float], Tensor]] = {
    Law.LOG_UNIFORM: _log_uniform,
    Law.STEP_SIZE: _step_size,
}
"""Functions that turn numbers u, uniform between 0 and 1, into initial values between two limits."""


@torch.no_grad()
def zero_padding(model: GPT, parameters: Mapping[str, Tensor] | None = None) -> None:
    """Set the padding rows of the vocabulary to zero in all parameters that have such rows, or in tensors that are
    distributed like parameters, by the names of these.
    """
    weights = dict(model.named_parameters()) if parameters is None else parameters
    for name in weights.keys() & model.padded_rows.keys():
        weight = weights[name]
        local_part(weight)[max(0, model.padded_rows[name] - local_offsets(weight)[0]) :] = 0.0
