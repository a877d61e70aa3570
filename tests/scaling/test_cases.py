"""Which runs are compared."""

import re

import pytest

from crosscut.config import PRESETS, ConfigError, ModelConfig, ResolvedRun, load_run, resolve
from crosscut.config.layouts.growth import grow
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.config.parts.mamba2 import Mamba2Config
from crosscut.planner import count_parameters
from crosscut.scaling.cases import (
    DEFAULT_RUNS,
    STRONG_SCALING,
    Case,
    Devices,
    Study,
    choose_devices,
    study_cases,
    whole_ranks,
)


def cpu_run(*overrides: str) -> ResolvedRun:
    return resolve(load_run(DEFAULT_RUNS["cpu"], overrides), device="cpu", precision="float32")


DEFAULT = cpu_run()
TWO_CORES = Devices(kind="cpu", count=2, most=4)


def layouts(cases: list[Case]) -> list[dict[str, int]]:
    """Of each case the axes with several ranks."""
    return [{axis: size for axis, size in case.run.layout.axes.items() if size > 1} for case in cases]


@pytest.mark.parametrize(("tensor", "paper"), [(2, "megatron-2.5b"), (4, "megatron-4.2b"), (8, "megatron-8.3b")])
def test_the_papers_smallest_model_grows_the_papers_heads(tensor: int, paper: str) -> None:
    small, large = (ModelConfig(**PRESETS[name]) for name in ("megatron-1.2b", paper))
    grown = grow(small, tensor)
    assert (grown.num_heads, grown.hidden_size, grown.mlp_size) == (large.num_heads, large.hidden_size, large.mlp_size)
    assert count_parameters(grown) == pytest.approx(count_parameters(large), rel=0.15)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_default_models_layers_hold_the_same_on_every_rank(kind: str, tensor: int) -> None:
    one = load_run(DEFAULT_RUNS[kind]).model
    grown = grow(one, tensor)
    rank, whole = (model.num_layers * model.hidden_size**2 / ranks for model, ranks in ((grown, tensor), (one, 1)))
    assert rank == pytest.approx(whole, rel=0.03)


def test_a_model_of_other_structure_grows_as_such() -> None:
    llama = ModelConfig(
        num_layers=4, hidden_size=48, num_heads=6, num_kv_heads=2, head_size=16, mlp_size=132, positions="rotary"
    )
    assert grow(llama, 1) == llama
    grown = grow(llama, 4)
    assert (grown.num_heads, grown.num_kv_heads, grown.head_size) == (12, 4, 16)
    assert (grown.hidden_size, grown.mlp_size) == (96, 264)


@pytest.mark.parametrize(("layers", "num_heads"), [(("mamba2 gelu",), 0), (("mamba2 gelu", "attention"), 4)], ids=str)
def test_state_space_heads_grow_with_the_width(layers: tuple[str, ...], num_heads: int) -> None:
    sizes = Mamba2Config(head_size=8, state_size=4)
    model = ModelConfig(num_layers=4, hidden_size=48, num_heads=num_heads, layers=layers, mamba2=sizes)
    assert grow(model, 1) == model
    grown = grow(model, 4)
    assert (grown.num_heads, grown.hidden_size) == (2 * num_heads, 96 if num_heads else 80)
    assert grown.mamba2.num_heads == grown.hidden_size // 4  # twice the hidden size, as before
    require_tensor_axis(grown, 4)


def test_two_cores_are_compared_up_to_twice_as_many_ranks() -> None:
    studies, left_out = study_cases(DEFAULT, TWO_CORES)
    assert layouts(studies["tensor"]) == [{}, {"tensor": 2}, {"tensor": 4}]
    assert layouts(studies["data"]) == [{"data": 2}, {"data": 4}, {"data": 2, "tensor": 2}]
    assert [case.run.training.batch_size for case in studies["data"]] == [16, 32, 16]
    assert left_out == []


@pytest.mark.parametrize(("study", "axis"), STRONG_SCALING.items())
def test_strong_scaling_is_one_model_and_one_batch_on_more_ranks_of_one_axis(study: Study, axis: str) -> None:
    studies, _ = study_cases(DEFAULT, TWO_CORES)
    assert layouts(studies[study]) == [{}, {axis: 2}, {axis: 4}]
    assert {case.run.model for case in studies[study]} == {DEFAULT.model}
    assert {case.run.training.batch_size for case in studies[study]} == {8}
    assert studies["tensor"][0] == studies[study][0]


@pytest.mark.parametrize(
    ("batch", "asked", "sizes"),
    [
        (8, 0, [8, 1, 1]),  # one sequence each is the most that there is
        (64, 0, [64, 8, 4]),
        (48, 0, [48, 6, 3]),
        (64, 2, [2, 2, 2]),  # a run's own smaller micro-batches stay
        (6, 3, [3, 1, 1]),
    ],
)
def test_a_rank_of_a_pipeline_has_four_micro_batches_if_the_batch_allows(
    batch: int, asked: int, sizes: list[int]
) -> None:
    run = cpu_run(f"training.batch_size={batch}", f"training.micro_batch_size={asked}")
    studies, _ = study_cases(run, TWO_CORES)
    assert [case.run.config.micro_batch_size for case in studies["pipeline"]] == sizes


