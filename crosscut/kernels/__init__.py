"""Products and passes on one device, ordinary or fast. This room knows nothing of ranks."""

from crosscut.kernels.loss_passes import LossPasses
from crosscut.kernels.products import FLOAT8, ORDINARY, Products

__all__ = ["FLOAT8", "ORDINARY", "LossPasses", "Products"]
