"""Matrix products and elementwise kernels for a single device, in plain and in fast versions. This package sends
nothing between ranks.
"""

from crosscut.kernels.loss_passes import LossPasses
from crosscut.kernels.products import FLOAT8, ORDINARY, Products

__all__ = ["FLOAT8", "ORDINARY", "LossPasses", "Products"]
