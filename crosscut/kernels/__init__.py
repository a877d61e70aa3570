"""Matrix products and passes over memory on one device, in ordinary and fast versions. Knows nothing about ranks."""

from crosscut.kernels.loss_passes import LossPasses
from crosscut.kernels.products import FLOAT8, ORDINARY, Products

__all__ = ["FLOAT8", "ORDINARY", "LossPasses", "Products"]
