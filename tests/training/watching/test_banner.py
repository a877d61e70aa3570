import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from crosscut.config.recipes import describe_recipe
from crosscut.config.system.wording import short
from crosscut.data import TokenFolder
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.training.batches import samples_of
from crosscut.training.precision import resolve_on
from crosscut.training.watching.banner import COUNTS, print_banner
from tests.training.jobs import CPU


def printed(run, *, done=0) -> str:
    console = Console(file=io.StringIO(), width=120)
    samples = samples_of(run, TokenFolder.open(Path(run.tokens_folder)))
    print_banner(resolve_on(run, CPU), samples, KNOWN_HARDWARE["laptop"], CPU, console, done=done)
    return console.file.getvalue()


def test_banner_says_what_will_be_trained_on_what_and_for_how_long(run_with):
    run = run_with("layout.tensor=2", "training.steps=9000", "output.folder=here")
    corpus = sum(shard.num_tokens for shard in TokenFolder.open(Path(run.tokens_folder)).train)
    text = printed(run)
    for fact in (
        "GPT-2, ", " parameters (", "vocabulary 500", "tensor 2 x data 1: 2 processes",
        f"{corpus / 1e3:.3g}k tokens for training", "9,000 steps of 4 x 32 tokens",
        f"{9000 * 128 / corpus:.3g} epochs", "here", "expected time",
    ):  # fmt: skip
        assert fact in text, fact
    assert "steps 7 to 9,000 of 4 x 32 tokens" in printed(run, done=6)


def test_banner_says_on_which_documents_the_run_validates(run_with):
    run = run_with("training.validation_sequences=3")
    shard = TokenFolder.open(Path(run.tokens_folder)).validation
    documents, files = f"{shard.num_documents} held-out document", ", ".join(Path(n).name for n in shard.files())
    assert shard.num_documents == 1
    assert f"3 evenly spread sequences of {documents} from {files}" in printed(run)
    every = -(-(shard.num_tokens - 1) // 32)
    assert f"all {every} sequences of {documents}" in printed(run_with("training.validation_sequences=0"))
    assert f"all {every} sequences of {documents}" in printed(run_with("training.validation_sequences=100000"))


def test_banner_counts_the_files_if_there_are_many(run_with, monkeypatch):
    names = [f"books/{number}.txt" for number in range(4)]
    monkeypatch.setattr("crosscut.data.shards.reading.Shard.files", lambda shard: names)
    assert "from 4 files" in printed(run_with())
    monkeypatch.setattr("crosscut.data.shards.reading.Shard.files", lambda shard: names[:2])
    assert "from 0.txt, 1.txt" in printed(run_with())


def test_banner_says_the_recipe_and_the_learning_rate(run_with):
    run = run_with("optimizer.learning_rate=2e-3")
    row = next(line for line in printed(run).splitlines() if " recipe " in line)
    assert row.strip("│ ").split(maxsplit=1)[1] == "small (the default below 100M parameters): learning rate 0.002"
    assert describe_recipe(replace(run, recipe="paper")) == "paper: learning rate 0.002"
    assert describe_recipe(replace(run, recipe="")) == "learning rate 0.002"


def test_a_model_of_one_layer_has_no_layers(run_with):
    text = printed(run_with("model.num_layers=1", "model.num_heads=1"))
    assert "(1 layer of attention and gelu; hidden 64; 1 head; vocabulary 500)" in text
    assert "(2 layers of attention and gelu; hidden 64; 4 heads; vocabulary 500)" in printed(run_with())


def test_a_batch_that_grows_is_told(run_with):
    growing = ("training.batch_size=8", "training.initial_batch_size=4", "training.ramp_steps=60")
    run = run_with("training.steps=100", *growing)
    corpus = sum(shard.num_tokens for shard in TokenFolder.open(Path(run.tokens_folder)).train)
    text = printed(run)
    assert "100 steps of 4 to 8 x 32 tokens" in text
    assert f"{(60 * 4 + 40 * 8) * 32 / corpus:.3g} epochs" in text


@pytest.mark.parametrize(
    ("number", "text"), [(999.4, "999"), (999.7, "1k"), (999_999, "1M"), (999_499, "999k"), (999_900_000, "1B")]
)
def test_a_number_is_rounded_before_its_letter_is_chosen(number, text):
    assert short(number, COUNTS) == text
