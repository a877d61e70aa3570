"""Count of the floating-point operations of a token and of a step.

Only matrix products are counted, a multiplication and an addition as two. Forward, a sequence of `S` tokens takes
24 S H^2 + 4 S^2 H in each layer and 2 S H V in the output projection. (That is GPT-2; grouped heads of keys and
values, a gated MLP or other widths put their own sizes in the place of the 12 H^2 weights of a layer.) Backward takes
twice that, once for the gradient of the input and once for that of the weights. Recomputation runs every layer's
forward pass a second time, but not the output projection's. These are the terms of Narayanan et al. 2021
(arXiv 2104.04473):

    without recomputation   72 B S L H^2 (1 + S / 6H + V / 12LH)
    with recomputation      96 B S L H^2 (1 + S / 6H + V / 16LH)

Attention is counted over the full S x S square, not its causal half, and the vocabulary without its padding, so that
the count depends on the model alone and not on a kernel or a layout.
"""

from crosscut.config import ModelConfig
from crosscut.config.checks import require_at_least
from crosscut.planner.activations import num_recomputed_layers
from crosscut.planner.candidate import Planned
from crosscut.planner.parameters import known_vocab_size


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one token's forward pass in a sequence of `sequence_length` tokens.

    Raises `ConfigError` for a sequence length below 1 or where `model.vocab_size` is still 0.
    """
    return _layers(model, sequence_length) + _output_projection(model)


def model_flops_per_token(model: ModelConfig, sequence_length: int, *, recompute: bool = False) -> int:
    """FLOPs of one token's forward and backward pass in a sequence of `sequence_length` tokens.

    Without `recompute` these are the model's FLOPs, by which utilisation is reported; with it, what the hardware
    computes when every layer's activations are recomputed in the backward pass (paper, section 4.1.1). Raises
    `ConfigError` for a sequence length below 1 or where `model.vocab_size` is still 0.
    """
    layer_passes = 4 if recompute else 3
    return layer_passes * _layers(model, sequence_length) + 3 * _output_projection(model)


def flops_per_step(run: Planned, *, recompute: bool = False) -> int:
    """FLOPs of one optimizer step over all ranks: `model_flops_per_token` for every token of the batch.

    With `recompute`, the published count of a run that recomputes every layer whole; what such a run of Crosscut's
    repeats is `recomputed_flops_per_step`.
    """
    tokens = run.training.batch_size * run.training.sequence_length
    return tokens * model_flops_per_token(run.model, run.training.sequence_length, recompute=recompute)


def recomputed_flops_per_step(run: Planned, *, compiled: bool = False) -> int:
    """FLOPs that the backward pass of one step repeats, over all ranks, as `training.recompute` says.

    A wholly recomputed layer repeats all products but its last, whose result nobody needs; one that is compiled repeats
    that one too. `selective` repeats scores and values, `operators` no product. Raises as `flops_per_step`.
    """
    length = run.training.sequence_length
    last_product = 0 if compiled else 2 * run.model.mlp_size * run.model.hidden_size
    per_token = {
        "none": 0,
        "operators": 0,
        "selective": _scores_and_values(run.model, length),
        "full": _layers(run.model, length) // run.model.num_layers - last_product,
    }[run.training.recompute]
    return run.training.batch_size * length * num_recomputed_layers(run) * per_token


def hardware_flops_per_rank(run: Planned, *, compiled: bool = False) -> int:
    """FLOPs that one rank computes in one step, with what the backward pass repeats.

    A rank has its part of all of them, but where heads of keys and values are fewer than tensor ranks, each has one
    whole: what that adds is no work of the model. Raises as `flops_per_step`.
    """
    model, tensor = run.model, run.layout.tensor
    heads_over = max(tensor - model.num_kv_heads, 0)
    layers = 3 * model.num_layers + num_recomputed_layers(run) * (run.training.recompute == "full")
    repeated = layers * 2 * model.hidden_size * 2 * heads_over * model.head_size
    tokens = run.training.batch_size * run.training.sequence_length
    flops = flops_per_step(run) + recomputed_flops_per_step(run, compiled=compiled) + tokens * repeated
    return flops // run.layout.world_size


def _layers(model: ModelConfig, sequence_length: int) -> int:
    require_at_least("sequence_length", sequence_length, 1)
    H = model.hidden_size
    attention = model.query_size + model.key_value_size + model.query_size
    mlp = (3 if model.mlp == "swiglu" else 2) * model.mlp_size
    return model.num_layers * (2 * H * (attention + mlp) + _scores_and_values(model, sequence_length))


def _scores_and_values(model: ModelConfig, sequence_length: int) -> int:
    return 2 * 2 * sequence_length * model.query_size


def _output_projection(model: ModelConfig) -> int:
    return 2 * model.hidden_size * known_vocab_size(model)
