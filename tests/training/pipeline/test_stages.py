"""What the stages of a pipeline do beside the numbers: products, messages, replicas, failures."""

import pytest

from crosscut.config import ConfigError, LayoutError, load_run
from tests.training.jobs import poisoned_step, record_step
from tests.training.pipeline.jobs import (
    EXACT,
    LLAMA,
    accumulations,
    deferred_per_backward,
    drift_after,
    flops_of_step,
    most_leaving,
    sent_by_stage,
)
from tests.training.pipeline.test_equality import FOUR, layout_of

SCHEDULES = ["pipeline=2", "pipeline=2 stages_per_rank=2", "pipeline=2 schedule=zero_bubble"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_schedule_computes_a_product_twice(ranks, run_with, recompute):
    settings = (*FOUR, f"training.recompute={recompute}")
    alone = ranks.run(1, flops_of_step, run_with(*settings))[0]
    for schedule in SCHEDULES[1:]:
        found = ranks.run(2, flops_of_step, run_with(*settings, *layout_of(schedule)))
        assert sum(found) == alone
        assert min(found) > 0.3 * alone


def test_each_backward_pass_puts_off_the_gradient_of_each_matrix_once(ranks, run_with):
    run = run_with(*EXACT, "layout.pipeline=2", "layout.schedule=zero_bubble", "layout.stages=[3,1]")
    first, last = ranks.run(2, deferred_per_backward, run)
    matrices = 5  # query, key and value, the output of attention, and both of the MLP
    assert first == [3 * matrices] * 8
    assert last == [1 * matrices] * 8
    first, _ = ranks.run(
        2, deferred_per_backward, run_with(*EXACT, *LLAMA, *layout_of(SCHEDULES[2]), "layout.stages=[2,2]")
    )
    assert first == [2 * 6] * 8


def test_each_gradient_grows_once_per_micro_batch_though_hooks_of_deferred_ones_fire_twice(ranks, run_with):
    """Autograd calls the hooks of a deferred weight after the backward pass, too, although nothing was added then. No
    reducer may count these calls.
    """
    for schedule in SCHEDULES[1:]:
        for of_rank in ranks.run(2, accumulations, run_with(*FOUR, *layout_of(schedule))):
            assert {grown for _, grown in of_rank.values()} == {4}
            fired = {name: number for name, (number, _) in of_rank.items()}
            deferred = {name for name in fired if ".weight" in name and "norm" not in name and "blocks" in name}
            twice = deferred if "zero_bubble" in schedule else set()
            assert fired == {name: 8 if name in twice else 4 for name in fired}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", SCHEDULES[::-1])
def test_each_micro_batch_sends_its_hidden_states_and_their_gradient_once(ranks, run_with, schedule):
    run = run_with(*EXACT, *layout_of(schedule))
    stages, shape = run.layout.num_stages, (1, 32, run.model.hidden_size)
    sent = [message for of_rank in ranks.run(2, sent_by_stage, run) for message in of_rank]
    assert sorted(sent) == sorted([("F", shape), ("B", shape)] * (8 * (stages - 1)))


def test_a_rank_frees_what_it_sent_once_a_message_shows_that_it_arrived(ranks, run_with):
    run = run_with(*EXACT[:3], "training.batch_size=16", "layout.pipeline=2")
    assert ranks.run(2, most_leaving, run) == [2, 2]  # of 16


def test_a_split_sequence_sends_each_rank_s_part(ranks, run_with):
    run = run_with(*FOUR, *layout_of("pipeline=2 tensor=2 sequence_parallel=true"))
    for of_rank in ranks.run(4, sent_by_stage, run):
        assert {shape for _, shape in of_rank} == {(2, 16, run.model.hidden_size)}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("sharding", ["zero3", "zero2", "none"])
@pytest.mark.parametrize("schedule", SCHEDULES[::-1])
def test_gradients_are_summed_once_per_step(ranks, run_with, schedule, sharding):
    """Not once per micro-batch, whatever the schedule; the tied embedding once more, over both ends."""
    run = run_with(*FOUR, *layout_of(f"{schedule} data=2 sharding={sharding}"))
    for rank, sent in enumerate(ranks.run(4, record_step, run)):
        own = [operation for operation, axis, elements, _ in sent if axis == "data" and elements > 2]
        units = 1 + 2  # the root, and the layers of a rank
        assert own.count("all_gather") == (0 if sharding == "none" else units)
        assert own.count("reduce_scatter") == (0 if sharding == "none" else units)
        assert own.count("all_reduce") == (1 if sharding == "none" else 0)
        sums = [(axis, elements) for operation, axis, elements, _ in sent if operation == "all_reduce"]
        tied = [elements for axis, elements in sums if axis == "pipeline" and elements > 2]
        vocabulary = run.model.padded_vocab_size if hasattr(run.model, "padded_vocab_size") else 512
        assert tied == [vocabulary * run.model.hidden_size // (1 if sharding == "none" else 2)], rank


def test_the_replica_guard_compares_the_copies_of_the_tied_embedding(ranks, run_with):
    run = run_with(*EXACT, "layout.pipeline=4")
    for drift in ranks.run(4, drift_after, run, "tokens.weight", 3):
        assert drift.name == "tokens.weight"
        assert set(drift.ranks) == {0, 3}
        assert drift.size > 0.1


def test_the_replica_guard_compares_the_replicas_of_a_stage(ranks, run_with):
    run = run_with(*EXACT, "layout.pipeline=2", "layout.data=2")
    for drift in ranks.run(4, drift_after_on_last_stage, run):
        assert drift.name == "blocks.3.mlp.expand.weight"
        assert set(drift.ranks) == {2, 3}


def drift_after_on_last_stage(run):
    from torch import distributed

    name = "blocks.3.mlp.expand.weight" if distributed.get_rank() >= 2 else "blocks.0.mlp.expand.weight"
    return drift_after(run, name, 3)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("schedule", SCHEDULES[::-1])
def test_all_stages_skip_a_step_that_is_not_finite_and_name_the_origin(ranks, run_with, layer, schedule):
    run = run_with(*FOUR, *layout_of(schedule))
    name = f"blocks.{layer}.mlp.expand.bias"
    for found in ranks.run(2, poisoned_step, run, name, float("nan")):
        assert found["unchanged"]
        assert f"in the output of `blocks.{layer}.mlp" in found["message"]


MODEL = {"model": {"preset": "laptop-small", "vocab_size": 500}}


def refusal(*overrides: str, error: type[Exception] = LayoutError) -> str:
    with pytest.raises(error) as refused:
        load_run(MODEL, overrides)
    return str(refused.value)


def test_more_stages_than_layers_are_refused():
    assert refusal("layout.pipeline=8") == (
        "`layout.pipeline` must leave at least one layer for each stage, but `model.num_layers` is 4 and there are 8 "
        "stages (`layout.pipeline` 8 x `layout.stages_per_rank` 1). Use fewer stages."
    )


def test_layers_that_do_not_divide_into_interleaved_stages_are_refused():
    assert refusal("model.num_layers=6", "layout.pipeline=2", "layout.stages_per_rank=2").startswith(
        "`layout.stages_per_rank` must split the layers evenly, but `model.num_layers` is 6 and there are 4 stages"
    )


def test_micro_batches_that_are_no_multiple_of_interleaved_ranks_are_refused():
    batch = ("training.batch_size=6", "training.micro_batch_size=2")
    assert refusal("layout.pipeline=2", "layout.stages_per_rank=2", *batch) == (
        "With `layout.stages_per_rank` 2, the number of micro-batches per step must be a multiple of "
        "`layout.pipeline` (2), but is 3 (`training.batch_size` 6 / `layout.data` 1 / 2 sequences per micro-batch). "
        "Change `training.micro_batch_size`, or remove `layout.stages_per_rank`."
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["layout.stages_per_rank=2"], "`layout.stages_per_rank` must be 1 without a pipeline, but is 2."),
        (["layout.pipeline=2", "layout.stages=[1,1,2]"], "each of the 2 stages (`layout.pipeline` 2 x"),
        (["layout.pipeline=2", "layout.stages=[1,2]"], "`layout.stages` must add up to `model.num_layers` (4), but"),
        (["layout.pipeline=2", "layout.stages=[0,4]"], "`layout.stages` must be at least 1, but is 0."),
        (
            ["layout.pipeline=2", "layout.stages_per_rank=2", "layout.schedule=zero_bubble"],
            '`layout.stages_per_rank` must be 1 with layout.schedule="zero_bubble", but is 2.',
        ),
    ],
    ids=["no-pipeline", "number", "sum", "empty", "zero-bubble"],
)
def test_other_stages_that_cannot_be_are_refused(settings, told):
    assert told in refusal(*settings, error=ConfigError)


def test_zero_bubble_is_not_compiled():
    told = refusal(
        "layout.pipeline=2", "layout.schedule=zero_bubble", "training.compile=on", "model.dropout=0", error=ConfigError
    )
    assert '"zero_bubble" separates them' in told
