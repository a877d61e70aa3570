"""Checks and files of a run before a process starts."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crosscut.checkpoint import find_damage, folder_at
from crosscut.config import CheckpointError, ConfigError, LayoutError, RunStopped, TrainingError, load_run, write_toml
from crosscut.config.conventions import num_pieces
from crosscut.data import TokenFolder, prepare
from crosscut.launch.stopping import REQUESTS
from crosscut.training import run_training
from crosscut.training.driving.driver import Stop, _require_written
from crosscut.training.driving.preparation import with_vocabulary
from crosscut.training.in_memory import InMemory
from crosscut.training.job import _prepare, is_complete
from crosscut.training.precision import resolve_on
from crosscut.training.resuming import identity_of
from tests.disks import small_disk
from tests.nursery import handlers_kept
from tests.refusals import refusal
from tests.training.conftest import tiny_run
from tests.training.jobs import CPU, loop, whole_run


def prepare_run(run, resume, device=CPU):
    return _prepare(resolve_on(run, device), False, resume, InMemory(run))[0]


def tokens_of(run) -> TokenFolder:
    return TokenFolder.open(Path(run.tokens_folder))


def train_with_identity(run) -> None:
    """Train like a `run_training` that is killed before it writes its report."""
    loop(run, identity=identity_of(run, tokens_of(run)))


@pytest.fixture(scope="module")
def trained_once(ranks, tokens_folder, tmp_path_factory) -> Path:
    """The folder of a run of 6 steps with checkpoints after 3 and 6."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    ranks.run(1, train_with_identity, tiny_run(tokens_folder, folder))
    return folder


@pytest.fixture
def trained(trained_once, run_with):
    """That run, in a copy of the folder."""
    run = run_with()
    shutil.copytree(trained_once, run.output.folder)
    return run


def checkpoints(run) -> Path:
    return Path(run.output.folder) / "checkpoints"


def test_new_run_gets_its_config_and_no_checkpoint(run_with):
    run = run_with("model.vocab_size=0")
    prepared = prepare_run(run, resume=False)
    assert prepared.checkpoint is None
    assert prepared.run.model.vocab_size == tokens_of(run).vocab_size
    assert load_run(Path(run.output.folder) / "config.toml") == prepared.run.config


def test_what_cannot_be_exported_is_told_before_training(run_with, capsys):
    run = run_with()
    prepare_run(run, resume=False)
    assert "exported" not in capsys.readouterr().err
    odd = run_with("model.norm=rms", f"output.folder={run.output.folder}-odd")
    prepare_run(odd, resume=False)
    assert capsys.readouterr().err == (
        "The model cannot be exported to the Hugging Face format: `model.norm` must be 'layer' in a Hugging Face "
        "model of the closest family, 'gpt2', but is 'rms'.\n"
    )


def test_messages_that_run_beside_nothing_are_told_before_training_on_gpus(run_with, capsys):
    split = ("layout.tensor=2", "layout.sequence_parallel=true", "training.micro_batch_size=1")
    long = ("model.max_sequence_length=131072", "training.sequence_length=131072", "model.positions=rotary")
    run = run_with(*split, *long)
    with mock.patch("crosscut.training.job.with_vocabulary", lambda run, tokens: run):
        assert num_pieces(2, 131_072 * run.model.hidden_size) == 2
        with mock.patch("crosscut.training.job.samples_of"):
            prepare_run(run, resume=False)
            assert "overlap" not in capsys.readouterr().err, "a CPU's messages run beside nothing ever"
            with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
                prepare_run(run, resume=False, device=torch.device("cuda"))
    assert (
        "the forward messages of this run overlap with no matrix product: a micro-batch of 1 sequence cannot be split "
        "into halves."
    ) in capsys.readouterr().err


def test_a_token_that_sees_its_target_is_refused(run_with):
    message = (
        '^`model.attention` must be "causal" for training on the next token, but is "bidirectional". Every token would '
        'see the token that it has to predict. Set model.attention="causal".$'
    )
    with pytest.raises(ConfigError, match=message):
        run_training(run_with("model.attention=bidirectional"))


