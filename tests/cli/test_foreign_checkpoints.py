"""Checkpoints that an attacker wrote, or that broke: every command that reads one says so in one message."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from crosscut.cli.main import EXIT_DAMAGED
from crosscut.config import load_run
from tests.checkpoint.forged import edit_index, edit_manifest, fit_hashes
from tests.cli.conftest import TINY

RUN = "run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, book) -> Path:
    from crosscut.training import run_training

    folder = tmp_path_factory.mktemp("foreign")
    settings = [*TINY, f"data.text={book}", f"data.tokens={folder}/tokens", f"output.folder={folder}/{RUN}"]
    run_training(load_run({}, [*settings, "training.steps=2", "model.num_layers=1", "model.dropout=0"]))
    return folder / RUN


@pytest.fixture
def run(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the run, in the working folder."""
    shutil.copytree(trained, tmp_path / RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path / RUN


@pytest.fixture
def checkpoint(run) -> Path:
    return run / "checkpoints" / "step-00000002"


COMMANDS = {
    "inspect": ("checkpoint", "inspect", RUN),
    "diff": ("checkpoint", "diff", RUN, RUN),
    "export": ("checkpoint", "export", RUN, "exported"),
    "generate": ("generate", RUN, "--prompt", "It was", "--tokens", "2"),
    "evaluate": ("evaluate", RUN, "--text", "text.txt", "--window", "16", "--overlap", "8"),
    "serve": ("serve", RUN, "--port", "0"),
    "resume": ("train", f"{RUN}/config.toml", "--resume", "training.steps=3", f"output.folder={RUN}"),
}


def message_of(crosscut_here, command: str) -> str:
    Path("text.txt").write_text("It was a long text. " * 200)
    result = crosscut_here(*COMMANDS[command])
    assert result.returncode in (2, EXIT_DAMAGED), result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return str(result.stderr)


@pytest.mark.parametrize("command", ["inspect", "diff", "export", "generate", "resume"])
def test_manifest_whose_step_is_a_text_is_told(crosscut_here, checkpoint, command):
    edit_manifest(checkpoint, lambda table: table["progress"].update(step="x"))
    assert "`step` must be an integer, but is 'x'" in message_of(crosscut_here, command)


@pytest.mark.parametrize(
    "config",
    [{"training": "x"}, {"model": 3}, {"training": {"initialize_from": 5}}, {"data": {"tokens": 5}}, {"output": 3}],
    ids=str,
)
def test_config_of_another_shape_is_told(crosscut_here, checkpoint, config):
    edit_manifest(checkpoint, lambda table: table["progress"]["config"].update(config))
    assert message_of(crosscut_here, "generate").startswith("crosscut: `")


def test_brackets_in_a_manifest_are_told(crosscut_here, checkpoint):
    (checkpoint / "manifest.json").write_bytes(b"[" * 100_000)
    assert "must be a checkpoint's manifest, but cannot be parsed" in message_of(crosscut_here, "inspect")


@pytest.mark.parametrize("digits", [23, 200, 5000])
def test_place_whose_step_has_too_many_digits_is_told(crosscut_here, run, digits):
    place = f"{RUN}/checkpoints/step-{'1' * digits}"
    for arguments in (("checkpoint", "inspect", place), ("checkpoint", "verify", place), ("generate", place)):
        result = crosscut_here(*arguments, status=2)
        assert result.stderr.startswith("crosscut: `")
        assert len(result.stderr) < 600


def test_export_and_scores_into_a_read_only_folder_are_told(crosscut_here, run):
    Path("file").touch()
    result = crosscut_here("checkpoint", "export", RUN, "file/out")
    assert (result.returncode, result.stderr) == (
        2,
        (
            "crosscut: `file/out` must be writable, but is not: Not a directory (`file`). Free some space, grant "
            "access, or choose another folder.\n"
        ),
    )
    result = crosscut_here("evaluate", RUN, "--text", "nowhere", "--output", "file/scores.json", status=2)
    assert result.stderr.startswith(
        "crosscut: `--output` must name a file that can be written, but is `file/scores.json`: Not a directory."
    )


@pytest.mark.parametrize("command", ["generate", "evaluate", "serve", "export"])
def test_checkpoint_with_weights_that_are_not_finite_is_told(crosscut_here, checkpoint, command):
    name = "blocks.0.mlp.expand.weight"
    (part,) = json.loads((checkpoint / "tensors.json").read_text())["tensors"][f"model.{name}"]["parts"]
    with (checkpoint / part["file"]).open("r+b") as file:
        file.seek(part["start"] + 40)
        file.write(struct.pack("<3f", float("nan"), float("inf"), float("-inf")))
    fit_hashes(checkpoint)
    assert (
        f"`{RUN}/checkpoints/{checkpoint.name}` must hold finite weights, but 3 values in `{name}` are not finite "
        "(NaN or infinity). Use an earlier checkpoint."
    ) in message_of(crosscut_here, command)
    assert not Path("exported").exists()


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda tensors: tensors.pop("model.tokens.weight"), "must hold the tensor `model.tokens.weight`"),
        (lambda tensors: tensors.pop("model.final_norm.bias"), "must hold the tensor `model.final_norm.bias`"),
        (
            lambda tensors: tensors.update({"model.final_norm.bias": tensors["model.tokens.weight"]}),
            "must have the shape [32] and the type torch.float32 of the model, but has [384, 32]",
        ),
        (
            lambda tensors: tensors["model.final_norm.bias"].update(dtype="int32"),
            "must have the shape [32] and the type torch.float32 of the model, but has [32] and torch.int32",
        ),
    ],
)
def test_tensors_of_another_model_are_told_by_an_export(crosscut_here, checkpoint, edit, told):
    edit_index(checkpoint, lambda table: edit(table["tensors"]))
    assert told in message_of(crosscut_here, "export")
