"""`crosscut new`: the file that it writes, its questions, and what it refuses."""

import os
import pty
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.cli.new.answers import read_data, read_devices, read_size, read_tokens
from crosscut.cli.new.settings import (
    MOST_READINGS,
    TOKENS_PER_PARAMETER,
    NewRun,
    new_run,
)
from crosscut.config import ConfigError, DataConfig, DataError, RunConfig, load_run
from crosscut.config.loading.commented import Reasoned, commented_toml
from crosscut.config.recipes import steps_between_checkpoints
from crosscut.data import prepare, read_documents
from crosscut.data.text.sources import BUILTIN_CORPORA
from crosscut.planner import count_parameters
from tests.refusals import refusal

ANSWERS = {"gpus": "none", "size": "3M", "tokens": "1M", "data": "demo"}


def options(**answers: str) -> list[str]:
    return [word for name, text in {**ANSWERS, **answers}.items() for word in (f"--{name}", text)]


def run(*arguments: str) -> str:
    ended = CliRunner().invoke(commands, ["new", *arguments], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def message(*arguments: str, kind: type[Exception] = ConfigError) -> str:
    return refusal(kind, CliRunner().invoke, commands, ["new", *arguments], catch_exceptions=False)


def made(**answers: str) -> NewRun:
    text = {**ANSWERS, **answers}
    devices, size, tokens = read_devices(text["gpus"]), read_size(text["size"]), read_tokens(text["tokens"])
    return new_run("runs/run", devices, size, tokens, read_data(text["data"]))


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"gpus": "8 x h100", "size": "125M", "tokens": "auto"},
        {"gpus": "6 h200", "size": "20M", "data": "none"},
        {"gpus": "4xa100-80gb", "size": "bert-base", "tokens": "1B"},
        pytest.param({"gpus": "64 x v100-32gb", "size": "8.3B"}, marks=pytest.mark.slow),
        pytest.param({"gpus": "16 x h100", "size": "mixtral-8x7b"}, marks=pytest.mark.slow),
    ],
    ids=lambda answers: answers.get("size", "default"),
)
def test_the_file_is_the_planned_run_and_every_setting_has_a_reason(answers: dict[str, str]) -> None:
    """The slow cases search more layouts, pipelines and experts included."""
    new = made(**answers)
    text = commented_toml(new.settings, ["heading"])
    assert load_run(tomllib.loads(text)) == new.run
    settings = [line for line in text.splitlines() if line and line[0] not in "[#"]
    assert len(settings) == len(new.settings)
    assert all(re.search(r"  # \w.{10}", line) for line in settings)
    assert not new.plans.is_near_limit(new.plan)
    assert new.run.layout.world_size == new.plans.num_ranks
    assert new.run.training.batch_size % new.run.layout.data == 0


@pytest.mark.parametrize(
    ("tokens", "checkpoints"),
    [
        ("1M", r"29.5 MB, after the last step"),
        ("10M", r"29.5 MB each, every 1,000 steps \([\d.]+ min"),
    ],
)
def test_the_forecast_has_the_time_between_checkpoints_and_their_size(
    tokens: str, checkpoints: str, tmp_path: Path
) -> None:
    text = run(str(tmp_path / "run.toml"), *options(tokens=tokens))
    assert re.search(rf"checkpoints +{checkpoints}", re.sub(r"\s*│\n│\s*", " ", text)), text


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(0.1, 1000), (3.6, 1000), (3.7, 500), (40.0, 50), (171.0, 20), (360.0, 10), (1800.0, 2), (3600.0, 1), (9e4, 1)],
)
def test_checkpoints_are_at_most_an_hour_apart(seconds: float, steps: int) -> None:
    assert steps_between_checkpoints(seconds, most=1000) == steps


