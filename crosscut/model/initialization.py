"""Draw the initial weights, by default as in the paper's section 4.1.1. Each weight depends only on the seed and the
parameter's name.
"""

import torch

from crosscut.architecture import Role, describe
from crosscut.config.training import InitialSpread
from crosscut.model.gpt import GPT
from crosscut.parallel import normal_
from crosscut.parallel.state.parameters import local_offsets, local_part


def initialize(
    model: GPT, seed: int, *, spread: InitialSpread = InitialSpread.PAPER, zero_outputs: bool = False
) -> None:
    """Draw the weights of matrices and embeddings from a normal distribution. Its standard deviation is 0.02, unless
    `spread` selects another rule. For matrices directly before a residual sum, the deviation is divided by the
    square root of the number of residual sums. With `zero_outputs`, these matrices stay zero.

    Biases stay zero and norms stay the identity. Padding rows of the vocabulary are set to zero, so that they are the
    same on every layout. Call this after `parallel.shard_model`, when the parameters have their final placement.
    """
    decoder = describe(model.config)
    described = {parameter.name: parameter for parameter in decoder.parameters()}
    for name, parameter in model.named_parameters():
        is_zero = zero_outputs and described[name].role is Role.BEFORE_RESIDUAL
        deviation = described[name].initial_spread(decoder.num_residual_sums, spread)
        if deviation and not is_zero:
            normal_(parameter, std=deviation, seed=seed, name=name)
    zero_padding(model)


@torch.no_grad()
def zero_padding(model: GPT) -> None:
    """Set the padding rows of the vocabulary to zero in all parameters that have such rows."""
    parameters = dict(model.named_parameters())
    for name, num_rows in model.padded_rows.items():
        weight = parameters[name]
        local_part(weight)[max(0, num_rows - local_offsets(weight)[0]) :] = 0.0
