"""A checkpoint with averaged weights, as the commands read it: by default, a finished model is the average."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import load_run
from crosscut.serving.server import ServerOptions, _checked
from tests.cli.conftest import TINY

SETTINGS = (*TINY, "model.dropout=0.0", "optimizer.ema_decay=0.9", "optimizer.learning_rate=0.05")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, book: Path) -> Path:
    """The folder of a run, and its exports as `average` and `last` beside it."""
    from crosscut.training import run_training

    folder = tmp_path_factory.mktemp("trained") / "run"
    run_training(load_run({}, [*SETTINGS, f"data.text={book}", f"output.folder={folder}"]))
    told = command("checkpoint", "export", folder, folder.parent / "average")
    assert told.endswith("1 file, averaged weights\n")
    told = command("checkpoint", "export", folder, folder.parent / "last", "--last-weights")
    assert told.endswith("1 file\n")
    return folder


def command(*arguments: object) -> str:
    done = CliRunner().invoke(commands, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code in (0, 1)
    return done.stdout


def readers(trained: Path) -> list[tuple[Any, ...]]:
    """The arguments that read each model: from the run, and from its exports."""
    exports = trained.parent / "average", trained.parent / "last"
    return [(trained,), (trained, "--last-weights"), *((each,) for each in exports)]


def test_evaluation_is_of_the_average_unless_the_last_weights_are_asked_for(trained, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Fellow-Citizens of the Senate and House of Representatives. " * 3)
    options = ("--text", text, "--device", "cpu", "--window", "16")
    scores = {}
    for place, *more in readers(trained):
        report = json.loads(command("evaluate", place, *options, *more, "--json"))
        assert report["model"]["averaged_weights"] is (place == trained and not more)
        scores[place.name, *more] = report["tasks"]["text"]["figures"]["loss_per_token"]
    assert scores["run",] == scores["average",] != scores["last",] == scores["run", "--last-weights"]
    assert ", averaged weights, " in command("evaluate", trained, *options)
    assert "averaged" not in command("evaluate", trained, *options, "--last-weights")


def test_generation_is_of_the_average_unless_the_last_weights_are_asked_for(trained):
    greedy = ("--prompt", "The ", "--tokens", 20, "--temperature", 0, "--device", "cpu", "--json")
    ids = {
        (place.name, *more): json.loads(command("generate", place, *greedy, *more))["tokens"]
        for place, *more in readers(trained)
    }
    assert ids["run",] == ids["average",]
    assert ids["run", "--last-weights"] == ids["last",]


def test_a_server_names_the_weights_that_it_serves(trained):
    averaged, last = (_checked(str(trained), ServerOptions(port=0, last_weights=last)) for last in (False, True))
    assert averaged.title == "run/step-00000004, averaged weights"
    assert last.title == last.name == averaged.name == "run/step-00000004"


def test_inspection_says_that_a_checkpoint_holds_an_average(trained):
    assert "from the last step, and their moving average" in command("checkpoint", "inspect", trained)
    facts = json.loads(command("checkpoint", "inspect", trained, "--json"))
    assert facts["averaged_weights"] is True
    assert facts["tensors"]["average.tokens.weight"] == facts["tensors"]["model.tokens.weight"]


def test_a_comparison_covers_the_average(trained):
    steps = (trained / "checkpoints" / name for name in ("step-00000002", "step-00000004"))
    compared = json.loads(command("checkpoint", "diff", *steps, "--json"))
    differing = {tensor["name"] for tensor in compared["tensors"] if tensor["largest"]}
    assert {"average.tokens.weight", "model.tokens.weight"} <= differing


def test_a_run_that_starts_from_the_export_begins_with_the_averaged_weights(trained, tmp_path):
    from crosscut.training import run_training

    overrides = ("training.steps=1", "optimizer.learning_rate=0.0", "optimizer.min_learning_rate=0.0",
                 f"training.initialize_from={trained.parent / 'average'}", f"data.tokens={trained / 'tokens'}",
                 f"output.folder={tmp_path / 'run'}")  # fmt: skip
    shape = [setting for setting in TINY if not setting.startswith(("model", "data", "optimizer.warmup"))]
    run_training(load_run({"optimizer": {"warmup_steps": 0}}, [*shape, *overrides]))
    first, then = (json.loads((folder / "summary.json").read_text()) for folder in (trained, tmp_path / "run"))
    assert then["validation_loss_before"] == pytest.approx(first["validation_loss_after"], rel=1e-6)