def test_a_run_with_long_steps_says_how_many_of_them_a_failure_can_undo(tmp_path: Path) -> None:
    new = made(size="gpt2-small", tokens="1B")
    every = new.run.checkpoint.every
    assert 1 <= every < 1000
    assert every * new.plan.time.total <= 3600
    path = tmp_path / "run.toml"
    told = re.sub(r"\s*│\n│\s*", " ", run(str(path), *options(size="gpt2-small", tokens="1B")))
    assert re.search(rf"\nevery = {every}  # steps that a failure can undo: [\d.]+ \w+, as", path.read_text())
    assert f" every {every} steps (" in told


@pytest.mark.parametrize("gpus", ["none", "8 x laptop"])
def test_the_file_without_gpus_has_the_layout_of_its_forecast(gpus: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    told = run(str(path), *options(gpus=gpus))
    new = made(gpus=gpus)
    layout = load_run(path).layout
    assert layout == new.run.layout
    assert layout.world_size == new.plans.num_ranks
    assert str(layout) in told


@pytest.mark.parametrize(
    ("gpus", "size", "batch", "reason"),
    [
        ("16 x h100", "30M", 8, "sequences of a step, over all ranks: the recipe's"),
        ("44 x h100", "20M", 44, "sequences of a step, over all ranks: the recipe's 8, made larger for 44 devices"),
    ],
)
def test_the_batch_of_the_recipe_is_made_larger_only_if_no_layout_has_it(
    gpus: str, size: str, batch: int, reason: str
) -> None:
    new = made(gpus=gpus, size=size)
    assert new.settings["training.batch_size"] == Reasoned(batch, reason)
    assert new.run.training.batch_size == batch
    assert new.run.layout.world_size == new.plans.num_ranks


def test_the_plan_of_the_file_chooses_the_same_layout(tmp_path: Path) -> None:
    path, best = tmp_path / "run.toml", tmp_path / "best.toml"
    run(str(path), *options(gpus="8 x h100", size="125M", tokens="auto"))
    asked = ("plan", str(path), "--gpu", "h100-sxm", "--write", str(best))
    assert CliRunner().invoke(commands, asked, catch_exceptions=False).exit_code == 0
    assert load_run(best) == load_run(path)


def test_the_example_of_the_documentation_is_written(tmp_path: Path, book: Path, monkeypatch) -> None:
    page = (Path(__file__).parents[3] / "docs/install.md").read_text(encoding="utf-8")
    (asked,) = re.findall(r"^crosscut new (small.toml .*)$", page, re.MULTILINE)
    (example,) = re.findall(r"^```toml\n(.*?)```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("book.txt").symlink_to(book)
    run(*shlex.split(asked))
    assert example in Path("small.toml").read_text(encoding="utf-8")


def test_as_many_tokens_as_suit_the_size(tmp_path: Path) -> None:
    plenty = replace(read_data("demo"), num_tokens=1e12)
    new = new_run("runs/run", read_devices("none"), read_size("3M"), None, plenty)
    wanted = TOKENS_PER_PARAMETER * count_parameters(new.run.with_vocabulary().model)
    assert new.num_tokens == pytest.approx(wanted, rel=1e-3)


def test_little_data_is_read_four_times() -> None:
    new = made(tokens="auto", data="demo")
    assert new.num_tokens == pytest.approx(MOST_READINGS * new.source_tokens, rel=0.1)


def test_the_size_of_data_is_estimated_where_bytes_tell_it(tmp_path: Path) -> None:
    for name in ("book.txt", "book.jsonl"):
        (tmp_path / name).write_text("x" * 4000)
        assert read_data(str(tmp_path / name)).num_tokens == 1000
    assert read_data("builtin:tales") == read_data(" demo") == read_data("demo")
    for corpus in BUILTIN_CORPORA:
        text = sum(len(document.text.encode()) for document in read_documents([corpus]))
        assert read_data(corpus).num_tokens == pytest.approx(text / 4, rel=0.1)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"tokens": "auto"}, ""),
        (
            {"tokens": "29M"},
            "reads each token of the data 100 times; more than 4 times teach a model little. Name",
        ),
        ({"tokens": "29M", "size": "125M"}, "little, and a vocabulary of 4,096 tokens is small for this model. Name"),
    ],
)
def test_data_that_are_read_very_often_are_warned_of(answers: dict[str, str], told: str, tmp_path: Path) -> None:
    text = " ".join(run(str(tmp_path / "run.toml"), *options(**answers)).split())
    assert told in text
    assert ("Warning: " in text) == bool(told)


