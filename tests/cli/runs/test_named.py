"""The run that the first argument of a command names."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from crosscut.cli.arguments import run_from
from crosscut.cli.main import commands
from crosscut.cli.plan.command import calibration, dry_run
from crosscut.cli.runs.named import RUN, with_named_run
from crosscut.config import PRESETS, ConfigError, ModelConfig

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 256, "vocab_size": 300}


def commands_of_runs(command: click.Command = commands) -> Iterator[click.Command]:
    """Commands whose first argument names a run."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from commands_of_runs(inner)
    if any(RUN in str(parameter.metavar) for parameter in command.params):
        yield command


@pytest.mark.parametrize("command", [*commands_of_runs(), dry_run], ids=lambda command: command.callback.__name__)
def test_every_command_of_runs_takes_the_file_the_folder_and_the_name_of_a_preset(
    command: click.Command, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("[training]\nsteps = 7\n", encoding="utf-8")

    def read(*words: str) -> tuple[str, ...]:
        found: tuple[str, ...] = command.make_context("", list(words)).params["arguments"]
        return found

    file = str(tmp_path / "config.toml")
    assert read(str(tmp_path), "training.steps=5") == read(file, "training.steps=5") == (file, "training.steps=5")
    assert read("8.3B", "training.steps=5") == ("model.preset=megatron-8.3b", "training.steps=5")
    assert read("gpt2-small") == ("model.preset=gpt2-small",)
    assert read() == ()


def test_the_commands_of_runs_are_found() -> None:
    found = {command.name for command in commands_of_runs()}
    assert found == {"plan", "show", "prepare", "train", "verify", "measure"}
    assert calibration not in list(commands_of_runs())


def test_a_named_preset_is_the_model_that_a_command_runs() -> None:
    assert run_from(with_named_run(("GPT2-medium", "model.dropout=0.2"))).model == ModelConfig(
        **PRESETS["gpt2-medium"] | {"dropout": 0.2}
    )
    assert run_from(with_named_run(("demo",))) == run_from(())


def test_a_hugging_face_folder_gives_the_initial_weights(tmp_path: Path) -> None:
    folder = tmp_path / 'odd "name" = 3'
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**GPT2, "activation_function": "gelu_new"}), encoding="utf-8")
    assert with_named_run((str(tmp_path / "x=1"),)) == (str(tmp_path / "x=1"),), "a setting, whatever it names"
    folder = folder.rename(tmp_path / 'odd "name"')
    run = run_from(with_named_run((str(folder), "training.steps=3")))
    assert (run.training.initialize_from, run.model.hidden_size, run.training.steps) == (str(folder), 32, 3)


def test_a_folder_with_the_name_of_a_preset_wins_only_if_it_holds_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert with_named_run(("demo",)) == ("model.preset=demo",)
    Path("demo", "config.toml").touch()
    assert with_named_run(("demo",)) == ("demo/config.toml",)
    Path("gpt2-small").touch()
    assert with_named_run(("gpt2-small",)) == ("gpt2-small",)


@pytest.mark.parametrize("name", ["run.toml", "nowhere/run", "nowhere/demo", "book.txt", "steps", "zzz", ""])
def test_a_name_of_nothing_is_left_to_the_loader(name: str) -> None:
    assert with_named_run((name, "training.steps=3")) == (name, "training.steps=3")


MISTAKES = {
    "gpt2-smal": "must name the file of a run, its folder or a preset, but is `gpt2-smal`. The nearest is "
    "`gpt2-small`.",
    "small": "must name one preset, but 'small' is the end of several names. Choose gpt2-small or laptop-small.",
    "{tmp}": "must name the folder of a run or a Hugging Face folder, but `{tmp}` has neither `config.toml` nor "
    "`config.json`. Name another folder.",
}


@pytest.mark.parametrize(("name", "told"), MISTAKES.items())
def test_a_name_that_is_nearly_right_is_told(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        with_named_run((name.format(tmp=tmp_path),))
    assert str(caught.value) == f"`{RUN}` {told.format(tmp=tmp_path)}"
