"""ResNet of transformers with random weights, cut by a plan of its layers: its own code runs unchanged."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ResNetConfig, ResNetModel

from crosscut.cutting import Plan, Rule, cut
from crosscut.verification.foreign.cuts import ForeignCut
from tests.cutting.images.nets import GATHER, SPATIAL, SPLIT, Built
from tests.cutting.images.test_image_cuts import prove
from tests.ranks import RankPool
from tests.verification.foreign.test_cuts import assert_same

BLOCKS = "encoder.stages.*.layers.*"
INNER = [
    "embedder.embedder.normalization",
    "embedder.pooler",
    *(f"{BLOCKS}.{place}.{kind}" for place in ("layer.*", "shortcut") for kind in ("convolution", "normalization")),
]
RULES: dict[str, Rule] = {
    "embedder.embedder.convolution": SPLIT,
    **dict.fromkeys(INNER, SPATIAL),
    "pooler": GATHER,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "basic": {"embedding_size": 4, "hidden_sizes": [8, 12], "depths": [1, 2], "layer_type": "basic"},
    "bottleneck": {"embedding_size": 4, "hidden_sizes": [8, 12], "depths": [2, 1]},
}


def _loss(output: Any) -> Tensor:
    """Loss of the pooled output; the last hidden state stays in parts."""
    pooled: Tensor = output.pooler_output
    return pooled.square().mean() + pooled[:, 0].sum()


def _build(config: str) -> Built:
    return ResNetModel(ResNetConfig(**CONFIGS[config])), {"pixel_values": torch.randn(2, 3, 50, 61)}, _loss


def _proven(ranks: RankPool, config: str, *grid: int) -> None:
    (report,) = prove(
        ranks,
        [ForeignCut(partial(_build, config), partial(cut, plan=Plan(grid=grid, rules=RULES)))],
        grid[0] * grid[1],
    )
    assert_same(report)


@pytest.mark.slow  # a quick test proves a plain net
@pytest.mark.parametrize(("config", "grid"), [("basic", (1, 2)), ("bottleneck", (2, 2))])
def test_resnet_equals_the_uncut_model(ranks: RankPool, config: str, grid: tuple[int, int]) -> None:
    _proven(ranks, config, *grid)
