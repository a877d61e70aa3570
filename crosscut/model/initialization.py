"""Initial weights as in the paper's section 4.1.1, a function of the seed and each parameter's name."""

import torch

from crosscut.model.gpt import GPT
from crosscut.parallel import normal_
from crosscut.parallel.state.parameters import local_offsets, local_part

STANDARD_DEVIATION = 0.02


def initialize(model: GPT, seed: int) -> None:
    """Fill the weights: N(0, 0.02), those right before a residual further scaled by 1 / sqrt(2 layers).

    Biases stay zero and layer norms the identity. To be called when the parameters are where they stay: after
    `parallel.shard_model`. The vocabulary's padding is zeroed, so that no layout's padding
    differs from another's in what the model computes.
    """
    residual_std = STANDARD_DEVIATION / (2 * model.config.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if _is_matrix(name):
            std = residual_std if _is_before_residual(name) else STANDARD_DEVIATION
            normal_(parameter, std=std, seed=seed, name=name)
    _zero_padding(model)


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name


def _is_before_residual(name: str) -> bool:
    return name.endswith(("attention.output.weight", "mlp.contract.weight"))


@torch.no_grad()
def _zero_padding(model: GPT) -> None:
    parameters = dict(model.named_parameters())
    for name, num_rows in model.padded_rows.items():
        weight = parameters[name]
        local_part(weight)[max(0, num_rows - local_offsets(weight)[0]) :] = 0.0