def test_run_folder_that_is_a_file_is_refused(run_with, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(
        ConfigError, match=r"^The run's folder must be a folder, but `.*run` is a file, or a path inside a file\. "
    ):
        run_training(run_with())


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        ("metrics.jsonl", os.mkfifo, "regular file"),
        ("metrics.jsonl", Path.mkdir, "regular file"),
        ("summary.json", Path.mkdir, "regular file"),
        ("config.toml", lambda path: path.symlink_to("/dev/zero"), "regular file"),
        ("tensorboard", Path.touch, "folder"),
        ("checkpoints", Path.touch, "folder"),
        ("profile", os.mkfifo, "folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("resume", [False, "auto"])
def test_something_else_with_the_name_of_a_runs_file_is_refused(run_with, tmp_path, name, make, kind, resume):
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / name)
    assert refusal(ConfigError, run_training, run_with(), resume=resume) == (
        f"`{tmp_path / 'run' / name}` must be a {kind}, but is not. The run needs this name. Move "
        "whatever has this name now, or set `output.folder` to another folder."
    )


def test_run_folder_with_checkpoints_is_refused_without_resume(trained):
    with pytest.raises(ConfigError, match=r"already holds checkpoints of a run. Pass --resume to continue"):
        prepare_run(trained, resume=False)


@pytest.mark.parametrize("resume", [False, "auto", True])
def test_a_folder_whose_checkpoints_lie_elsewhere_is_refused(trained, run_with, tmp_path, resume):
    """A new run would replace the record of the earlier one, by whichever folder the two differ."""
    folder, elsewhere = Path(trained.output.folder), tmp_path / "elsewhere"
    other = f"checkpoint.folder={tmp_path / 'other'}"
    for held, remedy in (
        (folder / "checkpoints", "remove `checkpoint.folder`"),
        (elsewhere, f"set checkpoint.folder={elsewhere}"),
    ):
        if held == elsewhere:
            (folder / "checkpoints").rename(elsewhere)
            write_toml(run_with(f"checkpoint.folder={elsewhere}"), folder / "config.toml")
        assert refusal(ConfigError, prepare_run, run_with(other), resume=resume) == (
            f"`output.folder` must name a new folder, but `{folder}` holds the record of a run whose checkpoints are "
            f"in `{held}`. To continue that run, {remedy} and pass --resume. For a new run, choose another folder."
        )
    assert prepare_run(run_with(f"checkpoint.folder={elsewhere}", "training.steps=9"), resume=True).done == 6
    shutil.rmtree(elsewhere)
    assert prepare_run(run_with(other), resume="auto").done == 0


def test_resuming_takes_the_newest_checkpoint_and_leaves_the_config(trained, run_with):
    config = Path(trained.output.folder) / "config.toml"
    before = config.read_bytes()
    for resume in (True, "auto"):
        prepared = prepare_run(run_with("training.steps=9"), resume=resume)
        assert prepared.checkpoint == folder_at(checkpoints(trained) / "step-00000006")
        assert config.read_bytes() == before


def test_resuming_notes_what_it_passes_over(trained):
    damaged = checkpoints(trained) / "step-00000006"
    (damaged / "rank-0.safetensors").write_bytes(b"short")
    assert prepare_run(trained, resume="auto").checkpoint == folder_at(checkpoints(trained) / "step-00000003")
    assert (damaged / "passed-over.txt").is_file()


def test_resuming_needs_a_checkpoint_unless_it_may_start_anew(run_with):
    with pytest.raises(CheckpointError, match=r"must hold a checkpoint, but holds none"):
        prepare_run(run_with(), resume=True)
    prepared = prepare_run(run_with(), resume="auto")
    assert prepared.checkpoint is None
    assert (Path(run_with().output.folder) / "config.toml").is_file()


def test_damaged_checkpoints_are_no_reason_to_start_anew(trained):
    for folder in checkpoints(trained).glob("step-*"):
        (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError):
        prepare_run(trained, resume="auto")


def test_steps_must_be_above_the_checkpoints(trained, run_with):
    for steps, resume in ((6, True), (5, True), (5, "auto")):
        with pytest.raises(
            ConfigError, match=r"^`training.steps` must be above the step of the checkpoint \(6\), but is"
        ):
            prepare_run(run_with(f"training.steps={steps}"), resume=resume)
    assert prepare_run(trained, resume="auto").checkpoint == folder_at(checkpoints(trained) / "step-00000006")


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("model.num_layers=3", "model.num_layers"),
        ("training.batch_size=8", "training.batch_size"),
        ("training.sequence_length=16", "training.sequence_length"),
        ("training.seed=2", "training.seed"),
        ("training.document_mask=true", "training.document_mask"),
    ],
)
def test_another_model_or_order_of_data_is_refused(trained, run_with, override, name):
    with pytest.raises(CheckpointError, match=rf"^`{name}` must be .* as in the checkpoint `.*`, but is"):
        prepare_run(run_with("training.steps=9", override), resume=True)


