"""The cut of a run's layers into pipeline stages."""

from crosscut.architecture import describe
from crosscut.config import load_run
from crosscut.planner.flops import head_flops_per_token, layer_flops_per_token
from crosscut.planner.stages import schedule_of, stage_sizes


def run_of(*overrides: str):
    table = {"model": {"preset": "gpt2-small", "vocab_size": 50257}, "training": {"batch_size": 8}}
    return load_run(table, overrides)


def test_the_output_projection_counts_in_the_cut():
    run = run_of("layout.pipeline=4")
    layer = layer_flops_per_token(describe(run.model).layers[0], 1024)
    head = head_flops_per_token(run.model, 1024, 0.15)
    assert 2 * layer < head < 6 * layer, "the vocabulary is worth several layers"
    sizes = stage_sizes(run)
    assert sum(sizes) == 12
    assert sizes[-1] < min(sizes[:-1])
    longest = max(*(size * layer for size in sizes[:-1]), sizes[-1] * layer + head)
    assert longest < 3 * layer + head, "an even cut takes longer"


def test_given_stages_and_interleaved_stages_are_kept():
    assert stage_sizes(run_of("layout.pipeline=2", "layout.stages=[5,7]")) == (5, 7)
    assert (
        stage_sizes(run_of("layout.pipeline=2", "layout.stages_per_rank=3", "training.micro_batch_size=1")) == (2,) * 6
    )
    assert stage_sizes(run_of()) == (12,)


def test_a_recomputed_layer_costs_more_than_the_head():
    plain, again = (stage_sizes(run_of("layout.pipeline=2", f"training.recompute={mode}")) for mode in ("none", "full"))
    assert again[-1] >= plain[-1]


def test_the_schedule_follows_the_layout():
    assert schedule_of(run_of("layout.pipeline=2").layout, 8).num_chunks == 1
    zero = schedule_of(run_of("layout.pipeline=2", "layout.schedule=zero_bubble").layout, 8)
    assert zero.separates_weights
    interleaved = run_of("layout.pipeline=2", "layout.stages_per_rank=2", "training.micro_batch_size=1").layout
    assert schedule_of(interleaved, 8).num_stages == 4
