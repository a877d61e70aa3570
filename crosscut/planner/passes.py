"""Bytes that a step reads and writes outside its matrix products, in operators that wait for memory, not arithmetic.

Counted are the tensors that each operator's kernel reads and writes. In units of E, the residual stream of one
micro-batch on one rank (b s h elements, a t-th of it where the sequence is split), half a layer takes:

|                                            | compiled forward | backward | eager forward | backward |
|--------------------------------------------|---|---|---|---|
| norm; backward with the gradient that goes around it | 2 | 4 | 2 | 5 + 3 |
| bias after the second matrix; its gradient | 0 | 1 | 2 | 1 |
| dropout, with a mask of m bytes an element | m | 2 + m | 2 + m | 2 + m |
| residual                                   | 3 | 0 | 3 | 0 |

GeLU reads and writes what is between the MLP's matrices: 2 forward, 3 backward and 1 for the first bias; SwiGLU 3 and
5, eager 5 and 9. Weights that are cast for the products, gradients that are cast back and added up, AdamW and the norm
of gradients are counted by the parameter. Legend: as in `activations`.
"""

from typing import NamedTuple

from crosscut.planner.candidate import Planned
from crosscut.planner.parameters import layer_tensors, parameters_per_rank
from crosscut.planner.products import logits_product
from crosscut.planner.program import Program

ADAMW_BYTES = 28
"""Per parameter: weight, gradient and two moments read, three of them written, in float32."""
_NORM_AND_CLIP_BYTES = 12


class Passes(NamedTuple):
    """Bytes and kernels of a forward and a backward pass."""

    forward: float
    backward: float
    cheap: float
    """Bytes of norms and of GeLU or SwiGLU in the forward pass; `training.recompute = "operators"` repeats them."""
    core: float
    """Bytes of unfused attention in the forward pass; `training.recompute = "selective"` repeats them."""
    forward_kernels: int
    backward_kernels: int
    gelu: int
    """Elements that GeLU computes, forward and once more backward."""


def layer_passes(run: Planned, program: Program) -> Passes:
    """One layer in one micro-batch, without its weights."""
    model, size = run.model, run.training.numbers.compute_bytes
    tokens = run.micro_batch_size * run.training.sequence_length
    own_tokens = tokens // run.layout.tensor if run.layout.sequence_parallel else tokens
    stream = own_tokens * model.hidden_size * size
    mask = 1 / size if model.dropout else 0.0
    bias = model.biases == "all"
    if program.compiled:
        half, half_back = 5 + mask, 4 + bias + (2 + mask if model.dropout else 0)
    else:
        dropout = 2 + mask if model.dropout else 0
        half, half_back = 5 + 2 * bias + dropout, 8 + bias + dropout
    num_inner = tokens * model.mlp_size // run.layout.tensor
    inner = num_inner * size
    if model.mlp == "swiglu":
        mlp, mlp_back = (3, 5) if program.compiled else (5, 9)
    else:
        mlp, mlp_back = 2, 3 + bias
    turned = tokens * (model.query_size + model.key_value_size // 2) // run.layout.tensor * size
    turns = (2 if program.compiled else 6) * ((model.positions == "rotary") + model.qk_norm)
    core, core_back = _scores(run, size) if not program.fused_attention else (0.0, 0.0)
    return Passes(
        forward=2 * half * stream + mlp * inner + turns * turned + core,
        cheap=4 * stream + mlp * inner,
        core=core,
        backward=2 * half_back * stream + mlp_back * inner + turns * turned + core_back,
        forward_kernels=5 if program.compiled else 15,
        backward_kernels=12 if program.compiled else 30,
        gelu=0 if model.mlp == "swiglu" else num_inner,
    )


def _scores(run: Planned, size: int) -> tuple[float, float]:
    """Attention without a fused kernel: s s scores per head. Forward they are written, masked by a product and a sum,
    go through softmax and dropout, and are read: 10.5 times; backward 11.5 times, four of them by products.
    """
    length = run.training.sequence_length
    scores = run.micro_batch_size * run.model.num_heads // run.layout.tensor * length**2 * size
    mask = 2 + 1 / size if run.model.dropout else 0.0
    return (8 + mask) * scores, (9 + mask) * scores


def weight_passes(run: Planned, program: Program) -> tuple[float, float]:
    """Bytes of all of a rank's weights in one micro-batch, the mean of a step's: cast for the forward pass; gradients
    cast back and summed.

    The first micro-batch has nothing to add to. Shares of sharded weights are cast before they are gathered.
    """
    precision = run.training.numbers
    narrow, wide = precision.compute_bytes, precision.accumulation_bytes
    added = 3 * wide * (1 - 1 / run.num_micro_batches)
    if narrow == wide or not program.casts_weights:
        return 0.0, added * _layer_parameters(run)
    own = _layer_parameters(run) / run.layout.shard_size
    return own * (wide + narrow), _layer_parameters(run) * (narrow + wide + added)


def ends_passes(run: Planned, program: Program) -> tuple[float, float]:
    """Embedding and loss in one micro-batch, forward and backward: the stream twice each way, and the logits.

    Compiled, the loss takes the largest logit, the sum of exponentials, and turns logits into their gradient, in the
    type of the products. Eager it does so in the type of sums, in as many passes as it has operators.
    """
    precision = run.training.numbers
    logits = logits_product(run)
    num_logits = logits.m * logits.n
    stream = logits.m * logits.k * precision.compute_bytes
    loss = 4 * precision.compute_bytes if program.compiled else 10 * precision.accumulation_bytes
    vocabulary_gradient = 3 * logits.n * logits.k * precision.accumulation_bytes
    return 6 * stream + loss * num_logits, 5 * stream + vocabulary_gradient


def optimizer_bytes(run: Planned, program: Program) -> float:
    """Bytes that one step reads and writes on a rank for the optimizer.

    The gradient norm, clipping and AdamW pass over the rank's share of parameters, gradients and moments. Gradients
    that are not sharded also pass through the buckets in which they go to the other data ranks.
    """
    wide = run.training.numbers.accumulation_bytes / 4
    own = parameters_per_rank(run.model, run.layout) / run.layout.shard_size
    buckets = 16 if run.layout.data > 1 and run.layout.shard_size == 1 else 0
    sharing = run.layout.data if program.shards_optimizer else 1
    return own * wide * ((ADAMW_BYTES + _NORM_AND_CLIP_BYTES) / sharing + buckets)


def _layer_parameters(run: Planned) -> int:
    return run.model.num_layers * sum(tensor.size for tensor in layer_tensors(run.model, run.layout))
