"""Training on a mixture of token folders: the same batches on every layout and after a resume, and what is told."""

import json
from pathlib import Path

import pytest

from crosscut.checkpoint import read_manifest
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import CheckpointError, DataError
from crosscut.training.job import run_training
from tests.training.jobs import whole_run
from tests.training.test_resume import HERE, checkpoint_of, require_same_run_here_and_elsewhere

LAYOUT = ("layout.data=2", "layout.sharding=zero3")


def test_a_mixture_goes_on_to_the_last_bit_and_on_another_layout_with_the_same_batches(ranks, mixed_run):
    short = (*HERE, "model.dropout=0", "training.steps=5")
    require_same_run_here_and_elsewhere(ranks, mixed_run(*short), mixed_run(*short, *LAYOUT))


def test_a_whole_run_tells_the_share_and_the_epochs_of_each_folder_and_no_resume_changes_them(
    ranks, mixed_run, tokens_folder, second_folder
):
    run = mixed_run("training.steps=3", "training.validate_every=0")
    text = ranks.run(1, whole_run, run)[0]
    first, second = json.loads((Path(run.output.folder) / "summary.json").read_text())["mixture"]
    assert (first["folder"], first["share"]) == (str(tokens_folder), 0.25)
    assert (second["folder"], second["share"]) == (str(second_folder), 0.75)
    samples = sum(each["epochs"] * each["training_tokens"] / 32 for each in (first, second))
    assert samples == pytest.approx(12, rel=0.05)
    assert "0.75 of" in text  # the name of the folder follows, which a narrow table cuts into lines
    identity = read_manifest(LocalFolder(checkpoint_of(run, 3))).progress.identity
    assert identity["data.mixture"] == [0.25, 0.75]
    with pytest.raises(CheckpointError, match=r"`data\.mixture` must be \[0\.25, 0\.75\] as in the checkpoint"):
        run_training(mixed_run("training.steps=6", weights=(1, 1)), resume=True)


def test_a_folder_that_is_missing_is_told_before_a_rank_starts(mixed_run, tmp_path):
    run = mixed_run(f'data.mixture=[{{folder="{tmp_path / "gone"}", weight=1}}]')
    with pytest.raises(DataError, match=r"gone` must be a folder of token shards, but has no manifest\.json"):
        run_training(run)
