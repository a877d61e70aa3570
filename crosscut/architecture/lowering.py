"""Lower a layer's steps to the work of one rank on a target, and find the steps that recomputation repeats."""

from collections.abc import Iterator
from functools import lru_cache

from crosscut.architecture.decoder import Decoder, Layer
from crosscut.architecture.steps import Step
from crosscut.architecture.target import Target

Lowered = tuple[tuple[Step, ...], ...]
"""Steps of one rank, by sublayer."""


@lru_cache(maxsize=16384)
def lower(layer: Layer, target: Target) -> Lowered:
    """Steps of a layer as one rank does them on the target, by sublayer."""
    return tuple(tuple(step.on(target) for step in steps) for steps in layer.sublayers)


@lru_cache(maxsize=4096)
def lower_root(model: Decoder, target: Target) -> Lowered:
    """Steps of the embedding, and of the head, as one rank does them on the target."""
    return tuple(tuple(step.on(target) for step in steps) for steps in model.root_steps)


def flat(lowered: Lowered) -> Iterator[Step]:
    """All steps, in order."""
    return (step for steps in lowered for step in steps)


@lru_cache(maxsize=16384)
def run_again(layer: Layer, target: Target, *, everything: bool) -> tuple[Step, ...]:
    """Steps that full recomputation repeats: those that some kept value depends on, or `everything`.

    In a pre-norm layer no kept value depends on the last product, its sum over the ranks, and the last residual sum, so
    eager layers do not repeat these. Compiled layers repeat everything.
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
