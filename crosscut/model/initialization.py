"""Initial weights as in the paper's section 4.1.1. Each weight depends only on the seed and the parameter's name."""

import torch

from crosscut.architecture import describe
from crosscut.model.gpt import GPT
from crosscut.parallel import normal_
from crosscut.parallel.state.parameters import local_offsets, local_part


def initialize(model: GPT, seed: int) -> None:
    """Draw the weights of matrices and embeddings from a normal distribution with standard deviation 0.02. Matrices
    directly before a residual sum get a standard deviation of 0.02 / sqrt(2 * number of layers).

    Biases stay zero and norms stay the identity. Padding rows of the vocabulary are set to zero, so that they are the
    same on every layout. Call this after `parallel.shard_model`, when the parameters have their final placement.
    """
    roles = {described.name: described.role for described in describe(model.config).parameters()}
    for name, parameter in model.named_parameters():
        if spread := roles[name].initial_spread(model.config.num_layers):
            normal_(parameter, std=spread, seed=seed, name=name)
    _zero_padding(model)


@torch.no_grad()
def _zero_padding(model: GPT) -> None:
    parameters = dict(model.named_parameters())
    for name, num_rows in model.padded_rows.items():
        weight = parameters[name]
        local_part(weight)[max(0, num_rows - local_offsets(weight)[0]) :] = 0.0
