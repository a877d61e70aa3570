"""Profile of the parts of a model: time, FLOPs, parameters and share of the peak rate of each part of each layer.

Times are measured (`part_times`), FLOPs are those of the planner, and parameters are those that the rank holds. Of the
ranks at the same place of a pipeline, the report shows the rank that computes for the longest time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text
from torch import nn

from crosscut.architecture.readings import StepFlops
from crosscut.config.parts.kinds import parts_of
from crosscut.config.system.console import figures_table, folded
from crosscut.logbook.objects import write_object
from crosscut.logbook.schema import PARTS_FILE
from crosscut.model.block import Block
from crosscut.parallel.state.parameters import local_part
from crosscut.planner.candidate import Candidate
from crosscut.planner.compute import flops_of_parts
from crosscut.planner.muon import muon_flops
from crosscut.planner.stages import separates_weights
from crosscut.training.profiling.part_times import (
    BETWEEN_PASSES,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    OTHER,
    PHASES,
    REST,
    WEIGHT_GRADIENTS,
    WHOLE,
    PartTimer,
    Place,
    Seconds,
)
from crosscut.training.step import Trainer
from crosscut.training.watching.throughput import PeakRate

_NO_FLOPS = StepFlops(0, 0, 0)
_MOST_ROWS = 64
"""Largest number of rows in a printed table. In a longer table, layers are added up."""


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """Figures of a part of the model, or of a phase, in a step on one rank."""

    layer: int | None
    """Index of the layer; None outside of the layers."""
    part: str
    """Name of the part, such as `attention`, or of the phase."""
    kind: str
    """Kind of the part, such as `mamba2`; the same as `part` if it has only one kind."""
    forward_seconds: float
    backward_seconds: float
    """Seconds of the backward pass, including `repeated_seconds`."""
    repeated_seconds: float
    """Seconds of a forward pass that recomputation repeats in the backward pass."""
    message_seconds: float | None
    """Seconds for messages that the other fields include; None on a GPU, which waits for messages by itself."""
    forward_flops: int
    backward_flops: int
    """FLOPs of the gradients, without a repeated forward pass."""
    parameters: int
    """Number of parameters that the rank holds."""
    utilisation: float | None
    """FLOPs per second of both passes as a share of the rank's peak rate; None without FLOPs or above the peak."""

    @property
    def seconds(self) -> float:
        """Seconds of both passes."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """Figures of all parts on one rank."""

    rank: int = 0
    pipeline: int
    """Position of the rank along the pipeline."""
    seconds: float
    """Time of the step."""
    parts: list[PartRow]

    @property
    def own_seconds(self) -> float:
        """Seconds of a step in which the rank did not wait for messages, as far as they are known."""
        return self.seconds - sum(row.message_seconds or 0.0 for row in self.parts)


def rank_parts(trainer: Trainer, timer: PartTimer, peak: PeakRate) -> RankParts:
    """Join the times, FLOPs and parameters of this rank, in the timed step of median time. `peak` is the rate of all
    ranks together.
    """
    of_rank, flops = peak.flops_per_second / trainer.run.layout.world_size, _flops(trainer)
    held, kinds, step = _parameters(trainer), _kinds(trainer), timer.usual()
    rows = []
    for place in _places(trainer):
        seconds, products = step.parts.get(place, Seconds()), flops.get(place, _NO_FLOPS)
        rate = (products.forward + products.backward) / seconds.total if seconds.total else 0.0
        row = PartRow(
            layer=place.layer,
            part=place.part,
            kind=kinds.get(place, place.part),
            forward_seconds=seconds.forward,
            backward_seconds=seconds.backward,
            repeated_seconds=seconds.again,
            message_seconds=seconds.messages if trainer.mesh.device.type == "cpu" else None,
            forward_flops=products.forward,
            backward_flops=products.backward,
            parameters=held[place],
            utilisation=rate / of_rank if 0 < rate <= of_rank else None,
        )
        if seconds.total or products is not _NO_FLOPS or row.parameters:
            rows.append(row)
    return RankParts(pipeline=trainer.mesh.pipeline.rank, seconds=step.seconds, parts=rows)


def slowest_ranks(ranks: Sequence[RankParts]) -> list[RankParts]:
    """Return the rank that computes for the longest time at each place of the pipeline. `ranks` are in the order of
    their numbers.
    """
    of_place: dict[int, list[RankParts]] = defaultdict(list)
    for number, one in enumerate(ranks):
        of_place[one.pipeline].append(replace(one, rank=number))
    return [max(alike, key=lambda one: one.own_seconds) for _, alike in sorted(of_place.items())]


def write_parts(told: Sequence[RankParts], peak: PeakRate, folder: Path, num_ranks: int) -> None:
    """Write `parts.json`."""
    table = {
        "peak": peak.name,
        "peak_flops_per_second": peak.flops_per_second / num_ranks,
        "ranks": [asdict(one) for one in told],
    }
    write_object(folder / PARTS_FILE.rpartition("/")[2], table)


def print_parts(told: Sequence[RankParts], peak: PeakRate, console: Console, num_ranks: int) -> None:
    """Print a table for each rank of `told`."""
    for one in told:
        _print_rank(one, console, num_ranks)
    rate = peak.flops_per_second / num_ranks
    console.print(f"peak: {rate / 1e9:,.0f} GFLOP/s per rank, {peak.name}\n", highlight=False)


def _print_rank(one: RankParts, console: Console, num_ranks: int) -> None:
    is_known = all(row.message_seconds is not None for row in one.parts)
    columns = ("forward ms", "backward ms", "share", *(["messages"] if is_known else []))
    table = figures_table(folded("part"), *columns, "GFLOP", "parameters", "of peak")
    for row, count in _printed(one.parts):
        name = row.kind if row.layer is None else f"{_layers(row, count)}, {row.kind}"
        figures = [f"{1e3 * s:,.2f}" if s else "" for s in (row.forward_seconds, row.backward_seconds)]
        figures.append(f"{row.seconds / one.seconds:.1%}")
        figures += [f"{row.message_seconds / one.seconds:.1%}"] if row.message_seconds is not None else []
        flops = row.forward_flops + row.backward_flops
        figures += [f"{flops / 1e9:,.2f}" if flops else "", f"{row.parameters:,}" if row.parameters else ""]
        table.add_row(Text(name), *figures, "" if row.utilisation is None else f"{row.utilisation:.0%}")
    console.print(table)
    *_, rest = (row.seconds for row in one.parts)
    of = "" if num_ranks == 1 else f" on rank {one.rank}, the slowest rank"
    console.print(
        f"step: {1e3 * one.seconds:,.2f} ms{of}; parts: {1e3 * (one.seconds - rest):,.2f} ms; "
        f"not attributed: {1e3 * rest:,.2f} ms\n",
        highlight=False,
        soft_wrap=True,
    )


def _layers(row: PartRow, count: int) -> str:
    return f"layer {row.layer}" if count == 1 else f"{count} layers"


def _printed(rows: Sequence[PartRow]) -> Iterator[tuple[PartRow, int]]:
    """Yield the rows of a printed table, each with the number of layers that it adds up. The last row of a rank has the
    time that belongs to no part, which stands below the table.
    """
    groups: dict[object, list[PartRow]] = defaultdict(list)
    for row in rows[:-1]:
        alone = row.layer is None or len(rows) <= _MOST_ROWS
        groups[(row.layer, row.part) if alone else row.kind].append(row)
    for of_group in groups.values():
        yield _sum(of_group), len(of_group)


def _sum(rows: Sequence[PartRow]) -> PartRow:
    first = rows[0]
    if len(rows) == 1:
        return first
    seconds = sum(row.seconds for row in rows)
    # The mean of the shares of a peak, weighted by their times, is the share of all rows together.
    shares = [row.seconds * row.utilisation for row in rows if row.utilisation is not None]
    messages = [row.message_seconds for row in rows if row.message_seconds is not None]
    return PartRow(
        layer=first.layer,
        part=first.part,
        kind=first.kind,
        forward_seconds=sum(row.forward_seconds for row in rows),
        backward_seconds=sum(row.backward_seconds for row in rows),
        repeated_seconds=sum(row.repeated_seconds for row in rows),
        message_seconds=sum(messages) if len(messages) == len(rows) else None,
        forward_flops=sum(row.forward_flops for row in rows),
        backward_flops=sum(row.backward_flops for row in rows),
        parameters=sum(row.parameters for row in rows),
        utilisation=sum(shares) / seconds if len(shares) == len(rows) else None,
    )


def _places(trainer: Trainer) -> Iterator[Place]:
    """Yield the places of a rank in the order of the forward pass, then the phases, and last the time of no place."""
    yield EMBEDDING
    for index, block in _blocks(trainer):
        names = [Place(index, name) for names in block.parts for name in _in_order(*names)]
        yield from [Place(index, WHOLE)] if block.runner.compiler is not None else [*names, Place(index, REST)]
    yield from (FINAL_NORM, HEAD, WEIGHT_GRADIENTS, BETWEEN_PASSES, *PHASES.values(), OTHER)


def _in_order(name: str, norm: str, place: str) -> tuple[str, str]:
    return (norm, name) if place == "before" else (name, norm)


def _blocks(trainer: Trainer) -> Iterator[tuple[int, Block]]:
    for index, block in zip(trainer.model.part.indexes, trainer.model.blocks, strict=True):
        assert isinstance(block, Block)
        yield index, block


def _kinds(trainer: Trainer) -> dict[Place, str]:
    """Kinds of the parts of all layers."""
    model = trainer.run.config.model
    return {
        Place(index, name): kind.value
        for index in range(model.num_layers)
        for name, kind in parts_of(model.layer(index))
    }


def _flops(trainer: Trainer) -> dict[Place, StepFlops]:
    """FLOPs of this rank in a step, by place."""
    run = Candidate.at(trainer.run.config, trainer.mesh.pipeline.rank)
    whole = {index for index, block in _blocks(trainer) if block.runner.compiler is not None}
    later, found = separates_weights(run.layout), dict[Place, StepFlops]()
    for (index, name), flops in flops_of_parts(run).items():
        deferred = flops.deferrable if later else 0
        parts = (
            (Place(index, WHOLE if index in whole else name), StepFlops(flops.forward, flops.backward - deferred, 0)),
            (WEIGHT_GRADIENTS, StepFlops(0, deferred, 0)),
        )
        for place, more in parts:
            before = found.get(place, _NO_FLOPS)
            found[place] = StepFlops(before.forward + more.forward, before.backward + more.backward, 0)
    if products := muon_flops(run):
        found[Place(None, "optimizer")] = StepFlops(products, 0, 0)
    return {place: flops for place, flops in found.items() if flops.forward or flops.backward}


def _parameters(trainer: Trainer) -> Counter[Place]:
    """Number of parameters that this rank holds, by place."""
    model, found = trainer.model, Counter[Place]()
    ends: list[tuple[Place, Mapping[str, nn.Module | None]]] = [
        (EMBEDDING, model.embedding.modules),
        (FINAL_NORM, {"": model.final_norm}),
    ]
    ends += [(HEAD, model.head.modules)] if model.part.is_last else []
    for place, modules in ends:
        found[place] = sum(_held(module) for module in modules.values() if module is not None)
    for index, block in _blocks(trainer):
        if block.runner.compiler is not None:
            found[Place(index, WHOLE)] = _held(block)
            continue
        for name in (name for names in block.parts for name in names[:2]):
            found[Place(index, name)] = _held(getattr(block, name))
    return found


def _held(module: nn.Module) -> int:
    return sum(local_part(parameter.detach()).numel() for parameter in module.parameters())
