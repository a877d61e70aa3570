"""Comparison of the planner's formulas with a dry run."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from crosscut.architecture import Target, describe
from crosscut.config import default_loss_chunk
from crosscut.planner import MemoryForecast, hardware_flops_per_rank, step_traffic
from crosscut.planner.memory import forecast_instants
from crosscut.planner.stages import stage_sizes
from crosscut.rehearsal.rehearse import Rehearsal


class ComparedFigure(NamedTuple):
    """One figure of a rank's step: the value from the planner's formula, and the value counted in the program."""

    name: str
    planned: int
    counted: int

    @property
    def error(self) -> float:
        """Relative error of the formula: planned / counted - 1.

        If `counted` is 0, the error is 0 for a `planned` of 0, and otherwise 1.
        """
        return self.planned / self.counted - 1 if self.counted else float(self.planned != 0)


def compare(rehearsal: Rehearsal) -> list[ComparedFigure]:
    """Compare peak bytes (without the allowance for fragmentation), FLOPs and message bytes with the planner's figures.

    FLOPs include the padding of the vocabulary, which the planner's model FLOPs leave out. For each axis, the total
    bytes of its messages are compared. Each message counts with the size of its full tensor. The number of messages is
    not compared, because gradients are sent in buckets.
    """
    run = rehearsal.run
    held = rehearsed_forecast(rehearsal)
    planned: Counter[str] = Counter()
    part = describe(run.model).embedding.tokens.on(Target.of(run.layout))
    chunk = default_loss_chunk(part.shape[0], run.predicted_tokens, device=rehearsal.device)
    for c in step_traffic(rehearsal.planned, loss_chunk_tokens=chunk, compiled=False):
        planned[c.axis] += c.count * c.elements * c.element_bytes
    counted: Counter[str] = Counter()
    for sent, element_bytes in zip(rehearsal.sent, rehearsal.element_bytes, strict=True):
        counted[sent.axis] += sent.elements * element_bytes
    padded = replace(rehearsal.planned, model=replace(run.model, vocab_size=part.num_parts * part.shape[0]))
    if run.layout.num_stages > 1:  # with the padding, the layers would be cut differently
        padded = replace(padded, layout=replace(run.layout, stages=stage_sizes(run)))
    return [
        ComparedFigure("peak bytes", held.total - held.allowance, rehearsal.peak.total),
        ComparedFigure("FLOPs", hardware_flops_per_rank(padded), rehearsal.flops),
        *(
            ComparedFigure(f"bytes of messages, {axis}", planned[axis], counted[axis])
            for axis in {**planned, **counted}
        ),
    ]


def rehearsed_forecast(rehearsal: Rehearsal) -> MemoryForecast:
    """Return the planner's forecast of the peak, over the phases of the step that the dry run measures.

    If moments are offloaded to host memory, the optimizer's phase is left out, because a dry run does not copy moments
    to the device.
    """
    instants = forecast_instants(rehearsal.planned, device=rehearsal.device)
    if rehearsal.device == "cuda" and "optimizer" in rehearsal.run.training.offload:
        instants = [instant for instant in instants if instant.instant != "step"]
    return max(instants, key=lambda instant: instant.total)