def test_a_jump_of_the_learning_rate_is_told(trained, run_with, capsys):
    prepare_run(run_with("training.steps=12"), resume=True)
    assert capsys.readouterr().err == (
        "The learning rate of step 7 is 0.000628 instead of 0.0001, because `training.steps` is 12 instead of 6. The "
        'loss may rise at first. With optimizer.schedule="wsd" or "constant", a '
        "run can be extended without such a jump (docs/recipe.md).\n"
    )
    lower = ("optimizer.learning_rate=1e-4", "optimizer.schedule=constant", "optimizer.min_learning_rate=1e-5")
    prepare_run(run_with("training.steps=12", *lower, "optimizer.beta2=0.9"), resume="auto")
    assert capsys.readouterr().err == "", "the rate stays 1e-4"
    prepare_run(run_with("training.steps=12", "optimizer.schedule=linear", *lower[::2]), resume="auto")
    assert capsys.readouterr().err == (
        "The learning rate of step 7 is 6.4e-05 instead of 0.0001, because `training.steps` is 12 instead of 6 and "
        "`optimizer.schedule` is 'linear' instead of 'cosine' and `optimizer.learning_rate` is 0.0001 instead of 0.001 "
        "and `optimizer.min_learning_rate` is 1e-05 instead of 0.0001.\n"
    )


def test_another_z_loss_is_told(trained, run_with, capsys):
    same_rate = ("training.steps=12", "optimizer.learning_rate=1e-4", "optimizer.schedule=constant")
    prepare_run(run_with(*same_rate, "training.z_loss=1e-4"), resume=True)
    assert capsys.readouterr().err == "The z-loss changes at step 7: `training.z_loss` is 0.0001 instead of 0.\n"


def test_the_same_schedule_is_no_news(trained, capsys):
    shutil.rmtree(checkpoints(trained) / "step-00000006")
    prepare_run(trained, resume=True)
    assert capsys.readouterr().err == ""


def test_other_tokens_are_refused(trained, text_file, tmp_path):
    other = tmp_path / "other"
    prepare(tiny_run(other, tmp_path, f"data.text={text_file}").data, other, seed=2, progress=False)  # another split
    run = tiny_run(other, Path(trained.output.folder), "training.steps=9")
    with pytest.raises(CheckpointError, match=r"^`data.tokens` must be"):
        prepare_run(run, resume=True)


def test_what_may_change_on_resuming_is_no_part_of_the_identity(run_with):
    run = run_with()
    same = run_with(
        "model.dropout=0.0",
        "model.vocab_multiple=384",
        "training.steps=60",
        "layout.tensor=2",
        "optimizer.learning_rate=0.5",
    )
    assert identity_of(same, tokens_of(run)) == identity_of(run, tokens_of(run))


def test_vocabulary_is_the_tokenizers_unless_a_larger_one_is_given(run_with):
    tokens = tokens_of(run_with())
    assert with_vocabulary(run_with("model.vocab_size=0"), tokens).model.vocab_size == tokens.vocab_size
    assert with_vocabulary(run_with("model.vocab_size=1000"), tokens).model.vocab_size == 1000
    with pytest.raises(
        ConfigError, match=r"^`model.vocab_size` must be at least the size of the tokenizer's vocabulary \(500\), but"
    ):
        with_vocabulary(run_with("model.vocab_size=9"), tokens)


