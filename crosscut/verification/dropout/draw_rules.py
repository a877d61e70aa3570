"""Rules for the random draws of dropout on all ranks of a layout.

1. Ranks that drop from the same tensor draw the same numbers. Ranks that hold different tensors, or see different data,
   draw different numbers (the Megatron-LM paper, arXiv 1909.08053, section 3.1). All ranks drop in the same modules
   with the same probabilities.
2. No two draws of a step use the same numbers, on any ranks, except copies of one draw on tensor ranks. Layers,
   micro-batches and pipeline stages therefore draw different numbers. The uncut model must also follow this rule, so
   the rule finds faults that the cut and the uncut model share.
3. A recomputation draws the numbers that the first forward pass drew for the same tensor.
4. Where the uncut model starts its random stream anew, the ranks that see the first tokens start from the same state.

The rules need no list of the modules that apply dropout.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from crosscut.config import Layout
from crosscut.verification.dropout.draws import Drawn, DropoutDraw
from crosscut.verification.report import FirstDifference, StepPhase


def first_disagreement(every: Sequence[Drawn], layout: Layout, modules: Sequence[str] = ()) -> FirstDifference | None:
    """Compare the draws of all ranks of a layout, by the first three rules. Returns the first disagreement, or None if
    the draws follow the rules. `every` has the draws of each rank, in the order of the ranks. `modules` are the modules
    that draw, in the order in which the uncut model runs them.
    """
    return _first_among_ranks(every, layout) or _first_used_twice(every, layout, modules) or _first_not_repeated(every)


def first_other_start(every: Sequence[Drawn], uncut: Drawn, layout: Layout) -> FirstDifference | None:
    """Find the first call before which the uncut model starts its random stream anew, and a rank does so with another
    state. Only the first tensor rank and the ranks that see the first tokens are compared. A layout with sequence
    parallelism gives None, because the stream of each rank differs from the uncut model's.
    """
    if layout.splits_sequence:
        return None
    for rank, drawn in enumerate(every):
        if any(place for axis, place in layout.place_of(rank).items() if axis != "pipeline"):
            continue
        for entry in uncut.restarts:
            if drawn.states.get(entry, uncut.states[entry]) != uncut.states[entry]:
                told = (
                    f"Rank {rank} starts the random stream of `{entry.module}` from another state than the uncut "
                    "model does. The state must depend only on the seed, the step, the micro-batch, the layer and the "
                    "tokens. Check the number of the layer, and the number of the micro-batch."
                )
                return FirstDifference(entry.module, StepPhase.FORWARD, told, entry.micro_batch)
    return None


def _first_among_ranks(every: Sequence[Drawn], layout: Layout) -> FirstDifference | None:
    """Compare the n-th draws of the ranks of each pipeline stage (rule 1)."""
    size = layout.ranks.per_owner
    for first in range(0, layout.world_size, size):
        draws = [drawn.draws for drawn in every[first : first + size]]
        data = [layout.ranks.tokens.place_of(first + rank) for rank in range(size)]
        for together in zip(*draws, strict=False):
            for (i, one), (j, other) in combinations(enumerate(together), 2):
                if what := _judge(one, other, same_data=data[i] == data[j]):
                    told = (
                        f"Ranks {first + i} and {first + j} {what}. Check which stream and probability the module uses."
                    )
                    return FirstDifference(one.module, StepPhase.FORWARD, told, one.micro_batch)
        counts = [len(of_rank) for of_rank in draws]
        if len(set(counts)) > 1:
            j = next(j for j, count in enumerate(counts) if count != counts[0])
            late = max(draws, key=len)[min(counts)]
            told = f"Ranks {first} and {first + j} make different numbers of draws. Check which ranks apply dropout."
            return FirstDifference(late.module, StepPhase.FORWARD, told, late.micro_batch)
    return None


def _judge(one: DropoutDraw, other: DropoutDraw, *, same_data: bool) -> str:
    """Describe how the draws of two ranks break rule 1. The text is empty if the draws follow the rule. Two ranks may
    draw with different kernels, because the kernel of attention may depend on a rank's part of the sequence.
    """
    kernels = [draw.operator.partition(" ")[0] for draw in (one, other)]
    if one.module != other.module or (kernels[0] == kernels[1] and one.operator != other.operator):
        return "drop in different modules or with different probabilities"
    if not same_data:
        return "see different data but draw the same numbers" if one.state == other.state else ""
    if not one.dropped or not other.dropped:
        return ""
    if one.dropped == other.dropped and one.state != other.state:
        return "drop from the same tensor but draw different numbers, so their replicas drift apart"
    if one.dropped != other.dropped and one.state == other.state:
        return "drop from different tensors but draw the same numbers, so the dropped elements are correlated"
    return ""


class _DrawPlace(NamedTuple):
    rank: int
    number: int
    """Number of the draw on its rank."""
    draw: DropoutDraw

    def __str__(self) -> str:
        return f"`{self.draw.module}` in micro-batch {self.draw.micro_batch} on rank {self.rank}"


def _first_used_twice(every: Sequence[Drawn], layout: Layout, modules: Sequence[str]) -> FirstDifference | None:
    """Find the first numbers that two draws use (rule 2). Copies of a draw are its n-th draws on the tensor ranks."""
    seen: dict[str, _DrawPlace] = {}
    for place in _in_order(every, modules):
        before = seen.setdefault(place.draw.state, place)
        is_copy = place.number == before.number and _but_tensor(place.rank, layout) == _but_tensor(before.rank, layout)
        if before is not place and not is_copy:
            told = (
                f"{place} draws the same numbers as {before}, so the dropped elements are correlated. Check whether "
                "the seed depends on the layer, the micro-batch and the rank, and how stages number their layers."
            )
            return FirstDifference(place.draw.module, StepPhase.FORWARD, told, place.draw.micro_batch)
    return None


def _in_order(every: Sequence[Drawn], modules: Sequence[str]) -> list[_DrawPlace]:
    """Return the draws of all ranks in the order in which the uncut model would make them."""
    number = {module: i for i, module in enumerate(modules)}
    places = [_DrawPlace(rank, i, draw) for rank, drawn in enumerate(every) for i, draw in enumerate(drawn.draws)]
    return sorted(places, key=lambda place: (place.draw.micro_batch, number.get(place.draw.module, -1), place.rank))


def _but_tensor(rank: int, layout: Layout) -> dict[str, int]:
    return layout.place_of(rank) | {"tensor": 0}


def _first_not_repeated(every: Sequence[Drawn]) -> FirstDifference | None:
    """Find the first draw of a recomputation that differs from the draws of the first forward pass (rule 3). If the
    recomputed tensor is not one of the first pass, perhaps by its last bits, any draw of the first pass is right.
    """
    for rank, drawn in enumerate(every):
        for again in drawn.repeated:
            of_tensor = [draw for draw in drawn.draws if draw.dropped and draw.dropped == again.dropped]
            first = of_tensor or drawn.draws
            if all((draw.state, draw.operator) != (again.state, again.operator) for draw in first):
                module, micro_batch = (first[0].module, first[0].micro_batch) if of_tensor else ("recomputation", 1)
                told = (
                    f"A recomputation on rank {rank} does not drop as the first forward pass did: the random numbers, "
                    "the probability or the recomputed input are of another place. Check from which states "
                    "recomputation starts the random streams, and which input it keeps."
                )
                return FirstDifference(module, StepPhase.BACKWARD, told, micro_batch)
    return None
