"""`crosscut checkpoint` on the checkpoints of real runs, of one process and of two."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from crosscut.checkpoint.maintenance.comparison import Comparison
from crosscut.checkpoint.storage import LocalFolder
from crosscut.cli.main import commands
from crosscut.cli.tables import show_comparison
from crosscut.config import CheckpointError, ConfigError, load_run
from crosscut.config.system.folder_lock import FolderLock
from tests.cli.conftest import TINY
from tests.training.jobs import whole_run


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory, book) -> Path:
    """The same run by one process (`one`) and by two (`two`)."""
    from crosscut.training import run_training

    folder = tmp_path_factory.mktemp("runs")
    settings = [*TINY, "model.dropout=0", f"data.text={book}", f"data.tokens={folder}/tokens"]
    run = load_run({}, [*settings, "training.precision=float64", f"output.folder={folder}/one"])
    run_training(run)
    ranks.run(
        2, whole_run, load_run(folder / "one" / "config.toml", ["layout.tensor=2", f"output.folder={folder}/two"])
    )
    return folder


@pytest.fixture
def copied(runs, tmp_path) -> Path:
    """The checkpoints of the first run, to damage."""
    shutil.copytree(runs / "one" / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def run(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(commands, ["checkpoint", *map(str, arguments)])
    if isinstance(result.exception, CheckpointError | ConfigError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def test_inspect_shows_tensors_layout_step_and_config(runs):
    text = run("inspect", runs / "two").stdout
    for expected in ("step-00000004", "4 (16 samples)", "tensor 2 x data 1", "model.tokens.weight", "512 x 32",
                     "Shard(0) over tensor=2", "training.batch_size", "torch 2."):  # fmt: skip
        assert expected in text, expected


def test_inspect_gives_figures(runs):
    facts = json.loads(run("inspect", runs / "one" / "checkpoints" / "step-00000002", "--json").stdout)
    assert (facts["step"], facts["samples"], facts["layout"]) == (2, 8, "tensor 1 x data 1")
    assert facts["config"]["model"]["hidden_size"] == 32
    assert facts["tensors"]["model.tokens.weight"] == {
        "shape": [384, 32], "dtype": "float64", "placement": "Shard(0) over tensor=1", "bytes": 384 * 32 * 8,
    }  # fmt: skip
    assert facts["bytes"] > sum(entry["bytes"] for entry in facts["tensors"].values())


def test_verify_passes_what_is_good(runs):
    assert run("verify", runs / "two").stdout.count("good") == 2


def test_verify_names_damage(copied):
    path = copied / "step-00000004" / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[5000] ^= 4
    path.write_bytes(content)
    result = run("verify", copied, status=1)
    assert f"`{path}` must have the SHA-256" in result.stdout
    assert result.stdout.startswith("good     ")
    one, other = json.loads(run("verify", copied, "--json", status=1).stdout)
    assert (one["damage"], len(other["damage"])) == ([], 1)
    assert json.loads(run("verify", copied / "step-00000002", "--json").stdout)[0]["damage"] == []


def test_diff_of_a_checkpoint_with_itself_is_none(runs):
    place = runs / "one"
    assert "Different settings: 0." in run("diff", place, place).stdout


def test_diff_over_layouts_compares_real_rows(runs):
    found = json.loads(run("diff", runs / "one", runs / "two", "--json", status=1).stdout)
    assert len(found["tensors"]) == 128
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert by_name["model.tokens.weight"]["note"] == "compared only the 300 rows without padding, of 384 and 512"
    assert all(tensor["largest"] < 1e-9 for tensor in found["tensors"]), "float64, two layouts"
    assert found["settings"]["layout.tensor"] == [1, 2]
    assert found["values"] == {}


def test_diff_of_two_steps_shows_what_moved(runs):
    checkpoints = runs / "one" / "checkpoints"
    result = run("diff", checkpoints / "step-00000002", checkpoints / "step-00000004", status=1)
    assert "model.tokens.weight" in result.stdout
    assert "step" in result.stdout
    assert "lr" in result.stdout, "the rate of the schedule has moved, too"


def test_long_values_that_differ_fold(capsys):
    names = [f"blocks.{block}.mlp.expand.weight" for block in range(200)]
    name = "optimizer.param_groups.0.parameters_with_decay"
    show_comparison(Comparison([], {name: (names, names[:-1])}, {}))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    heading = next(number for number, line in enumerate(lines) if line.startswith(" setting "))
    column = slice(*map(lines[heading].index, ("first", "second")))
    assert lines[heading + 2].startswith(f" {name} ")
    assert "".join(line[column] for line in lines[heading + 2 : -1]).replace(" ", "") == str(names).replace(" ", "")


@pytest.mark.slow  # it trains a second model
def test_diff_of_different_models_says_so(runs, tmp_path, book):
    from crosscut.training import run_training

    config = load_run(runs / "one" / "config.toml", [f"output.folder={tmp_path}/wide", "model.hidden_size=64"])
    run_training(config)
    assert "shape [384, 32] and [384, 64]" in run("diff", runs / "one", tmp_path / "wide", status=1).stdout
    deep = load_run(runs / "one" / "config.toml", [f"output.folder={tmp_path}/deep", "model.num_layers=3"])
    run_training(deep)
    assert "missing in the first" in run("diff", runs / "one", tmp_path / "deep", status=1).stdout


def test_diff_of_a_damaged_checkpoint_is_refused(runs, copied):
    (copied / "step-00000004" / "rank-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="must exist, but is missing"):
        run("diff", runs / "one", copied / "step-00000004")


def test_nothing_to_look_at_is_told(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"must be a checkpoint or a run's folder with checkpoints, but holds no checkpoint"
    ):
        run("inspect", tmp_path)


def leave_a_draft(root: Path, *, age: float) -> Path:
    draft = root / ".step-00000006.partial"
    LocalFolder(draft).make()
    (draft / "rank-0.safetensors").write_bytes(b"half")
    for path in (*draft.iterdir(), draft):
        os.utime(path, (time.time() - age,) * 2)
    return draft


@pytest.mark.parametrize(
    "place", ["nowhere", "a-file", "empty", "other", "memory://nowhere/run", "other/step-00000002"]
)
def test_repair_of_a_place_without_checkpoints_is_an_error(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "step-2").mkdir(parents=True)
    told = "is one checkpoint. Pass the folder" if "step" in place else "holds no checkpoint. Check the path"
    with pytest.raises(
        CheckpointError, match=f"`{place}` must be a run's folder or a folder of checkpoints, but {told}"
    ):
        run("repair", place)


def test_repair_of_one_checkpoint_is_an_error(runs):
    with pytest.raises(CheckpointError, match="is one checkpoint"):
        run("repair", runs / "one" / "checkpoints" / "step-00000002")


def test_repair_removes_what_a_stopped_run_left(copied):
    draft = leave_a_draft(copied, age=3600)
    assert "would remove" in run("repair", copied, "--dry-run").stdout
    assert draft.exists()
    assert run("repair", copied).stdout.startswith(f"remove  {draft}")
    assert not draft.exists()
    assert run("repair", copied).stdout == "Nothing to repair.\n"


def test_repair_of_a_run_that_is_training_is_refused(copied):
    for folder in (copied, copied.parent):
        with FolderLock(folder).held(print):
            with pytest.raises(ConfigError, match=r"must not be in use, but .* is in use by process"):
                run("repair", copied)
            assert run("repair", copied, "--dry-run").exit_code == 0


def test_repair_leaves_what_a_run_may_be_writing(copied):
    draft = leave_a_draft(copied, age=5)
    assert "leave" in run("repair", copied).stdout
    assert draft.exists()


def test_repair_moves_damage_aside_and_deletes_nothing(copied):
    path = copied / "step-00000004" / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    content = path.read_bytes()
    assert "would set aside" in run("repair", copied, "--dry-run").stdout
    assert path.exists()
    (action,) = json.loads(run("repair", copied, "--json").stdout)
    assert action["done"] == "set aside"
    assert "must have" in action["why"]
    assert (copied / "damaged-step-00000004" / path.name).read_bytes() == content
    assert run("verify", copied).stdout.count("good") == 1
    shutil.copytree(copied / "step-00000002", copied / "step-00000004")
    (copied / "step-00000004" / path.name).unlink()
    run("repair", copied)
    assert (copied / "damaged-step-00000004-2").is_dir(), "an earlier one is not overwritten"


def test_repair_rebuilds_a_manifest_and_says_so(copied):
    good = json.loads(run("inspect", copied / "step-00000004", "--json").stdout)
    (copied / "step-00000004" / "manifest.json").unlink()
    assert "would rebuild" in run("repair", copied, "--dry-run").stdout
    assert not (copied / "step-00000004" / "manifest.json").exists()
    assert "the facts about the run are copied from `step-00000002`" in run("repair", copied).stdout
    assert run("verify", copied).stdout.count("good") == 2
    rebuilt = json.loads(run("inspect", copied / "step-00000004", "--json").stdout)
    assert rebuilt.pop("rebuilt") is True
    assert good.pop("rebuilt") is False
    assert rebuilt == good
    assert "manifest rebuilt by a repair" in run("inspect", copied / "step-00000004").stdout


def test_repair_does_not_vouch_for_a_changed_tensor(copied):
    """Without a manifest there is no hash, but a tensor's own checksum tells."""
    (copied / "step-00000004" / "manifest.json").unlink()
    path = copied / "step-00000004" / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (action,) = json.loads(run("repair", copied, "--json").stdout)
    assert action["done"] == "set aside"
    assert "fails its checksum" in action["why"]


def test_repair_needs_a_neighbour_to_tell_the_run(copied):
    shutil.rmtree(copied / "step-00000002")
    (copied / "step-00000004" / "manifest.json").unlink()
    (action,) = json.loads(run("repair", copied, "--json").stdout)
    assert action["done"] == "set aside"
    assert "There is no good checkpoint from which the run's config can be copied" in action["why"]


def test_resume_falls_back_to_the_newest_good_one_and_says_so(runs, tmp_path, capfd):
    from crosscut.training import run_training

    shutil.copytree(runs / "one", tmp_path / "one")
    path = tmp_path / "one" / "checkpoints" / "step-00000004" / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    settings = [f"output.folder={tmp_path}/one", "training.steps=6"]
    run_training(load_run(tmp_path / "one" / "config.toml", settings), resume=True)
    out, err = capfd.readouterr()
    assert err.count("A damaged checkpoint is skipped") == 1
    assert f"Continuing from `{tmp_path}/one/checkpoints/step-00000002`" in err
    assert "after 6 steps" in out
    assert run("verify", tmp_path / "one").stdout.count("good") == 2, "the damaged one was written anew"
