"""Layout of the ranks: the axes of the device mesh and their sizes."""

from dataclasses import dataclass

from crosscut.config.checks import divisors, listed, require_at_least, require_one_of
from crosscut.config.errors import LayoutError

SHARDINGS = ("none", "zero2", "zero3")
"""The values of `Layout.sharding`."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The number of ranks along each axis. No value of it changes the model that is trained. One file serves a cluster
    and a laptop: `sequence_parallel` over one tensor rank and `sharding` over one data rank do nothing, and are not
    told then. `shard_group` and `symmetric_memory` are about ranks that must be there, and are refused without them.

    Tensor groups are adjacent ranks and data groups stride across them, as in the paper's Figure 5: rank =
    data_rank * tensor + tensor_rank.
    """

    tensor: int = 1
    """Ranks that share every layer: columns of the first matrix, rows of the second. Must divide the heads."""

    data: int = 1
    """Copies of the model, each on its own part of the batch."""

    sequence_parallel: bool = False
    """Also split layer norms, dropout and residuals along the sequence over the tensor ranks: a T-th of the memory for
    what lies between the cut matrices, for half as much traffic again in the backward pass."""

    sharding: str = "none"
    """State that is sharded over the data ranks: `none` gives each rank a whole copy (the paper's); `zero2` shards
    gradients and optimizer state; `zero3` shards the weights as well and gathers them layer by layer when they are
    used."""

    shard_group: int = 0
    """Adjacent data ranks that share one copy under `sharding`, such as those of a node; the groups then hold copies
    of each other. 0 takes all data ranks."""

    symmetric_memory: bool = False
    """Let the tensor ranks' products run in pieces beside their gathers, through PyTorch's symmetric memory. Needs
    sequence parallelism and GPUs that reach each other's memory."""

    def __post_init__(self) -> None:
        require_at_least("layout.tensor", self.tensor, 1)
        require_at_least("layout.data", self.data, 1)
        require_one_of("layout.sharding", self.sharding, SHARDINGS)
        require_at_least("layout.shard_group", self.shard_group, 0)
        self._check_shard_group()
        if self.symmetric_memory and not (self.sequence_parallel and self.tensor > 1):
            raise LayoutError(
                "`layout.symmetric_memory` must go with sequence parallelism over several tensor ranks, but is set for "
                f"{self}. Set layout.sequence_parallel=true and layout.tensor above 1, or leave it out."
            )

    def _check_shard_group(self) -> None:
        if self.shard_group and self.sharding == "none":
            raise LayoutError(
                f"`layout.shard_group` must be 0 where nothing is sharded, but is {self.shard_group}. Set "
                'layout.sharding="zero3" or leave it out.'
            )
        if self.shard_group and self.data % self.shard_group:
            raise LayoutError(
                f"`layout.shard_group` must divide `layout.data` ({self.data}), but is {self.shard_group}. "
                f"Try {listed(divisors(self.data))}."
            )

    @property
    def shard_size(self) -> int:
        """Data ranks that share one copy of gradients and optimizer state; 1 where each holds them whole."""
        return 1 if self.sharding == "none" else self.shard_group or self.data

    @property
    def num_replicas(self) -> int:
        """Whole copies of gradients and optimizer state along the data axis."""
        return self.data // self.shard_size

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.data

    def __str__(self) -> str:
        """Active parts of the layout: no sequence parallelism over one tensor rank, no sharding over one data rank."""
        split = ", sequence parallel" if self.sequence_parallel and self.tensor > 1 else ""
        shared = f", {self.sharding}" if self.shard_size > 1 else ""
        group = f" in groups of {self.shard_size}" if self.num_replicas > 1 and shared else ""
        return f"tensor {self.tensor} x data {self.data}{split}{shared}{group}"
