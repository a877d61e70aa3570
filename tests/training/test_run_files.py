import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from crosscut.config import ConfigError, RunConfig
from crosscut.config.system.deletion import claim
from crosscut.logbook.following import RunReader, RunState
from crosscut.logbook.rows import append_row
from crosscut.logbook.schema import BY_NAME, METRICS_FILE, RESTARTS_FILE, RUN_FILES, Form
from crosscut.training.driving.preparation import fill_folder
from tests.ranks import RankPool
from tests.training.jobs import losses_of, rows_of, whole_run

EXPERTS = ('model.layers=["attention gelu", "attention experts"]', "model.experts.number=4")


def kinds_in(folder: Path) -> dict[str, set[str]]:
    """Kinds of the rows or objects in each file of a run. Raises `ValueError` for one that no kind has."""
    known = {file.name for file in RUN_FILES} | {".crosscut", "checkpoints"}
    assert {path.name for path in folder.iterdir()} <= known
    found = {}
    for file in RUN_FILES:
        path = folder / file.name
        if file.kinds and path.exists():
            lines = path.read_text().splitlines() if file.form is Form.ROWS else [path.read_text()]
            found[file.name] = {BY_NAME[file.name].require_known(json.loads(line)) for line in lines}
    return found


def test_files_of_a_run_have_the_keys_of_the_schema(
    ranks: RankPool, run_with: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The figures are those of the same run without samples, and the messages those of the plan."""
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 9)
    shared = (*EXPERTS, "evaluation.every=3", f"evaluation.text={text}", "layout.tensor=2", "training.steps=5")
    sampled = ("output.sample_every=2", "output.sample_prompt=The people", f"output.folder={tmp_path / 'sampled'}")
    run = run_with(*shared, *sampled)
    folder, plain = Path(run.output.folder), run_with(*shared)
    folder.mkdir()
    claim(folder)
    append_row(folder / RESTARTS_FILE, {"step": 2, "after": "tensor 1 x data 1"})  # of an earlier run
    ranks.run(2, whole_run, run)
    assert kinds_in(folder) == {
        "metrics.jsonl": {"first row", "step", "validation", "evaluation"},
        "experts.jsonl": {"first row", "step"},
        "samples.jsonl": {"first row", "sample"},
        "measurements.jsonl": {"first row", "measurement"},
        "summary.json": {"training"},
        "plan.json": {"plan"},
    }
    reader = RunReader(folder)
    reader.poll()
    assert [(sample["step"], sample["prompt"]) for sample in reader.samples] == [
        (2, ""), (2, "The people"), (4, ""), (4, "The people"),
    ]  # fmt: skip
    (measured,), (stage,) = reader.measurements, reader.plan["stages"]
    assert (measured["step"], measured["device"]) == (3, "cpu")
    assert measured["learning_rates"].keys() == {"embedding", "matrix", "scalar"}
    for rank in measured["ranks"]:
        assert rank["memory_bytes"] >= 0  # no growth in a process that was larger before
        assert (rank["messages"], rank["message_bytes"]) == (stage["messages"], stage["message_bytes"])
    assert [row["loss"] for row in rows_of(run) if "loss" in row] == ranks.run(2, losses_of, plain, 5)[0]
    assert (reader.state, reader.notes) == (RunState.FINISHED, {})


def test_a_run_that_is_refused_keeps_the_files_of_an_earlier_run(run_with, tmp_path):
    folder, model = tmp_path / "run", tmp_path / "model"
    for path in (folder / "initial" / "mine.txt", folder / METRICS_FILE, model / "tokenizer.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    claim(folder)
    run = run_with(f"output.folder={folder}")
    with pytest.raises(ConfigError, match="initial"):
        fill_folder(replace(run, training=replace(run.training, initialize_from=str(model))), None)
    assert (folder / METRICS_FILE).exists()


@pytest.mark.slow  # the command's own pipeline runs in `tests/training/pipeline`
def test_ranks_of_a_pipeline_are_planned_and_measured(ranks: RankPool, run_with: Callable[..., RunConfig]):
    run = run_with("layout.pipeline=2", "training.micro_batch_size=1", "training.steps=3")
    ranks.run(2, whole_run, run, time_limit=240)
    reader = RunReader(Path(run.output.folder))
    reader.poll()
    plan, (measured,) = reader.plan, reader.measurements
    assert [(rank["stage"], rank["places"]) for rank in plan["ranks"]] == [(0, {"pipeline": 0}), (1, {"pipeline": 1})]
    sent = [rank["messages"]["pipeline"] for rank in measured["ranks"]]
    assert sent == [plan["stages"][rank["stage"]]["messages"]["pipeline"] for rank in plan["ranks"]]


IN_A_PIPELINE = (
    "`output.sample_every` must be 0 in a pipeline, but is 2. The stages of a pipeline write no text. Remove "
    "`output.sample_every`, or set layout.pipeline=1."
)
OF_NO_TOKENS = (
    "`output.sample_tokens` must be at least 1 if `output.sample_every` is 2, but is 0. Set `output.sample_tokens`, or "
    "remove `output.sample_every`."
)


@pytest.mark.parametrize(
    ("settings", "told"), [("layout.pipeline=2", IN_A_PIPELINE), ("output.sample_tokens=0", OF_NO_TOKENS)]
)
def test_samples_that_cannot_be_written_are_refused(run_with, settings, told):
    with pytest.raises(ConfigError) as error:
        run_with("output.sample_every=2", settings)
    assert str(error.value) == told


def test_a_key_that_the_schema_lacks_is_found(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ValueError, match="has the keys loss, step"):
        kinds_in(tmp_path)
