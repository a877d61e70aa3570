"""From text to a token folder: the same whatever the workers, whole or not there, and never mistaken for another."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosscut.config import DataConfig, DataError
from crosscut.data import Shard, TokenFolder, masked_validation, prepare, validation_samples
from tests.endless import ENDLESS
from tests.refusals import refusal

prepare_module = sys.modules["crosscut.data.prepare"]  # as an attribute of the room, the name is the function's
CROSSCUT = Path(__file__).parents[2]
Make = Callable[..., TokenFolder]


@pytest.fixture
def config(corpus: Path, tokenizer_file: Path) -> DataConfig:
    return DataConfig(text=(str(corpus),), tokenizer=str(tokenizer_file), num_shards=3)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(config: DataConfig, *, seed: int = 5, **options: int) -> TokenFolder:
        return prepare(config, tmp_path / "tokens", seed=seed, progress=False, **options)

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("forked_workers")
def test_result_does_not_depend_on_the_workers(config: DataConfig, tmp_path: Path) -> None:
    config = replace(config, tokenizer="", vocab_size=300)
    folders = [
        prepare(config, tmp_path / f"tokens-{workers}", seed=5, workers=workers, progress=False).path
        for workers in (1, 2)
    ]
    assert contents(folders[0]) == contents(folders[1])


def test_folder_has_the_files_of_the_format(config: DataConfig, make: Make) -> None:
    names = {
        f"{name}.{kind}" for name in ("train-0", "train-1", "train-2", "validation") for kind in ("tokens", "index")
    }
    assert set(contents(make(config).path)) == names | {"manifest.json", "tokenizer.json"}


def test_split_and_shards_are_those_of_the_paper(config: DataConfig, make: Make) -> None:
    tokens = make(config)
    assert tokens.validation.num_documents == 3  # of 90, at 29:1
    sizes = [shard.num_tokens for shard in tokens.train]
    longest = max(int(np.diff(shard.ends, prepend=np.uint64(0)).max()) for shard in tokens.train)
    assert max(sizes) - min(sizes) <= longest


def origins_of(shards: Iterable[Shard]) -> set[tuple[str, int]]:
    return {shard.origin(number) for shard in shards for number in range(shard.num_documents)}


def write_books(folder: Path, sizes: Sequence[int]) -> tuple[str, ...]:
    """Text files of so many paragraphs of 800 characters: twenty of these are a document of their own."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        paragraphs = (f"{number}: {place} " + "of the whole book. " * 42 for place in range(size))
        (folder / f"{number:02}.txt").write_text("\n\n".join(paragraphs))
    return (str(folder),)


@pytest.mark.parametrize("seed", range(4))
def test_no_document_is_in_both_parts(config: DataConfig, make: Make, tmp_path: Path, seed: int) -> None:
    """Also no two pieces of one text file, if whole files can make up the validation set."""
    books = write_books(tmp_path / "books", [60] * 20)
    tokens = make(replace(config, text=(*config.text, *books), train_to_validation=9), seed=seed)
    train, validation = origins_of(tokens.train), origins_of([tokens.validation])
    assert not train & validation
    for part in (train, validation):
        assert max(Counter(name for name, _ in part if name.endswith(".txt")).values()) > 1, "a file has several pieces"
    assert not {name for name, _ in train if name.endswith(".txt")} & {name for name, _ in validation}


def test_a_text_file_larger_than_the_share_of_validation_is_split_by_its_pieces(
    config: DataConfig, make: Make, tmp_path: Path
) -> None:
    books = write_books(tmp_path / "books", [800, 30, 30])
    tokens = make(replace(config, text=books, train_to_validation=9))
    train, validation = ({name for name, _ in origins_of(part)} for part in (tokens.train, [tokens.validation]))
    assert {Path(name).name for name in train & validation} == {"00.txt"}
    assert 0 < tokens.validation.num_tokens < 0.3 * sum(shard.num_tokens for shard in tokens.train)


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_validation_on_two_books_reads_both(tmp_path: Path, objective: str) -> None:
    texts = [f"The {word} book has a sentence here. It is the {word} one of two.\n\n" for word in ("first", "second")]
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text * 2000)
    books = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    config = DataConfig(text=books, vocab_size=300, num_shards=1, objective=objective, train_to_validation=4)
    tokens = prepare(config, tmp_path / "tokens", seed=5, progress=False)
    assert tokens.validation.files() == list(books)
    options = {"sequence_length": 64}
    samples = (
        masked_validation(tokens, config, seed=5, **options)
        if objective == "masked"
        else validation_samples(tokens, **options)
    )
    assert samples.count(0) > 8
    rows = np.concatenate([batch.tokens for batch in samples.batches(batch_size=4, limit=8)])
    counts = Counter(word for row in rows for word in tokens.tokenizer().decode(row.tolist()).split())
    assert min(counts["first"], counts["second"]) > 5, "sequences come from both books"


