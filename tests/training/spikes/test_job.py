"""A whole run reads a record of skips, and a resumed run keeps to its own."""

from pathlib import Path

import pytest

from crosscut.checkpoint import folder_at, read_manifest
from crosscut.config import ConfigError
from crosscut.logbook.skips import SampleSkip, SkipRecord, own_record
from crosscut.training.requirements import require_for_tuning
from tests.training.jobs import rows_of, whole_run
from tests.training.test_resume import checkpoint_of

RECORD = SkipRecord(skips=(SampleSkip(4, 8),))


def skips_at(run, step: int) -> tuple:
    return read_manifest(folder_at(checkpoint_of(run, step))).progress.skips


def samples_of(run) -> list[int]:
    return [row["samples"] for row in rows_of(run) if "samples" in row]


def test_a_new_run_leaves_out_what_the_record_of_another_run_says(ranks, run_with, tmp_path):
    RECORD.write(tmp_path)
    run = run_with(f"training.skips={tmp_path}/spikes/skips.json")
    ranks.run(1, whole_run, run)
    assert samples_of(run) == [4, 8, 12, 16, 28, 32]
    assert (skips_at(run, 3), skips_at(run, 6)) == (((4, 8),), ((4, 8),))
    assert own_record(Path(run.output.folder)) == RECORD


def test_a_killed_run_resumes_before_the_return_and_drops_the_later_checkpoints(ranks, run_with):
    run = run_with("training.validate_every=0")
    ranks.run(1, whole_run, run)
    RECORD.write(Path(run.output.folder))  # as if the run had been killed right after the record was written
    ranks.run(1, whole_run, run, True)
    assert samples_of(run) == [4, 8, 12, 16, 28, 32]
    assert skips_at(run, 6) == ((4, 8),)
    (Path(run.output.folder) / "spikes" / "skips.json").unlink()
    ranks.run(1, whole_run, run_with("training.steps=8"), True)  # the checkpoint has noted the skips, too
    assert samples_of(run) == [4, 8, 12, 16, 28, 32, 36, 40]


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [("training.on_spike", "stop", "off"), ("training.skips", "skips.json", ""), ("output.sample_every", 2, 0)],
)
def test_fine_tuning_refuses_these_settings(run_with, name, value, default):
    with pytest.raises(ConfigError) as caught:
        require_for_tuning(run_with(f"{name}={value}"))
    assert str(caught.value) == (
        f"`{name}` must be {default!r} in fine-tuning, but is {value!r}. Only `crosscut train` looks for spikes, "
        f"leaves out sequences and writes samples during a run. Remove `{name}`."
    )
