"""Layers over images whose depth, height and width are divided over the ranks of a grid (Dryden et al. 2019, arXiv
1903.06681).

- `spans`, `reaches`: positions that ranks hold, and positions that the outputs of an operator read
- `plan`: messages that follow from them, forward and backward (`parallel.exchange` sends them)
- `image`: grids of ranks, and images of which each rank has a part
- `overlap`: convolutions that compute while halos travel
- `windows`, `saving`: copies of the inputs of each rank's outputs, and halos that are saved for the backward pass
- `convolution`, `pooling`, `resizing`, `norm`: the layers
"""

from crosscut.parallel.spatial.convolution import (
    SpatialConv1d,
    SpatialConv2d,
    SpatialConv3d,
    SpatialConvTranspose1d,
    SpatialConvTranspose2d,
    SpatialConvTranspose3d,
)
from crosscut.parallel.spatial.image import (
    CutImage,
    ImageGrid,
    gather_image,
    make_grid,
    move_image,
    pointwise,
    scatter_image,
)
from crosscut.parallel.spatial.norm import SpatialBatchNorm, SpatialGroupNorm
from crosscut.parallel.spatial.plan import HaloMessages, Message, halo_messages, plan_linear_step, plan_step
from crosscut.parallel.spatial.pooling import SpatialAdaptiveMaxPool, SpatialAvgPool, SpatialMaxPool
from crosscut.parallel.spatial.resizing import SpatialAdaptiveAvgPool, SpatialUpsample
from crosscut.parallel.spatial.spans import Span

__all__ = [
    "CutImage",
    "HaloMessages",
    "ImageGrid",
    "Message",
    "Span",
    "SpatialAdaptiveAvgPool",
    "SpatialAdaptiveMaxPool",
    "SpatialAvgPool",
    "SpatialBatchNorm",
    "SpatialConv1d",
    "SpatialConv2d",
    "SpatialConv3d",
    "SpatialConvTranspose1d",
    "SpatialConvTranspose2d",
    "SpatialConvTranspose3d",
    "SpatialGroupNorm",
    "SpatialMaxPool",
    "SpatialUpsample",
    "gather_image",
    "halo_messages",
    "make_grid",
    "move_image",
    "plan_linear_step",
    "plan_step",
    "pointwise",
    "scatter_image",
]
