"""Layout of the ranks: the size of each axis in `axes.AXES`, and properties that follow from the sizes."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from crosscut.config.axes import AXES, OPTIONS, AxisRow
from crosscut.config.checks import Choice, divisors, listed, require_at_least, require_value, resolve_choices
from crosscut.config.errors import LayoutError
from crosscut.config.hashed import HashedOnce
from crosscut.config.layouts.ranks import DENSE_ROWS, EXPERT_ROWS, Line, RankPlan


class ZeroStage(Choice):
    """Stage of ZeRO: the state that is sharded over the data ranks."""

    NONE = "none"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


class ContextAttention(Choice):
    """Method of computing attention over a sequence that several ranks share."""

    AUTO = "auto"
    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"
    RING = "ring"


class Elastic(Choice):
    """Layouts that a run may switch to when torchrun starts it with a different number of ranks."""

    OFF = "off"
    DATA = "data"
    ALL = "all"


class PipelineSchedule(Choice):
    """Order of the forward and backward passes of pipeline stages."""

    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    ZERO_BUBBLE = "zero_bubble"


@dataclass(frozen=True, kw_only=True)
class Layout(HashedOnce):
    """Number of ranks along each axis. No layout changes the model that is trained.

    The same file works on a cluster and on a laptop: `sequence_parallel` has no effect with one tensor rank, `sharding`
    has no effect with one data rank, and no warning is given. Two options are stricter and raise `LayoutError`:
    `shard_group` needs `sharding`, and `symmetric_memory` needs sequence parallelism over several tensor ranks.

    The ranks that share every layer are adjacent, as in the paper's Figure 5: rank = data_rank * tensor + tensor_rank.
    """

    __hash__ = HashedOnce.__hash__

    tensor: int = 1
    """Number of ranks that share every layer. Each rank holds some columns of a sublayer's first matrix and some rows
    of the second matrix. Must divide the number of heads.
    """

    data: int = 1
    """Number of data-parallel ranks. Each data rank trains on its own part of the batch."""

    context: int = 1
    """Number of ranks that share each sequence. Each rank has 1 / `context` of the tokens, and attention is over the
    whole sequence. 2 x `context` must divide the length of the sequences.
    """

    context_attention: ContextAttention = ContextAttention.AUTO
    """Method of computing attention over a sequence that several ranks share. `gather` gives each rank all keys and
    values. `all_to_all` exchanges heads for tokens, so that each rank has all tokens of some heads. `ring` passes keys
    and values from rank to rank, so that no rank holds all of them. `auto` chooses a method that suits the number of
    heads and the available memory.
    """

    pipeline: int = 1
    """Number of ranks that share the model's layers, in stages (docs/pipeline.md). Only `crosscut train`,
    `crosscut verify` and `crosscut study measure` run stages.
    """

    schedule: PipelineSchedule = PipelineSchedule.ONE_FORWARD_ONE_BACKWARD
    """Order of the forward and backward passes of pipeline stages. `1f1b` alternates one forward and one backward pass;
    `zero_bubble` also delays the gradients of the weights, so that stages wait less.
    """

    stages_per_rank: int = 1
    """Number of pipeline stages of each rank. With several stages, `1f1b` runs them interleaved, so that stages wait
    less and send more.
    """

    stages: tuple[int, ...] = ()
    """Number of layers of each pipeline stage, in the order of the layers. If the list is empty, Crosscut cuts the
    layers so that all stages take about the same time. The time of the embedding and of the loss counts, too.
    """

    expert: int = 1
    """Number of ranks that share the experts of a layer. These ranks are also data and context ranks, so `expert` does
    not change the number of ranks. Must divide `data` x `context`, and the number of experts.
    """

    sequence_parallel: bool = False
    """Whether layer norms, dropout and residuals are also split over the tensor ranks, along the sequence. The
    activations of these operations then take only 1 / `tensor` of the memory. In return, the backward pass sends 1.5
    times as much data.
    """

    sharding: ZeroStage = ZeroStage.NONE
    """State that is sharded over the data ranks: `none` gives each rank a whole copy (as in the paper); `zero2` shards
    gradients and optimizer state; `zero3` also shards the weights, and gathers them layer by layer when they are used.
    """

    shard_group: int = 0
    """Number of adjacent data ranks, such as the ranks of a node, that together hold one copy of the sharded state. 0
    means that all data ranks together hold one copy.
    """

    symmetric_memory: bool = False
    """Whether the tensor ranks split each matrix product into pieces, and use PyTorch's symmetric memory to send or
    receive one piece while another piece is multiplied. Needs sequence parallelism, and GPUs that can access each
    other's memory.
    """

    elastic: Elastic = Elastic.OFF
    """Reaction of `crosscut train` if torchrun starts a different number of ranks than the layout has
    (docs/elastic.md). `off` ends with an error. `data` changes the number of data ranks. `all` takes the fastest layout
    that fits into memory. The batch and the order of the data stay the same, and the run resumes from its newest
    checkpoint.
    """

    def __post_init__(self) -> None:
        for row, *_ in OPTIONS.values():
            self._check_size(row)
        resolve_choices(self, "layout")
        require_at_least("layout.shard_group", self.shard_group, 0)
        self._check_shard_group()
        self._check_experts()
        self._check_stages()
        if self.context > 1:
            remedy = (
                "The context ranks and all data ranks together hold one copy of the state. Remove `layout.shard_group`."
            )
            self._require_value("shard_group", 0, "with `layout.context` above 1", remedy)
        if self.symmetric_memory and not self.splits_sequence:
            raise LayoutError(
                "`layout.symmetric_memory` needs sequence parallelism over several tensor ranks, but is set for "
                f"{self}. Set layout.sequence_parallel=true and layout.tensor above 1, or remove "
                "`layout.symmetric_memory`."
            )

    def _check_size(self, row: AxisRow) -> None:
        size: int = getattr(self, row.option)
        require_at_least(f"layout.{row.option}", size, 1)

    def _require_value(self, field: str, wanted: object, when: str, do: str) -> None:
        require_value(f"layout.{field}", getattr(self, field), wanted, when, do, error=LayoutError)

    def _check_shard_group(self) -> None:
        if not self.is_sharded:
            remedy = 'Set layout.sharding="zero3" or remove `layout.shard_group`.'
            self._require_value("shard_group", 0, "without sharding", remedy)
        if self.shard_group and self.data % self.shard_group:
            raise LayoutError(
                f"`layout.shard_group` must divide `layout.data` ({self.data}), but is {self.shard_group}. "
                f"Try {listed(divisors(self.data))}."
            )

    def _check_experts(self) -> None:
        """Check that expert ranks divide the ranks that see different tokens, and those that share one copy."""
        names, size = "`layout.data` x `layout.context`", self.data * self.context
        if self.shard_group:
            names, size = "`layout.shard_group`", self.shard_group
        if size % self.expert:
            raise LayoutError(
                f"`layout.expert` must divide {names} ({size}), but is {self.expert}. Try {listed(divisors(size))}."
            )

    def _check_stages(self) -> None:
        require_at_least("layout.stages_per_rank", self.stages_per_rank, 1)
        if self.pipeline == 1:
            remedy = "Set layout.pipeline above 1, or remove `layout.stages_per_rank`."
            self._require_value("stages_per_rank", 1, "without a pipeline", remedy)
        if self.schedule is PipelineSchedule.ZERO_BUBBLE:
            remedy = 'Remove `layout.stages_per_rank`, or set layout.schedule="1f1b".'
            self._require_value("stages_per_rank", 1, 'with layout.schedule="zero_bubble"', remedy)
        for size in self.stages:
            require_at_least("layout.stages", size, 1)
        if self.stages and len(self.stages) != self.num_stages:
            raise LayoutError(
                f"`layout.stages` must list one number of layers for each of the {self.num_stages} stages "
                f"(`layout.pipeline` {self.pipeline} x `layout.stages_per_rank` {self.stages_per_rank}), but the "
                f"length of the list is {len(self.stages)}. List {self.num_stages} numbers, or remove `layout.stages`."
            )

    def require_one_stage(self, command: str) -> None:
        """Raise `LayoutError` if the layout has a pipeline. The message names `command`, which cannot run pipelines."""
        remedy = (
            "This command cannot run a pipeline. Set layout.pipeline=1: a checkpoint that a pipeline wrote can be read "
            "on any layout."
        )
        self._require_value("pipeline", 1, f"for `crosscut {command}`", remedy)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages of all ranks together; 1 without a pipeline."""
        return self.pipeline * self.stages_per_rank

    @property
    def splits_sequence(self) -> bool:
        """Whether tensor ranks split the sequence outside the tensor-parallel regions. False if there is only one
        tensor rank.
        """
        return self.sequence_parallel and self.tensor > 1

    @property
    def is_sharded(self) -> bool:
        """Whether `sharding` asks the ranks to share one copy of gradients and optimizer state."""
        return self.sharding is not ZeroStage.NONE

    @cached_property
    def ranks(self) -> RankPlan:
        """Plan of the ranks: which ranks see different tokens, hold copies, and cut, store or own parameters. The plan
        answers for all parameters except experts.
        """
        return _plan(tuple(self.sizes.values()), self.is_sharded)

    @cached_property
    def expert_ranks(self) -> RankPlan:
        """Plan of the same ranks for the parameters of experts. With one expert rank, this plan is `ranks`."""
        if self.expert == 1:
            return self.ranks
        return _plan(tuple(self.sizes.values()), self.is_sharded, for_experts=True)

    def ranks_of(self, *, experts: bool) -> RankPlan:
        """Return the plan of the ranks for a parameter: `expert_ranks` if `experts` is true, otherwise `ranks`."""
        return self.expert_ranks if experts else self.ranks

    @cached_property
    def plans(self) -> tuple[RankPlan, ...]:
        """The two plans of the ranks, or the only one if experts are arranged like all other parameters."""
        return (self.ranks,) if self.expert == 1 else (self.ranks, self.expert_ranks)

    def line(self, name: str) -> Line:
        """Return the line of ranks with this name (`RankPlan.line`), of either plan."""
        return (self.ranks if self.ranks.has_line(name) else self.expert_ranks).line(name)

    @property
    def shard_size(self) -> int:
        """Number of data and context ranks that share one copy of gradients and optimizer state. 1 if each rank holds a
        whole copy.
        """
        return self.ranks.slices.size

    @property
    def num_replicas(self) -> int:
        """Number of whole copies of gradients and optimizer state along the data and context axes."""
        return self.ranks.copies.size

    def share_of(self, batch_size: int) -> int:
        """Number of the sequences of a batch that each rank reads, whole or in parts. Ranks along some axes read the
        same sequences.
        """
        return batch_size // self.ranks.batch.size

    def divides(self, batch_size: int) -> bool:
        """Whether all ranks read equally many of the sequences of a batch."""
        return batch_size % self.ranks.batch.size == 0

    @property
    def length_divisor(self) -> int:
        """Number that must divide the length of the sequences. Each context rank has an early and a late piece of each
        sequence, and with a split sequence, the tensor ranks divide each piece.
        """
        return (2 * self.context if self.context > 1 else 1) * (self.tensor if self.splits_sequence else 1)

    def without_stages(self) -> "Layout":
        """Return the layout in which the ranks of all stages hold the whole model and read different sequences."""
        return replace(
            self,
            data=self.data * self.pipeline,
            pipeline=1,
            stages_per_rank=1,
            stages=(),
            schedule=PipelineSchedule.ONE_FORWARD_ONE_BACKWARD,
        )

    @property
    def _data_of_copy(self) -> int:
        """Number of data ranks that share one copy of gradients and optimizer state."""
        return (self.shard_group or self.data) if self.is_sharded else 1

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks along each axis of `AXES`, keyed by the axis's name, outermost first."""
        slices = self._data_of_copy * self.context // self.expert if self.is_sharded else 1
        parts = {
            "replica": self.data // self._data_of_copy,
            "shard": self._data_of_copy,
            "expert_replica": self.data * self.context // (self.expert * slices),
            "expert_shard": slices,
        }
        return {row.name: parts[row.name] if row.name in parts else getattr(self, row.option) for row in AXES}

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks along each axis in use, keyed by the axis's field in `Layout`, outermost first. `replica` and
        `shard` count as one axis, `data`.

        An axis is in use if it has several ranks or is permanent (`AxisRow.is_permanent`). Axes that reuse the ranks of
        other axes (`AxisRow.is_folded`) are left out, so the product of the sizes is the number of ranks.
        """
        in_use = {}
        for option, (row, *_) in OPTIONS.items():
            size = getattr(self, option)
            if not row.is_folded and (row.is_permanent or size > 1):
                in_use[option] = size
        return in_use

    @property
    def names_of_axes(self) -> str:
        """Fields of the axes in use, innermost first, joined for a message: "`layout.tensor` x `layout.data`"."""
        return " x ".join(f"`layout.{option}`" for option in reversed(self.axes))

    def place_of(self, rank: int) -> dict[str, int]:
        """Position of a rank along each axis of `AXES`, keyed by the axis's name, outermost first. Axes that reuse the
        ranks of other axes are left out.
        """
        return self.ranks.place_of(rank)

    @cached_property
    def world_size(self) -> int:
        """Total number of ranks."""
        return prod(self.sizes[row.name] for row in DENSE_ROWS)

    @property
    def arrangement(self) -> str:
        """Sizes of the axes as a text such as `tensor 2 x data 4`, without options."""
        return " x ".join(f"{name} {size}" for name, size in reversed(self.axes.items()))

    def __str__(self) -> str:
        """Layout as a text such as `tensor 2 x data 4, zero3`. Options without effect (sequence parallelism over one
        tensor rank, sharding over one data rank) are left out.
        """
        folded = "".join(
            f", {option} {getattr(self, option)}"
            for option, (row, *_) in OPTIONS.items()
            if row.is_folded and getattr(self, option) > 1
        )
        split = ", sequence parallel" if self.splits_sequence else ""
        shared = f", {self.sharding}" if self.shard_size > 1 else ""
        group = f" in groups of {self.shard_size}" if self.num_replicas > 1 and shared else ""
        staged = f", {self.stages_per_rank} stages per rank" if self.stages_per_rank > 1 else ""
        zero = ", zero bubble" if self.pipeline > 1 and self.schedule is PipelineSchedule.ZERO_BUBBLE else ""
        return f"{self.arrangement}{folded}{staged}{zero}{split}{shared}{group}"


@lru_cache(maxsize=4096)
def _plan(sizes: tuple[int, ...], shards: bool, *, for_experts: bool = False) -> RankPlan:
    """Plan of the ranks for these sizes of the axes of `AXES`. Layouts that differ in other options share it."""
    names = (row.name for row in AXES)
    return RankPlan(EXPERT_ROWS if for_experts else DENSE_ROWS, dict(zip(names, sizes, strict=True)), shards)
