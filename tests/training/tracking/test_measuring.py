import pytest
import torch

from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.config.parts.experts import ExpertsConfig
from crosscut.training.tracking.measuring import plan_of

MIXTURE = ModelConfig(
    num_layers=2, hidden_size=16, num_heads=4, vocab_size=300, max_sequence_length=32,
    layers=("attention experts",), experts=ExpertsConfig(number=4, per_token=2, size=16),
)  # fmt: skip
LAYOUTS = {
    Layout(data=2): {"replica"},
    Layout(data=4, sharding="zero3", shard_group=2): {"replica", "shard"},
    Layout(context=2, tensor=2): {"context", "tensor"},
    Layout(data=2, expert=2): {"replica"},
    Layout(pipeline=2, data=2): {"pipeline", "replica"},
}
"""Axes of more than one rank in each layout."""


@pytest.mark.parametrize(("layout", "axes"), LAYOUTS.items(), ids=map(str, LAYOUTS))
def test_a_plan_has_the_place_and_the_stage_of_every_rank(layout: Layout, axes: set[str]) -> None:
    run = RunConfig(model=MIXTURE, layout=layout, training=TrainingConfig(batch_size=8, sequence_length=32))
    plan = plan_of(run, torch.device("cpu"))
    assert plan["axes"].keys() == axes
    places = [tuple(rank["places"].values()) for rank in plan["ranks"]]
    assert len(set(places)) == len(places) == layout.world_size
    assert len(plan["stages"]) == layout.pipeline
    assert all(stage["memory_bytes"] > 0 and stage["messages"] for stage in plan["stages"])