def test_a_text_file_of_many_documents_is_split_by_its_pieces(
    config: DataConfig, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "LARGEST_WHOLE_FILE", 40_000)
    tokens = make(replace(config, text=write_books(tmp_path / "books", [60] * 20), train_to_validation=9))
    train, validation = ({name for name, _ in origins_of(part)} for part in (tokens.train, [tokens.validation]))
    assert train & validation


def test_held_out_documents_do_not_depend_on_the_tokenizer(config: DataConfig, make: Make, tmp_path: Path) -> None:
    other = prepare(replace(config, tokenizer="", vocab_size=260), tmp_path / "other", seed=5, progress=False)
    assert origins_of([make(config).validation]) == origins_of([other.validation])


def test_given_tokenizer_is_kept_as_it_is(config: DataConfig, make: Make, tokenizer_file: Path) -> None:
    assert (make(config).path / "tokenizer.json").read_bytes() == tokenizer_file.read_bytes()


def test_tokenizer_is_trained_on_the_text_when_none_is_given(config: DataConfig, make: Make) -> None:
    tokens = make(replace(config, tokenizer="", vocab_size=280))
    assert tokens.vocab_size == 280
    assert tokens.manifest.settings.trained_vocab_size == 280


def test_existing_folder_is_used_as_it_is(config: DataConfig, make: Make) -> None:
    folder = make(config).path
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    make(config)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_existing_folder_is_verified_when_asked(config: DataConfig, make: Make) -> None:
    path = make(config).path / "train-0.tokens"
    path.write_bytes(path.read_bytes()[::-1])
    make(replace(config, verify=False))
    with pytest.raises(DataError, match="must have the SHA-256"):
        make(config)


def test_same_text_at_another_place_and_time_is_the_same_text(config: DataConfig, make: Make, corpus: Path) -> None:
    make(config)
    moved = corpus.with_name("moved.jsonl")
    shutil.copyfile(corpus, moved)
    os.utime(moved, ns=(1, 1))
    make(replace(config, text=(str(moved),)))


def test_folder_of_other_text_is_refused(config: DataConfig, make: Make, corpus: Path) -> None:
    folder = make(config).path
    for text in (corpus.read_text().replace("Text 1:", "Text i:"), corpus.read_text() + '{"text": "more"}\n'):
        corpus.write_text(text)
        assert refusal(DataError, make, config) == (
            f"`{folder}` must hold the tokens of this text with these settings, but was made from other text. Choose "
            "another `data.tokens`, delete the folder, or leave `data.text` empty to use the folder's tokens unchanged."
        )


def test_folder_of_other_settings_is_refused(config: DataConfig, make: Make) -> None:
    folder = make(config).path
    assert refusal(DataError, make, replace(config, num_shards=4), seed=6) == (
        f"`{folder}` must hold the tokens of this text with these settings, but was made from `training.seed` 5 "
        f"instead of 6, `data.num_shards` 3 instead of 4. Choose another `data.tokens`, delete the folder, or leave "
        f"`data.text` empty to use the folder's tokens unchanged."
    )


