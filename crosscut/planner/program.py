"""Properties of a program that the time of a step depends on: fused operators, and messages sent beside computation."""

from typing import NamedTuple

from crosscut.config.conventions import BUCKET_BYTES
from crosscut.planner.candidate import Planned
from crosscut.planner.hardware import Hardware


class Program(NamedTuple):
    """The properties of an implementation that forecasts of time ask for."""

    compiled: bool
    """Whether a layer's operators between its products are fused."""

    fused_attention: bool = True
    """Whether scores stay inside one kernel."""

    overlaps_tensor: bool = True
    """Whether messages between tensor ranks run beside the products of docs/speed.md."""

    overlaps_data: bool = True
    """Whether gradients go to the other data ranks while the backward pass runs."""

    casts_weights: bool = True
    """Whether weights are held in the type of sums and cast in every micro-batch."""

    shards_optimizer: bool = False
    """Whether data ranks share the optimizer and nothing else (ZeRO-1): gradients are scattered beside the backward
    pass, weights gathered beside the next forward pass."""

    repeats_last: bool = False
    """Whether a wholly recomputed layer also repeats its last product and the message after it."""

    bucket_bytes: int | None = BUCKET_BYTES
    """Bytes of a bucket in which gradients go to the other data ranks; None counts all gradients as one message."""


def crosscut_program(run: Planned, hardware: Hardware) -> Program:
    """Program with which Crosscut runs `run` on the hardware's kind of device.

    Ranks that share a processor gain nothing by overlapping.
    """
    on_gpu = hardware.device == "cuda"
    compiled = run.is_compiled_on_gpus if on_gpu else run.training.compile == "on"
    fused = on_gpu or not run.model.dropout
    return Program(compiled, fused, overlaps_tensor=on_gpu, overlaps_data=on_gpu, repeats_last=compiled)


PAPER_PROGRAM = Program(
    compiled=False,
    fused_attention=False,
    overlaps_tensor=False,
    casts_weights=False,
    repeats_last=True,
    bucket_bytes=None,
)
"""The paper's of 2019: attention in single operators, f and g waited for where they stand (Code 1), gradients reduced
"during back propagation" (section 3), weights held in float16, whole layers recomputed (section 4.1.1)."""
