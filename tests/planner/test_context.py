"""Forecasts of runs whose sequences context ranks share."""

from dataclasses import replace
from pathlib import Path

import pytest

from crosscut.config import LayoutError, RunConfig, load_run
from crosscut.planner import flops_per_step, forecast_memory, step_traffic
from crosscut.planner.activations import activations_held
from crosscut.planner.facts import to_json
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.search import search_layouts
from tests.config.test_examples import tries_of

H100 = KNOWN_HARDWARE["h100-sxm"]
LENGTH = 32_768


def _run(context: int, way: str = "auto", **training: object) -> RunConfig:
    model = {"num_layers": 4, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 32_000}
    options = {
        "sequence_length": LENGTH,
        "batch_size": 8,
        "micro_batch_size": 1,
        "precision": "float32",
        "compile": "off",
        **training,
    }
    return load_run(
        {
            "model": {**model, "max_sequence_length": LENGTH, "dropout": 0.0, "positions": "rotary"},
            "training": options,
            "layout": {"context": context, "context_attention": way},
        }
    )


@pytest.mark.parametrize(("way", "least", "most"), [("ring", 4.0, 4.2), ("all_to_all", 3.7, 4.0), ("gather", 2.0, 3.7)])
def test_activations_fall_with_the_number_of_ranks(way: str, least: float, most: float) -> None:
    """The ring repeats no heads for a kernel; all-to-all keeps the results of attention twice; and the gather keeps the
    keys and values of the whole sequence.
    """
    whole, part = activations_held(_run(1)), activations_held(_run(4, way))
    assert least < whole / part < most


def test_with_a_recomputed_core_they_fall_alike_for_every_way() -> None:
    held = [activations_held(_run(4, way, recompute="selective")) for way in ("ring", "all_to_all", "gather")]
    assert len(set(held)) == 1
    assert activations_held(_run(1, recompute="selective")) == 4 * held[0]


def test_the_work_of_a_step_does_not_depend_on_who_does_it() -> None:
    assert flops_per_step(_run(4)) == flops_per_step(_run(1))


def test_a_search_keeps_the_context_of_the_run() -> None:
    plans = search_layouts(_run(2), H100, 8)
    layouts = [plan.candidate.layout for plan in plans.fitting]
    assert {layout.world_size for layout in layouts} == {8}
    assert {layout.context for layout in layouts} == {2}
    assert {layout.tensor for layout in layouts} == {1, 2, 4}
    assert not any(layout.shard_group for layout in layouts)
    assert "context" in {entry.collective.axis for entry in plans.fitting[0].time.exchanges}
    fastest = to_json(plans, top=1, tokens=None, price=None)["plans"][0]
    assert (fastest["context"], fastest["context_attention"]) == (2, plans.fitting[0].candidate.context_attention.way)


def test_a_sharded_copy_belongs_to_data_and_context_ranks() -> None:
    run = replace(_run(4), layout=replace(_run(4).layout, data=2, sharding="zero3"))
    alone = replace(_run(1), layout=replace(_run(1).layout, data=8, sharding="zero3"))
    assert forecast_memory(run).optimizer == forecast_memory(alone).optimizer
    assert {c.axis for c in step_traffic(run)} == {"context", "shard"}


def test_the_devices_must_make_whole_groups() -> None:
    with pytest.raises(LayoutError, match=r"`--gpus` must be a multiple of `layout.context` \(4\), but is 6. Try 8"):
        search_layouts(_run(4), H100, 6)


def test_the_ring_sends_the_keys_and_values_of_a_rank() -> None:
    shifts = [c for c in step_traffic(_run(4, "ring", precision="bfloat16")) if c.operation == "shift"]
    keys_and_values = LENGTH // 4 * 2 * 8 * 64
    assert {c.elements for c in shifts} == {keys_and_values}
    counts = sorted((c.count, c.element_bytes) for c in shifts)
    assert counts == [(4 * 8, 4), (4 * 8 * 3, 2), (4 * 8 * 3, 2), (4 * 8 * 3, 4)]
    assert {c.wire_bytes / c.count / c.element_bytes for c in shifts} == {keys_and_values}


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "long-context.toml"


@pytest.mark.parametrize("longer", [1, 4], ids=["32,768 tokens", "131,072 tokens"])
def test_the_shipped_run_over_long_sequences_fits(longer: int) -> None:
    tries = [[], *tries_of(EXAMPLE)]
    run = next(
        run for run in (load_run(EXAMPLE, words) for words in tries) if run.training.sequence_length == longer * LENGTH
    )
    assert run.layout.world_size == 8
    assert 25e9 < forecast_memory(run).total < 0.8 * H100.memory
