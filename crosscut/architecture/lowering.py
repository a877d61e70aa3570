"""Turn a layer's steps into the steps that one rank runs, and find the steps that recomputation repeats."""

from collections.abc import Iterator
from functools import lru_cache

from crosscut.architecture.decoder import Decoder
from crosscut.architecture.parts import Layer
from crosscut.architecture.steps import Step
from crosscut.architecture.target import Target

Lowered = tuple[tuple[Step, ...], ...]
"""Steps that one rank runs: one tuple of steps for each part."""


@lru_cache(maxsize=16384)
def lower(layer: Layer, target: Target) -> Lowered:
    """Return the steps that one rank runs for a layer, with one tuple for each part.

    `target` gives the shapes, the data types and the device of the rank.
    """
    return tuple(tuple(step.on(target) for step in steps) for steps in layer.steps)


@lru_cache(maxsize=4096)
def lower_root(model: Decoder, target: Target) -> Lowered:
    """Return the steps that one rank runs for the embedding and for the head, as two tuples.

    `target` gives the shapes, the data types and the device of the rank.
    """
    return tuple(tuple(step.on(target) for step in steps) for steps in model.root_steps)


def flat(lowered: Lowered) -> Iterator[Step]:
    """Yield all steps of all parts, in order."""
    return (step for steps in lowered for step in steps)


@lru_cache(maxsize=16384)
def run_again(layer: Layer, target: Target, *, everything: bool) -> tuple[Step, ...]:
    """Steps of a layer that full recomputation repeats in the backward pass.

    If `everything` is true, the layer repeats all steps, as a compiled layer does. If it is false, the layer repeats
    only the steps that a saved value depends on, as an uncompiled layer does. If the norms come before the sublayers,
    no saved value depends on the last matrix product, on its sum over the tensor ranks, or on the last residual sum. If
    the norms come after the residual sums, the last norm saves its input, so all steps run again.
    """
    steps = tuple(flat(lower(layer, target)))
    if everything:
        return steps
    wanted = {value.name for step in steps for value in step.keeps}
    again = []
    for step in reversed(steps):
        if any(value.name in wanted for value in step.gives):
            again.append(step)
            wanted |= {value.name for value in step.reads}
    return tuple(again[::-1])
