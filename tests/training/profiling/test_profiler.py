"""A profile is of the run as it is, and says of it what is known otherwise."""

import gzip
import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from crosscut.config import ConfigError
from crosscut.config.system.markers import MARKER_FILE
from crosscut.planner import parameters_per_rank
from crosscut.planner.stages import schedule_of_run
from crosscut.training.profiling.profiler import _operators, require_steps
from crosscut.training.profiling.trace import STEP_NAME
from crosscut.training.speed import compilation
from tests.refusals import refusal
from tests.training.jobs import loop


@pytest.mark.slow
def test_profile_of_two_ranks_tells_of_the_run_and_does_not_change_it(ranks, run_with, tmp_path):
    plain_run = run_with("training.steps=10", "layout.tensor=2", f"output.folder={tmp_path / 'plain'}")
    plain = ranks.run(2, loop, plain_run)[0]
    run = run_with("training.steps=10", "layout.tensor=2")
    results = ranks.run(2, loop, run, None, None, True)
    for name, weight in plain["weights"].items():
        assert torch.equal(weight, results[0]["weights"][name]), name

    folder = Path(run.output.folder) / "profile"
    assert {path.name for path in folder.iterdir()} == {MARKER_FILE, "profile.json", "parts.json", "trace.json.gz"}
    told = json.loads((folder / "profile.json").read_text())
    assert [step["step"] for step in told["steps"]] == [4, 5, 6], "as everywhere, counted from 1"
    for step in told["steps"]:
        parts = [step[name] for name in ("compute", "overlapped", "communication", "idle")]
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) >= 0.0
        assert step["compute"] > 0.0
        assert step["communication"] > 0.0
    assert [len(seconds) for seconds in told["seconds_of_ranks"]] == [3, 3]
    calls = {operator["name"]: operator["calls"] for operator in told["operators"]}
    # In a step g forward and f backward of two blocks' attention and MLP and of embedding and loss, two sums of the
    # loss, one of the norm; the validation after step 3 lies between.
    sums = [calls.get(f"_c10d_functional::{name}", 0.0) for name in ("all_reduce", "all_reduce_")]
    assert sum(sums) == 2 * 2 * 2 + 2 + 2 + 1

    with gzip.open(folder / "trace.json.gz", "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "crosscut step 4", "crosscut step 6"} <= names

    holders = told["holders"]
    assert sum(holders.values()) == told["peak_bytes"]
    held = 4 * parameters_per_rank(run.model, run.layout)
    assert holders["parameters"] == held
    assert 2 * held <= holders["AdamW's moments"] < 2.1 * held
    # It is in the loss: only the vocabulary's is there, of 512 / 2 ranks entries.
    assert holders["gradients"] == 4 * 256 * 64
    # GeLU's output in both layers, [4 sequences, 32 tokens, 4 x 64 / 2 ranks] in float32.
    assert [size for name, size in holders.items() if name.startswith("GeLU (kernels/gelu.py")] == [
        2 * 4 * 32 * 128 * 4
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "batch_size", "num_layers"),
    [("pipeline=2 schedule=zero_bubble", 4, 2), ("pipeline=2 stages_per_rank=2 data=2", 8, 4)],
)
def test_profile_of_a_pipeline_tells_bubble_and_waiting_apart_and_does_not_change_the_run(
    ranks, run_with, tmp_path, layout, batch_size, num_layers
):
    settings = ("training.steps=10", "training.validate_every=0", "checkpoint.every=0", "training.micro_batch_size=1")
    settings = (*settings, f"model.num_layers={num_layers}", f"training.batch_size={batch_size}")
    settings = (*settings, *(f"layout.{setting}" for setting in layout.split()))
    run = run_with(*settings)
    size = run.layout.world_size
    plain = ranks.run(size, loop, run_with(*settings, f"output.folder={tmp_path / 'plain'}"), time_limit=300.0)
    profiled = ranks.run(size, loop, run, None, None, True, time_limit=300.0)
    for before, after in zip(plain, profiled, strict=True):
        assert all(torch.equal(weight, after["weights"][name]) for name, weight in before["weights"].items())

    folder = Path(run.output.folder) / "profile"
    rows = json.loads((folder / "profile.json").read_text())["pipelines"]
    places = [(row["step"], row["pipeline"], row["rank"]) for row in rows]
    assert places == [(step, line, rank) for step in (4, 5, 6) for line in range(run.layout.data) for rank in (0, 1)]
    for row in rows:
        assert row["stages"] == list(range(row["rank"], run.layout.num_stages, 2))
        shares = [row[name] for name in ("computing", "bubble", "waiting", "rest")]
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) >= 0.0
        matrices = 5 if run.layout.data == 1 else 0  # of one layer, if the schedule defers their gradients
        assert row["weight_gradients"] == run.num_micro_batches * matrices
    written = json.loads((folder / "passes.json").read_text())
    assert [(row["step"], row["pipeline"], row["rank"]) for row in written] == places
    for row in written:
        actions = schedule_of_run(run).actions[row["rank"]]
        assert [name for name, _, _ in row["passes"]] == [str(action) for action in actions]
        assert all(start < end for _, start, end in row["passes"])
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"pass F0", "pass B3", "crosscut step 4"} <= names


def test_compiled_graphs_are_not_told_apart_by_the_hashes_of_their_code():
    with torch.profiler.profile() as recorder, torch.profiler.record_function(f"{STEP_NAME} 1"):
        for name in ("fabc", "fdef"):
            with torch._C._profiler._RecordFunctionFast(f"## Call CompiledFxGraph {name} ##"):
                torch.ones(8)
    calls = {operator.name: operator.calls for operator in _operators(recorder.events())}
    assert calls["compiled graph"] == 2
    assert not any("#" in name for name in calls)


def compiled_loop(run):
    with mock.patch.object(compilation, "BACKEND", "aot_eager"):
        loop(run, profile=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_on_the_cpu_have_no_account_of_memory(ranks, run_with):
    run = run_with("training.steps=10", "training.validate_every=0", "model.dropout=0.0", "training.compile=on")
    ranks.run(1, compiled_loop, run)
    told = json.loads((Path(run.output.folder) / "profile" / "profile.json").read_text())
    assert told["holders"] == {}
    parts = json.loads((Path(run.output.folder) / "profile" / "parts.json").read_text())["ranks"][0]["parts"]
    layers = [row for row in parts if row["layer"] is not None]
    assert [(row["layer"], row["part"]) for row in layers] == [(0, "layer"), (1, "layer")], "a graph has no parts"
    assert all(row["forward_flops"] and row["backward_seconds"] and row["parameters"] for row in layers)
    assert told["steps"][0]["compute"] > 0.0


def test_run_with_too_few_steps_for_a_profile_is_refused():
    require_steps(10)
    assert refusal(ConfigError, require_steps, 9) == (
        "`training.steps` must leave at least 10 steps for --profile, but leaves 9. Train for more steps, or "
        "remove --profile."
    )
