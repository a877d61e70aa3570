"""Scope of a verification: which options of the run the verified step used, and which options it did not use."""

import dataclasses
from collections.abc import Iterator

from crosscut.config import RunConfig
from crosscut.config.checks import listed
from crosscut.config.optimizer import MatrixOptimizer, ParameterGroup
from crosscut.config.precision import Precision, precision_on
from crosscut.config.training import Device
from crosscut.planner.activations import num_recomputed_layers
from crosscut.verification.report import LayoutReport

COMPILED = "compiled layers"
"""Name of the check for compiled layers. A report has this check only if layers were compiled."""


def with_scope(report: LayoutReport, *, asked: RunConfig, verified: RunConfig) -> LayoutReport:
    """Add the scope to a report: the options of the run `asked` that the verified step used, and the options that the
    step did not use. `verified` is the run that was verified, which may be smaller than `asked`.
    """
    compiled = any(check.name == COMPILED for check in report.checks)
    return dataclasses.replace(
        report, included=tuple(_included(verified, compiled)), left_out=tuple(_left_out(asked, verified, compiled))
    )


def _included(verified: RunConfig, compiled: bool) -> Iterator[str]:
    training = verified.training
    if num_recomputed := num_recomputed_layers(verified):
        yield f"recompute {training.recompute} in {num_recomputed} of {verified.model.num_layers} layers"
    yield from (f"offload of {what}" for what in training.offload)
    if verified.layout.num_stages > 1:
        yield f"{verified.layout.num_stages} pipeline stages with the schedule {verified.layout.schedule}"
    if verified.num_micro_batches > 1:
        yield f"accumulation over {verified.num_micro_batches} micro-batches"
    if training.document_mask:
        yield "documents that do not see each other"
    if verified.data.mixture:
        yield f"the weights of {len(verified.data.mixture)} token folders"
    if compiled:
        yield COMPILED
    if verified.layout.symmetric_memory:
        yield "symmetric memory"
    if training.precision is Precision.FLOAT16:
        yield "a loss scale"
    if verified.optimizer.matrices is MatrixOptimizer.MUON:
        yield "Muon"
    if verified.optimizer.ema_decay:
        yield "the moving average of the weights"
    if own := [group for group in ParameterGroup if verified.optimizer.rate_factor(group) != 1.0]:
        yield f"learning rates by role ({', '.join(own)})"


def _left_out(asked: RunConfig, verified: RunConfig, compiled: bool) -> Iterator[str]:
    ours, theirs = verified.training, asked.training
    devices = ("cuda", "cpu") if theirs.device is Device.AUTO else (theirs.device,)
    wanted = [precision_on(device) for device in devices] if theirs.precision is Precision.AUTO else [theirs.precision]
    if len(wanted) == 1 and ours.precision not in wanted:
        yield f"the run's precision {wanted[0]} (verify it with --precision {wanted[0]}, up to the type's rounding)"
    elif ours.precision not in wanted:
        both = " or ".join(wanted)
        yield f"the run's precision on its device ({both}; verify each with --precision, up to the type's rounding)"
    if not compiled and theirs.device is not Device.CPU and verified.is_compiled_on_gpus:
        yield f"{COMPILED} (which the run uses on GPUs)"
    if asked.layout.symmetric_memory and not verified.layout.symmetric_memory:
        yield "symmetric memory"
    if theirs.document_mask and verified.layout.stages_per_rank > 1:
        yield "packed documents against separate ones (possible only with one stage per rank)"
    if theirs.sequence_length != ours.sequence_length:
        yield f"sequences of {theirs.sequence_length:,} tokens ({ours.sequence_length:,} verified)"
    for window, shorter in zip(asked.model.windows, verified.model.windows, strict=True):
        if shorter != window:
            yield f"windows of {window:,} tokens ({shorter:,} verified)"
    if (smaller := verified.model.block_size) != asked.model.block_size:
        yield f"blocks of {asked.model.block_size:,} tokens ({smaller:,} verified)"
    if theirs.initial_batch_size:
        yield f"the growth of the batch from {theirs.initial_batch_size:,} to {theirs.batch_size:,} sequences"
    if asked.model.num_layers != verified.model.num_layers:
        yield f"{asked.model.num_layers} layers ({verified.model.num_layers} verified)"
    if lacking := sorted({*asked.model.different_layers} - {*verified.model.different_layers}):
        yield f"layers with other parts ({listed(lacking)}; take more layers with --layers)"
    elif {*asked.model.entries} - {*verified.model.entries}:
        yield "layers with other places of their norms (take more layers with --layers)"
    if asked.model.hidden_size != verified.model.hidden_size:
        yield f"hidden size {asked.model.hidden_size:,} ({verified.model.hidden_size:,} verified)"
    if theirs.zero_initial_outputs:
        yield "output projections that are zero (verified with random ones)"
    if theirs.initialize_from:
        yield f"the weights of {theirs.initialize_from} (verified with random weights)"