@pytest.mark.parametrize(
    ("made", "asked", "difference"),
    [
        ({}, {"text_key": "body"}, "`data.text_key` 'text' instead of 'body'"),
        ({}, {"train_to_validation": 9}, "`data.train_to_validation` 29 instead of 9"),
        ({"tokenizer": ""}, {"tokenizer": "", "vocab_size": 310}, "`data.vocab_size` 300 instead of 310"),
        ({}, {"tokenizer": ""}, "a given `data.tokenizer` instead of one trained with `data.vocab_size` 300"),
        ({"tokenizer": ""}, {}, "a tokenizer trained with `data.vocab_size` 300 instead of `data.tokenizer`"),
        ({}, {"tokenizer": "other.json"}, "another `data.tokenizer`"),
    ],
)
def test_other_settings_are_named_by_the_keys_that_a_user_sets(
    config: DataConfig, make: Make, made: dict[str, Any], asked: dict[str, Any], difference: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("{}")
    config = replace(config, vocab_size=300)
    make(replace(config, **made))
    with pytest.raises(DataError, match=re.escape(f"was made from {difference}. Choose another")):
        make(replace(config, **asked))


def test_place_that_holds_other_things_is_refused(config: DataConfig, make: Make, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="must be a folder of token shards, but has no manifest"):
        make(config)
    assert (tmp_path / "tokens" / "letter.txt").read_text() == "dear"


def test_empty_folder_is_filled(config: DataConfig, make: Make, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    make(config)


def test_folder_named_in_the_config_comes_first(config: DataConfig, make: Make, tmp_path: Path) -> None:
    place = tmp_path / "deep" / "named"
    assert make(replace(config, tokens=str(place))).path == place


def test_without_text_the_folder_is_opened(config: DataConfig, make: Make, tmp_path: Path) -> None:
    made = make(config)
    assert make(DataConfig(tokens=str(made.path)), seed=99).path == made.path
    assert make(DataConfig(), seed=99).path == made.path


def test_neither_text_nor_tokens_is_an_error(make: Make) -> None:
    assert refusal(DataError, make, DataConfig()) == (
        "`data.text`, `data.tokens` or `data.mixture` must be given, but all three are empty. Name the text to train "
        "on."
    )


def test_tokenizer_that_is_not_there_is_an_error(config: DataConfig, make: Make) -> None:
    assert (
        refusal(DataError, make, replace(config, tokenizer="nowhere.json"))
        == "`nowhere.json` must be a readable file, but is not: No such file or directory. Check the path."
    )


def test_fault_in_the_text_leaves_nothing(config: DataConfig, make: Make, corpus: Path, tmp_path: Path) -> None:
    with corpus.open("a") as file:
        file.write("{")
    for _ in range(2):
        with pytest.raises(DataError, match="line 91, must be valid JSON"):
            make(config)
    assert list(tmp_path.iterdir()) == [corpus]


def test_text_that_changes_while_it_is_read_is_an_error(
    config: DataConfig, make: Make, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append_and_write(*args, **options):
        with corpus.open("a") as file:
            file.write('{"text": "more"}\n')
        return write(*args, **options)

    write = prepare_module.write_shards
    monkeypatch.setattr(prepare_module, "write_shards", append_and_write)
    assert (
        refusal(DataError, make, config)
        == f"`{corpus}` must not change while it is read, but changed. Prepare the tokens again."
    )


def test_place_where_no_folder_can_be_made_is_an_error(config: DataConfig, corpus: Path) -> None:
    assert refusal(DataError, prepare, config, corpus / "tokens", seed=5, progress=False) == (
        f"`{corpus / 'tokens'}` must be a path where a folder can be created, but is not: File exists. "
        f"Choose another `data.tokens`."
    )


def test_folder_made_by_another_process_in_the_meantime_is_used(
    config: DataConfig, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = prepare(config, tmp_path / "other", seed=5, progress=False).path
    check = prepare_module._check_unchanged

    def appear(sources):
        check(sources)
        other.rename(tmp_path / "tokens")

    monkeypatch.setattr(prepare_module, "_check_unchanged", appear)
    make(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "tokens"]


def test_folders_of_dead_processes_are_removed_and_those_of_living_ones_kept(
    config: DataConfig, make: Make, tmp_path: Path
) -> None:
    prefix = f".tokens.unfinished.{socket.gethostname()}"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folders = {
        name: tmp_path / name
        for name in (f"{prefix}.{dead.pid}", f"{prefix}.{os.getppid()}", ".tokens.unfinished.elsewhere.1")
    }
    for folder in folders.values():
        folder.mkdir()
    make(config)
    assert [folder.exists() for folder in folders.values()] == [False, True, True]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_run_killed_in_the_middle_leaves_nothing_that_passes_for_tokens(
    config: DataConfig, make: Make, corpus: Path, tmp_path: Path
) -> None:
    corpus.write_text(corpus.read_text() * 40)
    script = (
        "import sys; from pathlib import Path\n"
        "from crosscut.config import DataConfig; from crosscut.data import prepare\n"
        "prepare(DataConfig(text=(sys.argv[1],), tokenizer=sys.argv[2]), Path(sys.argv[3]), seed=5, workers=2)"
    )
    arguments = [sys.executable, "-c", script, str(corpus), config.tokenizer, str(tmp_path / "tokens")]
    process = subprocess.Popen(arguments, cwd=CROSSCUT, start_new_session=True, stderr=subprocess.DEVNULL)
    wait_for(lambda: any(tmp_path.glob(".tokens.unfinished.*/*.tokens")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "tokens").exists()
    assert len(list(tmp_path.glob(".tokens.unfinished.*"))) == 1
    wait_for(lambda: not session_lives(process.pid))  # the workers leave with their parent
    make(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "tokens"]


def session_lives(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_progress_bar_shows_phases_and_rate(
    config: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(replace(config, tokenizer="", vocab_size=300), tmp_path / "tokens", seed=5)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Tokenizer" in shown.err
    assert "Tokens" in shown.err
    assert "MB/s" in shown.err


def test_importing_the_room_is_quick() -> None:
    script = (
        "import sys, crosscut.data; print({'torch', 'tokenizers', 'pyarrow', 'zstandard', 'rich'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=CROSSCUT, capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokens/manifest.json"])
def test_file_whose_reading_may_never_end_is_refused(
    config: DataConfig, make: Make, tmp_path: Path, kind: str, name: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    ENDLESS[kind](path)
    assert refusal(DataError, make, replace(config, tokenizer=str(path)) if name == "tokenizer.json" else config) == (
        f"`{path}` must be a readable file, but is not: It is {kind}, not a regular file. Write the data to a file, "
        "and name that file."
    )
