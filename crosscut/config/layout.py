"""How ranks are arranged: the axes of the device mesh and their sizes."""

from dataclasses import dataclass

from crosscut.config.checks import require_at_least


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The number of ranks along each axis. No value of it changes the model that is trained.

    Tensor groups are adjacent ranks and data groups stride across them, as in the paper's Figure 5: rank =
    data_rank * tensor + tensor_rank.
    """

    tensor: int = 1
    """Ranks that share every layer: columns of the first matrix, rows of the second. Must divide the heads."""

    data: int = 1
    """Copies of the model, each on its own part of the batch."""

    sequence_parallel: bool = False
    """Also split layer norms, dropout and residuals along the sequence over the tensor ranks: the same traffic, and
    less memory for what lies between the cut matrices (their gathered inputs are kept whole)."""

    def __post_init__(self) -> None:
        require_at_least("layout.tensor", self.tensor, 1)
        require_at_least("layout.data", self.data, 1)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.data

    def __str__(self) -> str:
        split = ", sequence parallel" if self.sequence_parallel else ""
        return f"tensor {self.tensor} x data {self.data}{split}"
