"""Damaged input ends a command with a status of its own, so that a script can get the files again."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from crosscut.cli.main import EXIT_DAMAGED
from crosscut.config import CheckpointError, DamagedCheckpointError, DamagedDataError, DataError
from crosscut.data.text.sources import BrokenOffError
from tests.cli.conftest import TINY
from tests.cli.test_terminal import on_terminal

__all__ = ["on_terminal"]


def flip(path: Path) -> None:
    """Change a bit in the middle of a file, as a failing disk does: the file keeps its time."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def folder(tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a file of documents and the description of a corpus."""
    pages = book.read_text()[:90_000]
    lines = [json.dumps({"text": f"{number} {pages[number * 900 :][:900]}"}) + "\n" for number in range(100)]
    (tmp_path / "pages.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (tmp_path / "corpus.toml").write_text(
        'folder = "corpus"\ntokens.vocab_size = 300\nengine.workers = 1\n'
        '[[sources]]\nname = "web"\nfiles = ["pages.jsonl.gz"]\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut, "is truncated at byte"),
        pytest.param(flip, "pages.jsonl.gz", marks=pytest.mark.slow),
        pytest.param(lambda path: path.write_bytes(b"\x1f\x8b\x08"), "is truncated at byte 3", marks=pytest.mark.slow),
    ],
    ids=["half", "flipped byte", "header alone"],
)
def test_damaged_gzip_in_prepare(crosscut_here, folder: Path, damage: Callable[[Path], object], told: str) -> None:
    damage(folder / "pages.jsonl.gz")
    result = crosscut_here("prepare", "corpus.toml")
    assert result.returncode == EXIT_DAMAGED == 65, result.stderr
    assert told in result.stderr
    assert "Traceback" not in result.stderr
    assert crosscut_here("prepare", *TINY, "data.text=pages.jsonl.gz").returncode == EXIT_DAMAGED


def test_a_share_of_bad_lines_is_a_mistake_and_no_damage(crosscut_here, folder: Path) -> None:
    (folder / "pages.jsonl.gz").write_bytes(gzip.compress(b"not JSON\n" * 9 + b'{"text": "a"}\n'))
    assert crosscut_here("prepare", "corpus.toml").returncode == 2


@pytest.mark.slow  # the whole command; tests/corpus/test_ingest.py has the rule
def test_damage_that_is_allowed_is_no_error(crosscut_here, folder: Path) -> None:
    cut(folder / "pages.jsonl.gz")
    allowed = ("ingest.max_damaged_files=1", "ingest.max_rejects=0.9")
    assert "damaged" in crosscut_here("prepare", "corpus.toml", *allowed, status=0).stdout


@pytest.mark.slow  # tests/corpus/test_pipeline.py has the rule
def test_flipped_byte_in_a_shard_of_a_finished_corpus(crosscut_here, folder: Path) -> None:
    assert crosscut_here("prepare", "corpus.toml").returncode == 0
    flip(folder / "corpus" / "tokens" / "train-0.tokens")
    result = crosscut_here("prepare", "corpus.toml", status=EXIT_DAMAGED)
    assert "must be unchanged since it was written, but is damaged. Start `crosscut prepare` again" in result.stderr
    assert crosscut_here("prepare", "corpus.toml").returncode == 0, "the shards are written anew"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train-0.tokens", flip),
        pytest.param("train-0.tokens", cut, marks=pytest.mark.slow),
        pytest.param("train-0.index", flip, marks=pytest.mark.slow),
        pytest.param("validation.tokens", Path.unlink, marks=pytest.mark.slow),
        ("manifest.json", cut),
        pytest.param("tokenizer.json", flip, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damaged_tokens_in_train(crosscut_here, folder: Path, name: str, damage: Callable[[Path], object]) -> None:
    assert crosscut_here("prepare", *TINY, "data.text=pages.jsonl.gz", "data.tokens=tokens").returncode == 0
    damage(folder / "tokens" / name)
    result = crosscut_here(
        "train", *TINY, "data.text=[]", "data.tokens=tokens", "output.folder=run", status=EXIT_DAMAGED
    )
    assert result.stderr.startswith(f"crosscut: `tokens/{name}` must ")


def test_damaged_checkpoints_and_texts(crosscut_here, folder: Path) -> None:
    settings = (*TINY, "data.text=pages.jsonl.gz", "training.steps=2", "output.sample_tokens=0")
    assert crosscut_here("train", *settings, "output.folder=run").returncode == 0
    shutil.copy("pages.jsonl.gz", "cut.jsonl.gz")
    cut(folder / "cut.jsonl.gz")
    evaluate = ("evaluate", "run", "--text", "cut.jsonl.gz", "--window", "16", "--stride", "8")
    assert crosscut_here(*evaluate).returncode == EXIT_DAMAGED
    flip(folder / "run" / "checkpoints" / "step-00000002" / "rank-0.safetensors")
    for command in (
        ("train", "run/config.toml", "--resume", "training.steps=3", "output.folder=run"),
        ("generate", "run", "--prompt", "a", "--tokens", "1"),
        ("generate", "run/checkpoints/step-00000002", "--prompt", "a", "--tokens", "1"),
    ):
        assert "Traceback" not in crosscut_here(*command, status=EXIT_DAMAGED).stderr
    assert crosscut_here("generate", "run/checkpoints/step-00000009", "--prompt", "a").returncode == 2, "is missing"


def test_damage_is_told_in_red_on_a_terminal_and_as_json(on_terminal, crosscut_here, folder: Path) -> None:
    cut(folder / "pages.jsonl.gz")
    told = crosscut_here("prepare", "corpus.toml", "--json", status=EXIT_DAMAGED)
    assert "is truncated at byte" in json.loads(told.stdout)["error"]["message"]
    shown = on_terminal("prepare", "corpus.toml")
    assert "\x1b[31mcrosscut: `ingest.max_" in shown
    assert "\x1b" not in on_terminal("prepare", "corpus.toml", terminal="dumb").rpartition("crosscut: ")[2]
    assert "\x1b[31m" not in on_terminal("prepare", "nowhere.toml"), "a mistake is not red"


def test_damage_is_of_the_kind_of_its_files() -> None:
    """Code that handles unreadable data or checkpoints also handles damage; ranks send an error by its class's name."""
    assert issubclass(DamagedDataError, DataError)
    assert issubclass(DamagedCheckpointError, CheckpointError)
    assert issubclass(BrokenOffError, DamagedDataError)
