"""Bytes of activations that one rank saves for the backward pass, and the published formulas for these bytes.

Korthikanti et al. 2022 (arXiv 2205.05198, section 4 and Table 2) count the bytes of one layer on `t` tensor ranks. An
element takes two bytes, and an element of a dropout mask takes one byte:

    no parallelism                         s b h (34 + 5 a s / h)
    tensor parallelism                     s b h (10 + 24 / t + 5 a s / (h t))
    tensor and sequence parallelism        s b h / t (34 + 5 a s / h)
    attention core recomputed              the formulas above without the terms of 5 a s
    whole layers recomputed                2 s b h, divided by t if the sequence is split

Crosscut differs in three respects:

- Attention runs in a fused kernel that saves the log-sum-exp of each query and head instead of the scores (5 a s / h),
  so recomputing the attention core frees little memory. GPUs have no fused kernel for float64, so float64 saves the
  scores; the forecast does not include these scores.
- Dropout with probability 0 saves no mask.
- If the products use a narrower type than the weights, a copy of the weights in the narrow type is saved for the
  backward pass. The copy is counted separately, because its size does not depend on the batch.

Legend: `s` tokens of a sequence, `b` sequences of a micro-batch, `h` hidden size, `a` heads, `t` tensor ranks.
"""

from dataclasses import replace

from crosscut.architecture import Device, Kept, Layer, Target, describe, kept
from crosscut.architecture.readings import attention_products, weights_read
from crosscut.config import ConfigError
from crosscut.config.conventions import AMPERE
from crosscut.config.precision import precision_on
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Candidate, Planned, recomputation_step, target_of
from crosscut.planner.stages import part_of


def layer_activations(
    run: Planned, *, device: Device = "cuda", capability: tuple[int, int] = AMPERE, mode: str | None = None
) -> Kept:
    """Bytes of activations that the first layer saves on one rank for its backward pass, by purpose.

    `mode` replaces `training.recompute`. With `mode` "none", the result covers all activations of the layer. A
    recomputed layer also holds all its activations, but only during its own backward pass. `capability` is the compute
    capability of the GPU, which decides whether the attention kernel can share key-value heads.
    """
    run = Candidate.of(run, precision_on(device))
    target = target_of(run, device=device, capability=capability)
    return sum(activations_of(describe(run.model).layers[0], run, target, mode or run.training.recompute), Kept())


def activations_of(layer: Layer, run: Planned, target: Target, mode: str) -> tuple[Kept, ...]:
    """Bytes of activations that each part of `layer` saves on one rank for the backward pass. `target` has the
    shapes, the data types and the device of the rank, and `mode` is a value of `training.recompute`.

    The entry of the first part also counts the cast weights of the layer. Activations that are offloaded from the
    GPU count as 0 bytes.
    """
    if mode == Recompute.FULL and "activations" in run.training.offload and target.device == "cuda":
        return tuple(Kept() for _ in layer.parts)
    first, *others = kept(layer, target, mode)
    return replace(first, weights=0 if mode == Recompute.FULL else _cast_weights(layer, run, target)), *others


def _cast_weights(layer: Layer, run: Planned, target: Target) -> int:
    """Bytes of a layer's cast weights, which are a copy in the compute type. 0 if the weights are stored in this type.

    The result is also 0 if the data ranks shard the weights, because the gathered weights have the compute type and
    count as buffers.
    """
    precision = run.training.numbers
    is_same = precision.compute == precision.accumulation
    if is_same or run.layout.shard_size > 1:
        return 0
    return weights_read(layer, target) * precision.compute_bytes


def published_layer_activations(run: Planned) -> float:
    """Bytes of one layer's activations on one rank by the formulas of Korthikanti et al. 2022, Table 2.

    `training.recompute` selects the row of the table. The table has no row for "operators", so the row for "none" is
    used. The formulas assume dropout and two bytes per element. In a hybrid, the layer is the first one with attention.
    Raises `ConfigError` for a model without attention, for which there are no formulas.
    """
    target = target_of(run, device="cuda")
    scores = next((each for layer in describe(run.model).layers for each in attention_products(layer, target)), None)
    if scores is None:
        raise ConfigError(f"`model.layers` must have attention for the published formulas, but is {run.model.pattern}.")
    s, b = run.training.sequence_length, run.micro_batch_size
    h, t = run.model.hidden_size, run.layout.tensor
    split = t if run.layout.sequence_parallel else 1
    if run.training.recompute == Recompute.FULL:
        return 2 * s * b * h / split
    core = 0 if run.training.recompute == Recompute.SELECTIVE else 5 * scores.elements
    return s * b * h * (10 / split + 24 / t) + core


def activations_held(run: Planned, *, device: Device = "cuda") -> int:
    """Bytes that all layers save on one rank between the forward and the backward pass, including cast weights.

    Every `training.recompute_every`-th layer is recomputed, and the other layers save all their activations. The result
    does not include the activations that a recomputed layer computes again during its own backward pass.
    """
    run = Candidate.of(run, precision_on(device))
    target, decoder = target_of(run, device=device), part_of(run)
    again = decoder.recomputed(recomputation_step(run))
    held = 0
    for layer, count in decoder.kinds.items():
        mine = sum(activations_of(layer, run, target, run.training.recompute), Kept())
        plain = sum(activations_of(layer, run, target, Recompute.NONE), Kept())
        held += again[layer] * (mine.total + mine.weights)
        held += (count - again[layer]) * (plain.total + plain.weights)
    return held


def num_recomputed_layers(run: Planned) -> int:
    """Number of recomputed layers: the first layer and every `training.recompute_every`-th layer after it. 0 if nothing
    is recomputed.
    """
    return 0 if run.training.recompute == Recompute.NONE else -(-run.model.num_layers // run.training.recompute_every)