def test_the_data_can_be_named_later(tmp_path: Path, book: Path) -> None:
    path = tmp_path / "run.toml"
    told = run(str(path), *options(gpus="16 x h100", data="none"))
    assert f"# set data.text or data.tokens in {path}" in told
    assert f"torchrun ... -m crosscut train {path} --resume auto  # on every node" in told
    assert "Warning" not in told
    assert "\ntext = []  # name files, folders or globs of text here, or shards as " in path.read_text()
    assert load_run(path, [f"data.text={book}"]).data.text == (str(book),)


def test_data_of_unknown_size_is_told(tmp_path: Path) -> None:
    path = tmp_path / "book.txt.gz"
    path.write_bytes(b"compressed")
    steps = made(tokens="auto", data=str(path)).settings["training.steps"]
    assert "parameters; the size of the data is unknown, in steps of" in steps.reason
    assert "unknown" not in made(tokens="auto", data="demo").settings["training.steps"].reason


def test_a_trained_tokenizer_has_at_most_the_tokens_of_a_published_model() -> None:
    assert made(size="gpt2-small").settings["data.vocab_size"].reason.startswith("at most, as the published model has")


def test_tokens_without_sentences_are_refused_for_a_masked_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("It was the best of times. It was the worst of times. " * 400, encoding="utf-8")
    for objective in ("causal", "masked"):
        config = DataConfig(text=("text.txt",), vocab_size=300, objective=objective, num_shards=1)
        prepare(config, Path(objective), seed=1)
    answers = {"size": "laptop-bert", "tokens": "1M"}
    assert made(data="masked", **answers).run.data.tokens == "masked"
    assert made(data="causal").run.data.tokens == "causal"
    told = message("run.toml", *options(data="causal", **answers), kind=DataError)
    assert told == (
        "`--data` must name text, or tokens with an index of sentences, for a model that predicts masked tokens, but "
        "the tokens in `causal` have none. Name the text, or prepare the tokens again with "
        'data.objective="masked".'
    )
    assert not Path("run.toml").exists()


@pytest.mark.slow
def test_a_run_without_gpus_trains_and_another_takes_its_tokens(
    tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch, crosscut_here
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["crosscut", "new"])  # a worker of pytest has another name
    told = run("small.toml", *options(size="2.3M", data=str(book)))
    assert "crosscut train small.toml" in told
    assert "each token of the data is read" in told
    crosscut_here("train", "small.toml", "training.steps=2", "training.validation_sequences=4", status=0)
    config = tomllib.loads(Path("runs/small/config.toml").read_text(encoding="utf-8"))
    assert config["data"]["text"] == [str(book)]
    assert config["training"]["precision"] == "float32"
    for name in ("runs/small", "runs/small/tokens"):
        another = made(data=name).run
        assert another.data.tokens == "runs/small/tokens"
        assert another.data.text == ()
        assert another.model.vocab_size == config["model"]["vocab_size"]


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "run.toml", tmp_path / "link.toml"
    path.write_text("mine")
    link.symlink_to(tmp_path / "nowhere.toml")
    for name in (path, link):
        assert message(str(name), *options()) == (
            f"`RUN.toml` must name a new file, but `{name}` exists. Choose another name."
        )
    assert path.read_text() == "mine"
    assert not (tmp_path / "nowhere.toml").exists()