def test_one_process_has_all_cores_and_a_rank_one_thread() -> None:
    studies, _ = study_cases(DEFAULT, TWO_CORES)
    assert [case.threads for case in studies["process"]] == [2, 2]
    assert [case.run.model for case in studies["process"]] == [case.run.model for case in studies["tensor"][:2]]
    assert {case.threads for name, cases in studies.items() if name != "process" for case in cases} == {1}
    assert "process" not in study_cases(DEFAULT, Devices(kind="cuda", count=4, most=4)).studies


def test_a_runs_batch_is_that_of_a_data_rank_and_its_options_stay() -> None:
    overrides = ("layout.data=2", "layout.tensor=2", "layout.sequence_parallel=true", 'layout.sharding="zero3"')
    run = cpu_run(*overrides)
    two = next(case.run for case in study_cases(run, TWO_CORES).studies["data"] if case.run.layout.tensor == 2)
    assert (two.training.batch_size, two.training.device) == (8, "cpu")
    assert (two.layout.sequence_parallel, two.layout.sharding) == (True, "zero3")


def test_numbers_of_ranks_of_a_runs_layout_are_replaced_and_its_schedule_stays() -> None:
    stages = ("layout.pipeline=2", "layout.stages=[3, 1]", 'layout.schedule="zero_bubble"')
    own = study_cases(cpu_run(*stages, "layout.context=2"), TWO_CORES)
    chosen = study_cases(cpu_run('layout.schedule="zero_bubble"'), TWO_CORES)
    assert own == chosen
    stages = ("layout.pipeline=4", "layout.stages_per_rank=2", "model.num_layers=8", "training.micro_batch_size=1")
    interleaved, left_out = study_cases(cpu_run(*stages), TWO_CORES)
    assert [case.run.layout.stages_per_rank for case in interleaved["pipeline"]] == [1, 2, 2]
    assert left_out == []


@pytest.mark.parametrize(
    ("overrides", "study", "most", "reason"),
    [
        (
            ("model.num_heads=2",),
            "strong",
            2,
            "`layout.tensor` must divide `model.num_heads` (2), but is 4. Try 1 or 2.",
        ),
        (
            ("model.num_layers=3",),
            "pipeline",
            2,
            "`layout.pipeline` must leave at least one layer for each stage, but ",
        ),
        (
            *(("model.dropout=0.1", 'layout.context_attention="ring"'), "context", 1),
            '`model.dropout` must be 0 with layout.context_attention="ring", but is 0.1. ',
        ),
        (
            ('model.head="masked_tokens"', 'model.attention="bidirectional"', 'data.objective="masked"'),
            *("context", 1, '`layout.context` must be 1 for a model with `model.head` = "masked_tokens", but is 2. '),
        ),
    ],
)
def test_ranks_that_a_run_does_not_allow_are_left_out_with_the_reason(
    overrides: tuple[str, ...], study: Study, most: int, reason: str
) -> None:
    studies, (sentence,) = study_cases(cpu_run(*overrides), TWO_CORES)
    ranks = f"{2 * most} or more {STRONG_SCALING[study]} ranks"
    assert sentence.startswith(f"Strong scaling has no row with {ranks}: {reason}")
    for name in STRONG_SCALING:
        largest = most if name == study else 4
        assert max(case.run.layout.world_size for case in studies[name]) == largest


@pytest.mark.parametrize(
    ("name", "ranks", "cores", "gpus", "kind", "count", "most"),
    [
        ("auto", None, 2, 0, "cpu", 2, 4),
        ("auto", None, 6, 1, "cpu", 6, 4),
        ("auto", None, 64, 0, "cpu", 64, 8),
        ("auto", None, 2, 2, "cuda", 2, 2),
        ("auto", None, 2, 16, "cuda", 16, 8),
        ("cpu", 2, 2, 8, "cpu", 2, 2),
        ("cuda", 16, 2, 16, "cuda", 16, 16),
    ],
)
def test_ranks_are_found_from_the_machine(
    name: str, ranks: int | None, cores: int, gpus: int, kind: str, count: int, most: int
) -> None:
    found = choose_devices(name, ranks, cores=cores, gpus=gpus)
    assert (found.kind, found.count, found.most) == (kind, count, most)


MEASURE, RANKS = "`crosscut study measure` must have", "`--ranks` must be at most 4"


def test_more_ranks_than_cores_share_them() -> None:
    assert [TWO_CORES.sharing(ranks) for ranks in (1, 2, 4)] == [1, 1, 2]
    assert [whole_ranks(Devices(kind="cpu", count=count, most=4)) for count in (2, 3, 16)] == [2, 2, 4]


@pytest.mark.parametrize(
    ("name", "ranks", "cores", "gpus", "message"),
    [
        ("auto", None, 1, 1, f"{MEASURE} at least 2 cores for its ranks, but has 1. Give the process more cores."),
        ("cuda", None, 8, 1, f"{MEASURE} at least 2 GPUs for its ranks, but has 1. Set training.device=cpu."),
        ("cpu", 1, 2, 0, "`--ranks` must be a power of two above 1, but is 1. Try 2."),
        ("cpu", 6, 2, 0, "`--ranks` must be a power of two above 1, but is 6. Try 4."),
        ("auto", 8, 2, 4, f"{RANKS}, the number of this machine's GPUs, but is 8. Choose a smaller power of two."),
    ],
)
def test_what_cannot_be_compared_is_told(name: str, ranks: int | None, cores: int, gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        choose_devices(name, ranks, cores=cores, gpus=gpus)
