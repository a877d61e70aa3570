"""Matrix products and elementwise kernels for one device, in plain and fast versions. Nothing is sent between ranks."""

from crosscut.kernels.loss_passes import LossPasses
from crosscut.kernels.products import FLOAT8, ORDINARY, Products

__all__ = ["FLOAT8", "ORDINARY", "LossPasses", "Products"]