NO_DEVICE = (
    "`--gpus` must be a number and the name of a device, such as `8 x h100`, or `none`, but is `0 x h100`. `crosscut "
    "plan --list` lists the devices."
)
TWO_DEVICES = "`--gpus` must name one device, but `h10` matches 2. Choose `h100-pcie` or `h100-sxm`."
NO_NUMBER = "`--tokens` must be a number above 0 such as 300M or 20B, but is `lots`."
NO_PRESET = "`--size` must name a preset, but is `gpt2-smal`. The nearest is `gpt2-small`."
TOO_SMALL = (
    "`--size` must be a number of parameters that a model can have, but is 10K. The nearest model has 573K. Try 573K."
)
TOO_LARGE = (
    "A model of 69.7B parameters needs a layout that fits, but none does. In the closest layout, weights and optimizer "
    "need 838 GB per rank; the GPU has 80 GB. Name more devices or larger ones with `--gpus`, or a smaller model "
    "with `--size`."
)
NODES = "`--gpus` must give the devices of all nodes as one number, but is `4 x 8 x h100`. Type `32 x h100`."
NO_TEXT = (
    "`--data` must name existing files, but nothing matches `nothing.txt`. Check the path, or type `--data none` to "
    "name the data later."
)
A_CORPUS = (
    "`--data` must name text or token shards, but names `corpus.toml`. If this file describes a corpus, type `crosscut "
    "prepare corpus.toml` first, and then name the folder of the corpus."
)


@pytest.mark.parametrize(
    ("answers", "kind", "told"),
    [
        ({"gpus": "0 x h100"}, ConfigError, NO_DEVICE),
        ({"gpus": "8 x h10"}, ConfigError, TWO_DEVICES),
        ({"gpus": "4 x 8 x h100"}, ConfigError, NODES),
        ({"tokens": "lots"}, ConfigError, NO_NUMBER),
        ({"size": "gpt2-smal"}, ConfigError, NO_PRESET),
        ({"size": "10K"}, ConfigError, TOO_SMALL),
        ({"size": "70B", "gpus": "h100"}, ConfigError, TOO_LARGE),
        ({"data": "nothing.txt"}, DataError, NO_TEXT),
        ({"data": "corpus.toml"}, DataError, A_CORPUS),
    ],
)
def test_a_wrong_answer_writes_nothing(
    answers: dict[str, str], kind: type[Exception], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message("run.toml", *options(**answers), kind=kind) == told
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_a_name_on_this_machine(tmp_path: Path) -> None:
    assert message("s3://bucket/run.toml", *options()).startswith("`RUN.toml` must be a path on this machine, but is")
    assert message(str(tmp_path / ".toml"), *options()) == (
        f"`RUN.toml` must have a name before `.toml`, but is `{tmp_path}/.toml`. Try `{tmp_path}/run.toml`."
    )
    assert list(tmp_path.iterdir()) == []


def test_missing_answers_are_named_without_a_terminal(tmp_path: Path) -> None:
    assert message(str(tmp_path / "run.toml"), "--gpus", "none", "--tokens", "1M") == (
        "Options must answer all questions if no terminal can, but `--size`, `--data` are missing. Add, for example, "
        "--size 10M --data demo."
    )


def test_a_terminal_is_asked_until_the_answers_have_a_meaning(tmp_path: Path) -> None:
    """The terminal is a real one. Return takes what is proposed."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "crosscut", "new", "run.toml", "--tokens", "1M"]
    os.write(ours, b"8 x toaster\nnone\n3M\n\n")
    done = subprocess.run(command, cwd=tmp_path, stdin=theirs, capture_output=True, text=True, timeout=60, check=False)
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 0, done.stderr
    assert "`--gpus` must name a known device" in done.stdout + done.stderr
    heading = (tmp_path / "run.toml").read_text(encoding="utf-8").splitlines()[0]
    assert heading == "# Written by: crosscut new run.toml --gpus none --size 3M --tokens 1M --data demo"
    assert isinstance(load_run(tmp_path / "run.toml"), RunConfig)


def test_names_with_line_ends_stay_in_their_comments() -> None:
    settings = {"data.text": Reasoned(("a\nb = 1",), "a\nreason\x1b[2J")}
    text = commented_toml(settings, ["one\n[section]"])
    assert tomllib.loads(text) == {"data": {"text": ["a\nb = 1"]}}
    assert "\x1b" not in text
