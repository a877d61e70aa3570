"""The runs that the project ships, and the commands that the README shows, are runs."""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosscut.cli.arguments import run_from
from crosscut.cli.main import commands as group
from crosscut.config import is_corpus, load_corpus, load_run, padded_vocab_size, write_toml
from crosscut.config.corpora import CleaningConfig
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.paper.runs import PAPER_EPOCHS, PAPER_SCALING, paper_run

ROOT = Path(__file__).resolve().parents[2]


PAPER = ROOT / "examples" / "paper"
EXAMPLES = sorted([*ROOT.glob("examples/*.toml"), *PAPER.glob("*.toml"), ROOT / "crosscut" / "config" / "demo.toml"])
CORPORA = [path for path in EXAMPLES if is_corpus(path)]


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path not in CORPORA], ids=lambda path: path.name)
def test_shipped_run_loads(path):
    assert load_run(path).layout.world_size >= 1


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.toml")), ids=lambda path: path.name)
def test_runs_of_the_paper_have_a_precision_of_its_gpus(path):
    assert load_run(path).training.precision in KNOWN_HARDWARE["v100-32gb-dgx2h"].flops


PAPER_RUNS = [*((f"scaling-{preset}", tensor, 1) for preset, tensor in PAPER_SCALING.items())]
PAPER_RUNS += [(f"gpt2-{preset}", tensor, 64) for preset, tensor in PAPER_EPOCHS]


@pytest.mark.parametrize(("name", "tensor", "data"), PAPER_RUNS)
def test_runs_of_the_paper_have_the_settings_of_its_tables(name, tensor, data):
    kind, _, preset = name.partition("-")
    short = preset.removeprefix("megatron-").removesuffix("-24-heads")
    run, forecast = load_run(PAPER / f"{kind}-{short}.toml"), paper_run(preset, tensor, data)
    assert run.layout == forecast.layout
    assert replace(run.model, vocab_multiple=128) == forecast.model
    for field in ("batch_size", "precision", "recompute", "sequence_length"):
        assert getattr(run.training, field) == getattr(forecast.training, field)
    for ranks in (1, 2, 4, 8):
        assert padded_vocab_size(run.model.vocab_size, ranks, run.model.vocab_multiple) == 51_200
    if data > 1:
        optimizer, training = run.optimizer, run.training
        assert (training.steps, optimizer.warmup_steps, optimizer.schedule) == (300_000, 3000, "cosine")
        assert (optimizer.learning_rate, optimizer.min_learning_rate) == (1.5e-4, 1e-5)
        assert (optimizer.weight_decay, optimizer.clip_norm, run.model.dropout) == (0.01, 1.0, 0.1)


def test_what_a_head_says_to_try_is_a_run():
    tries = [(path, words) for path in EXAMPLES for words in tries_of(path)]
    assert "books.toml" in [path.name for path, _ in tries]
    for path, words in tries:
        assert load_run(path, words).training.steps >= 1, path


def tries_of(path: Path) -> list[list[str]]:
    """The settings of each command in a file's comments: after `crosscut train` and the file, or after `...`."""
    text = path.read_text(encoding="utf-8")
    command = rf"(?:\.\.\.|crosscut train examples/\S*{path.name})((?: [a-z_.]+=\S+)+)"
    return [line.split() for line in re.findall(command, re.sub(r" *\\\n# *", " ", text))]


@pytest.mark.parametrize("path", CORPORA, ids=lambda path: path.name)
def test_shipped_corpus_loads_with_the_papers_settings(path):
    corpus = load_corpus(path)
    assert (corpus.length.min_tokens, corpus.duplicates.jaccard, corpus.leakage.ngram) == (128, 0.7, 8)
    assert (corpus.tokens.train_to_validation, corpus.tokens.num_shards) == (29, 5)
    assert corpus.cleaning == CleaningConfig.all_or_none(True), "the paper repaired English text with all of ftfy"


@dataclass(frozen=True)
class Command:
    arguments: tuple[str, ...]
    """Arguments of `crosscut train`, without its options."""

    num_ranks: int | None
    """Processes that torchrun starts; None without torchrun."""


def train_commands(text: str) -> list[Command]:
    """The commands in a page's ```sh blocks that train."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command_of(line) for line in lines if "train" in line and any(word.endswith("crosscut") for word in line)]


def command_of(line: list[str]) -> Command:
    words = line[line.index("train") + 1 :]
    arguments = [word for word in words if not word.startswith("--") and word != "auto"]  # `auto` belongs to --resume
    num_ranks = None
    if line[0].endswith("torchrun"):
        num_ranks = int(line[line.index("--nnodes") + 1]) * int(line[line.index("--nproc-per-node") + 1])
    return Command(tuple(arguments), num_ranks)


def check_commands(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """Check in this folder that each command of a page that trains is a run, with as many ranks as torchrun starts."""
    monkeypatch.chdir(folder)
    commands = train_commands(page.read_text(encoding="utf-8"))
    for command in commands:
        run = run_from(command.arguments)
        assert command.num_ranks in (None, run.layout.world_size), command
        written = Path(run.output.folder) / "config.toml"  # what a later command goes on from
        written.parent.mkdir(parents=True, exist_ok=True)
        write_toml(run, written)
    return commands


def test_readme_commands_are_runs(tmp_path, monkeypatch):
    assert check_commands(ROOT / "README.md", tmp_path, monkeypatch)


def test_the_job_on_a_cluster_is_planned_and_fits_its_nodes(tmp_path, monkeypatch):
    page = ROOT / "docs" / "cluster.md"
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    monkeypatch.chdir(tmp_path)
    for planned in re.findall(r"^crosscut (plan .*--write .*)$", text, re.MULTILINE):
        assert CliRunner().invoke(group, shlex.split(planned)).exit_code == 0, planned
    commands = check_commands(page, tmp_path, monkeypatch)
    assert [command.num_ranks for command in commands] == [None, None, 32]
    ranks = [load_run(Path(name)).layout.world_size for name in ("small.toml", "trial.toml", "run.toml")]
    assert ranks == [1, 8, 32]


def test_commands_are_found_with_their_arguments_and_ranks():
    page = """\
```sh
.venv/bin/crosscut train a.toml --resume \\
    data.text='a b.txt'
crosscut generate runs/a --prompt "It"
torchrun --nnodes 2 --nproc-per-node 4 ... -m crosscut train b.toml
```
```toml
crosscut train c.toml
```
"""
    assert train_commands(page) == [Command(("a.toml", "data.text=a b.txt"), None), Command(("b.toml",), 8)]