def test_vocabulary_that_the_text_does_not_fill_is_told(run_with, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("To be, or not to be: that is the question. " * 2000)
    asked = [f"data.text={tmp_path}/short.txt", "data.tokens=", "data.vocab_size=5000"]
    prepared = prepare_run(run_with(*asked, "model.vocab_size=0"), resume=False)
    size = prepared.run.model.vocab_size
    assert 257 < size < 5000
    assert f"The tokenizer has {size} entries instead of the 5,000 of `data.vocab_size`" in capsys.readouterr().err
    kept = run_with(*asked, "model.vocab_size=5000", f"output.folder={tmp_path}/kept")
    assert prepare_run(kept, resume=False).run.model.vocab_size == 5000
    assert "entries" not in capsys.readouterr().err


def test_vocabulary_of_the_model_that_the_tokenizer_does_not_use_is_told(run_with, tmp_path, capsys):
    prepare_run(run_with("model.vocab_size=1001", f"output.folder={tmp_path}/large"), resume=False)
    assert capsys.readouterr().err.startswith(
        "`model.vocab_size` is 1,001, but the tokenizer has only 500 entries. The other 501 rows of the embedding and "
        "of the output projection cost memory and time, but no text uses them. Prepare the tokens with the tokenizer "
        "of the model, or set model.vocab_size=0 to use the tokenizer's size.\n"
    )
    prepare_run(run_with("model.vocab_size=1000", f"output.folder={tmp_path}/small"), resume=False)
    assert "model.vocab_size" not in capsys.readouterr().err


def test_processes_that_do_not_fit_the_layout_are_refused(run_with, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LayoutError, match=r"must be the number of processes \(3\), but is 2 x 1 = 2"):
        run_training(run_with("layout.tensor=2"))


def test_report_of_a_run_that_was_killed_before_it_is_made_up_for(trained, monkeypatch, capsys):
    assert not is_complete(trained)
    run_training(trained, resume="auto")
    summary = Path(trained.output.folder) / "summary.json"
    assert json.loads(summary.read_text())["steps"] == 6
    assert is_complete(trained)
    written = summary.stat().st_mtime_ns
    run_training(trained, resume="auto")
    assert "is complete: all 6 steps are done." in capsys.readouterr().out
    assert summary.stat().st_mtime_ns == written


def test_report_that_does_not_fit_on_the_disk_is_told_and_written_later(trained, tmp_path, capsys):
    with small_disk(tmp_path / "disk", 8 << 10) as disk:
        folder = shutil.copytree(trained.output.folder, disk / "run")
        run = dataclasses.replace(trained, output=dataclasses.replace(trained.output, folder=str(folder)))
        (folder / "loss.png").touch()  # of an earlier report
        fill(disk, leave=40 << 10)  # enough for all but the plot
        assert refusal(TrainingError, run_training, run, resume="auto") == (
            f"The report of the run must be written to `{folder}`, but is not: No space left on device. All steps are "
            "done, and their checkpoint is written. Free space or grant access, and start again with --resume auto to "
            "write the report."
        )
        files = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("files"))
        assert files == f"files  {folder}/: sample.txt, metrics.jsonl, config.toml, tensorboard, checkpoints"
        assert not is_complete(run)
        (disk / "filler").unlink()
        run_training(run, resume="auto")
        assert is_complete(run)


def test_disk_without_room_for_the_metrics_is_told(trained, tmp_path):
    with small_disk(tmp_path / "disk", 8 << 10) as disk:
        folder = shutil.copytree(trained.output.folder, disk / "run")
        run = dataclasses.replace(trained, output=dataclasses.replace(trained.output, folder=str(folder)))
        rows = (folder / "metrics.jsonl").read_bytes()
        fill(disk, leave=4 << 10)  # enough for the lock
        with pytest.raises(TrainingError, match=r"must be a writable folder, but is not: No space left on"):
            run_training(run, resume="auto")
        assert (folder / "metrics.jsonl").read_bytes() == rows


