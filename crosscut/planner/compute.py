"""Count the floating-point operations (FLOPs) of a training step, of all ranks together and of one rank.

The FLOPs per token come from `planner.flops`. This module adds the products that recomputation repeats and the products
of Muon.
"""

from dataclasses import replace

from crosscut.architecture import Target
from crosscut.architecture.lowering import lower, lower_root
from crosscut.architecture.readings import StepFlops, gradient_flops, repeated_flops, step_flops, weight_flops
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Planned, recomputation_step, target_of
from crosscut.planner.flops import ONE_TOKEN, inner_flops, model_flops_per_token, part_flops_per_token
from crosscut.planner.messages.low_rank import low_rank_flops
from crosscut.planner.muon import muon_flops
from crosscut.planner.stages import part_of
from crosscut.planner.teacher import teacher_flops


def flops_of_parts(run: Planned) -> dict[tuple[int | None, str], StepFlops]:
    """FLOPs of each part of the model on one rank in one step, without those that recomputation repeats. The keys are
    the index of the layer and the name of the part, and (None, "head") for the head. In a pipeline, the result has the
    parts of rank `Candidate.pipeline_rank`. Experts count with even loads.
    """
    part, target = part_of(run), target_of(run, device="cpu")
    found: dict[tuple[int | None, str], StepFlops] = {}
    for index, layer in zip(part.indexes, part.layers, strict=True):
        for of, steps in zip(layer.parts, lower(layer, target), strict=True):
            found[index, of.name] = step_flops(steps, target).times(run.num_micro_batches)
    if part.is_last:
        found[None, "head"] = step_flops(lower_root(part, target)[1], target).times(run.num_micro_batches)
    return found


def flops_per_step(run: Planned, *, recompute: bool = False) -> int:
    """FLOPs of one optimizer step over all ranks: `model_flops_per_token` times the tokens of the batch.

    With `recompute`, the result is the published count for a run that recomputes whole layers. Crosscut repeats fewer
    products; `recomputed_flops_per_step` counts them. Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    tokens = run.training.batch_size * run.training.sequence_length
    length, fraction = run.training.sequence_length, run.mask_fraction
    return tokens * model_flops_per_token(run.model, length, recompute=recompute, mask_fraction=fraction)


def recomputed_flops_per_step(run: Planned, *, compiled: bool = False) -> int:
    """FLOPs that recomputation repeats in one step, over all ranks. In a pipeline, the result covers only the layers of
    one pipeline rank (`Candidate.pipeline_rank`).

    The count depends on `training.recompute`. With "full", a `compiled` layer repeats all products, and an uncompiled
    layer repeats only the products on which its saved values depend. "selective" repeats the scores and the weighted
    values. "operators" and "none" repeat no product.
    """
    length = run.training.sequence_length
    sequence, per_token = replace(ONE_TOKEN, length=length), 0
    for layer, count in part_of(run).recomputed(recomputation_step(run)).items():
        if run.training.recompute == Recompute.FULL:
            weights = repeated_flops(layer, ONE_TOKEN, everything=compiled)
            per_token += count * (weights + inner_flops(layer, sequence))
        elif run.training.recompute == Recompute.SELECTIVE:
            per_token += count * inner_flops(layer, sequence)
    return run.training.batch_size * length * per_token


def hardware_flops_per_rank(run: Planned, *, compiled: bool = False) -> int:
    """FLOPs that one rank computes in one step, including recomputation.

    The tensor ranks divide the products evenly, with exceptions: if there are fewer key-value heads, or groups of a
    scan's heads, than tensor ranks, several ranks compute the same head or group; and in latent attention, several
    ranks may compute the same latents or the same keys and values. This function includes the duplicated FLOPs, but
    `flops_per_step` does not. This function also includes the products of Muon on the first rank, those of gradients in
    low rank, and those of a teacher. In a pipeline, the result is for one rank of the pipeline
    (`Candidate.pipeline_rank`). Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    part, length = part_of(run), run.training.sequence_length
    rank, alone = (replace(target, length=length) for target in (Target.of(run.layout), ONE_TOKEN))
    rank = replace(rank, context_attention=run.context_attention.way)
    everywhere = part.recomputed(recomputation_step(run))
    again = everywhere if run.training.recompute == Recompute.FULL else part.recomputed(0)
    of_cores = everywhere if run.training.recompute in (Recompute.FULL, Recompute.SELECTIVE) else again
    repeated = 0
    for layer, count in part.kinds.items():
        inputs, weights = (
            rank.num_ranks * flops(layer, rank) // length - flops(layer, ONE_TOKEN)
            for flops in (weight_flops, gradient_flops)
        )
        cores = rank.num_ranks * inner_flops(layer, rank) - inner_flops(layer, alone)
        repeated += (2 * count + again[layer]) * inputs + count * weights + (3 * count + of_cores[layer]) * cores
    per_token = part_flops_per_token(part, run.model, length, mask_fraction=run.mask_fraction) + repeated
    flops = run.training.batch_size * length * per_token + recomputed_flops_per_step(run, compiled=compiled)
    taught = teacher_flops(run) if part.is_last and run.teacher.is_computed else 0
    return flops // run.layout.ranks.per_owner + muon_flops(run) + low_rank_flops(run) + taught
