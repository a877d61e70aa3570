"""Properties of a training program that change the time of a step, such as fused operators and overlap of messages."""

from typing import NamedTuple

from crosscut.config.conventions import BUCKET_BYTES
from crosscut.planner.candidate import Planned
from crosscut.planner.hardware import Hardware


class Program(NamedTuple):
    """Properties of a training program that change the time of a step."""

    compiled: bool
    """Whether the operators between a layer's products are fused."""

    fused_attention: bool = True
    """Whether one kernel computes attention without storing the scores."""

    overlaps_tensor: bool = True
    """Whether messages between tensor ranks overlap with products, as described in docs/speed.md."""

    overlaps_data: bool = True
    """Whether the reduction of gradients over the data ranks overlaps with the backward pass."""

    casts_weights: bool = True
    """Whether weights are stored in the accumulation type and cast in every micro-batch."""

    narrow_gradients: bool = False
    """Whether data ranks sum gradients in the type of the products, instead of the accumulation type."""

    shards_optimizer: bool = False
    """Whether data ranks shard only the optimizer state (ZeRO-1). Reduce-scattering gradients then overlaps with the
    backward pass, and gathering weights overlaps with the next forward pass."""

    overlaps_stages: bool = False
    """Whether the reduction of gradients over the data ranks starts before the last pass of a pipeline with several
    stages per rank. The gradients of a stage are then reduced while the other stages of the rank run their last
    backward passes."""

    repeats_keys: bool = False
    """Whether keys and values are repeated for each query head before context ranks send them."""

    overlaps_context: bool = True
    """Whether the shifts of ring attention overlap with attention to the block that arrived before."""

    repeats_last: bool = False
    """Whether full recomputation also repeats the last matrix product of a layer and the message after this product."""

    sent_rows: tuple[float, float] = (1.0, 1.0)
    """Share of the rows of experts that a rank sends: inside a node, and between nodes. A rank of Crosscut sends a row
    to each expert of a token. Other programs send a token only once to each rank, or to each node."""

    clips_apart: bool = True
    """Whether a kernel of its own clips the gradients, instead of AdamW's kernel."""

    bucket_bytes: int | None = BUCKET_BYTES
    """Bytes of a bucket of gradients. The data ranks reduce the gradients bucket by bucket. With None, all gradients
    are sent as one message."""


def crosscut_program(run: Planned, hardware: Hardware) -> Program:
    """Properties of Crosscut itself when it trains `run` on this hardware.

    On a CPU, messages count as not overlapped, because the ranks share the processor.
    """
    on_gpu = hardware.device == "cuda"
    compiled = run.is_compiled_on_gpus if on_gpu else run.training.compile == "on"
    fused = on_gpu or not run.model.dropout
    return Program(
        compiled, fused, overlaps_tensor=on_gpu, overlaps_data=on_gpu, repeats_last=compiled, clips_apart=False
    )


PAPER_PROGRAM = Program(
    compiled=False,
    fused_attention=False,
    overlaps_tensor=False,
    casts_weights=False,
    narrow_gradients=True,
    repeats_last=True,
    bucket_bytes=None,
)
"""The paper's program of 2019: unfused attention, f and g without overlap (Code 1), gradients reduced "during back
propagation" (section 3), weights stored and gradients summed in float16, whole layers recomputed (section 4.1.1)."""