def fill(disk: Path, *, leave: int) -> None:
    """Fill a small disk up to the last `leave` bytes."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - leave)


def test_a_checkpoint_that_is_not_written_does_not_hide_a_report_that_is_not(trained, tmp_path):
    class Failed:
        def require_saved(self) -> None:
            raise CheckpointError("`step-6` must be writable, but is not: No space left on device.")

    assert refusal(CheckpointError, _require_written, trained, Failed(), "File too large") == (
        "`step-6` must be writable, but is not: No space left on device. The report of the run is not complete either, "
        "because a file could not be written: File too large."
    )


def test_run_without_its_last_checkpoint_is_not_complete(trained):
    run_training(trained, resume="auto")
    shutil.rmtree(checkpoints(trained) / "step-00000006")
    assert not is_complete(trained)
    (Path(trained.output.folder) / "summary.json").write_text("{")
    assert not is_complete(trained)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("content", ["null", "{}", "[]", "6", '"steps"', '{"steps": null}', "\xff"])
def test_report_that_is_not_ours_makes_no_run_complete(trained, content):
    (Path(trained.output.folder) / "summary.json").write_text(content, encoding="latin-1")
    assert not is_complete(trained)


def test_run_whose_last_checkpoint_is_damaged_is_not_complete(trained, capsys):
    run_training(trained, resume="auto")
    last = checkpoints(trained) / "step-00000006"
    content = (last / "rank-0.safetensors").read_bytes()
    (last / "rank-0.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert not is_complete(trained)
    run_training(trained, resume="auto")
    assert "Continuing from" in capsys.readouterr().err
    assert find_damage(folder_at(last)) == []
    assert is_complete(trained)


def joined(run, mine: str) -> str:
    """Output of a run on ranks that were started by others, of which only the first rank sees the right folder."""
    run = dataclasses.replace(run, output=dataclasses.replace(run.output, folder=mine)) if dist.get_rank() else run
    return whole_run(run, "auto")


def test_first_rank_decides_whether_the_run_is_complete(ranks, run_with, tmp_path):
    """A rank that sees a file system later than the first one must not begin alone."""
    run = run_with("layout.data=2")
    ranks.run(2, train_with_identity, run)
    (Path(run.output.folder) / "summary.json").write_text('{"steps": 6}')
    first, second = ranks.run(2, joined, run, str(tmp_path / "not-seen-yet"))
    assert first == f"The run in `{run.output.folder}` is complete: all 6 steps are done.\n"
    assert second == ""
    assert not (tmp_path / "not-seen-yet").exists()


@pytest.mark.parametrize(
    ("interrupted", "what", "then"),
    [(False, "asked to stop", "Requeue the job, or resume with `"), (True, "interrupted", "Resume with `")],
)
def test_stopped_run_says_where_it_is_and_how_to_go_on(run_with, monkeypatch, interrupted, what, then):
    run = run_with("training.steps=50")
    monkeypatch.setattr("crosscut.launch.door.launch", lambda *_, **__: Stop(17, interrupted))
    with handlers_kept(*REQUESTS):
        with pytest.raises(RunStopped) as stopped:
            run_training(run)
        assert {signal.getsignal(number) for number in REQUESTS} == {signal.SIG_IGN}, "no copy hides the exit status"
    folder = run.output.folder
    assert str(stopped.value).startswith(
        f"The run was {what} and has stopped after step 17 of 50. Its checkpoint is "
        f"`{folder}/checkpoints/step-00000017`. {then}"
    )
    assert stopped.value.interrupted == interrupted
    assert str(stopped.value).endswith(f" train {folder}/config.toml --resume auto`.")


def test_run_that_is_stopped_after_its_last_step_lacks_only_the_report(run_with, monkeypatch):
    monkeypatch.setattr("crosscut.launch.door.launch", lambda *_, **__: Stop(6, False))
    monkeypatch.setattr("crosscut.training.driving.driver.ignore_requests", lambda: None)
    with pytest.raises(RunStopped) as stopped:
        run_training(run_with())
    assert "after step 6 of 6. " in str(stopped.value)
    assert "Only the report is missing: write it with `" in str(stopped.value)
