"""The folder that training reads: split by documents, weighted by sources, whole or not there."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosscut.config import DataConfig, DataError
from crosscut.config.corpora import CorpusConfig, SourceConfig, TokensConfig
from crosscut.corpus.documents import Lineage, Part, read_table, write_table
from crosscut.corpus.execution.stages import Output, StageTask, execute
from crosscut.corpus.tokens import packing as packing_module
from crosscut.corpus.tokens.encoding import tokens_stage
from crosscut.corpus.tokens.packing import packing_stage, publish
from crosscut.data import Sampler, Shard, TokenFolder, Tokenizer, prepare
from crosscut.data.progress import ProgressBar
from crosscut.data.shards.megatron import IndexedTokens
from crosscut.data.shards.writing import INDEX_DTYPE
from tests.cli.conftest import TINY
from tests.corpus.ingested import run, write_part
from tests.refusals import refusal

COUNT = 150


def text_of(source: str, number: int) -> str:
    return f"{source} {number}: {'and so on ' * (number % 7)}"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train([text_of(source, 9) for source in ("news", "books")], vocab_size=280).save(path)
    return path


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder with two parts of two sources."""
    work = tmp_path_factory.mktemp("corpus") / "work"
    for number, source in enumerate(("news", "books")):
        texts = [text_of(source, number) for number in range(1, COUNT + 1)]
        write_part(work, texts, name=f"{number:06}-0000", file=f"{source}/a#b/{source}.jsonl")
    return work


class Corpus:
    """The parts of a test, packed as often as it asks."""

    def __init__(self, work: Path, tokenizer: Path) -> None:
        self.work = work
        self.tokenizer = tokenizer
        self.target = work.parent / "tokens"

    def pack(self, *, weights: tuple[float, float] = (1, 1), seed: int = 5, **tokens: Any) -> TokenFolder:
        sources = [
            SourceConfig(name=name, files=("x",), weight=w) for name, w in zip(("news", "books"), weights, strict=True)
        ]
        settings = TokensConfig(tokenizer="given", num_shards=3, **tokens)
        config = CorpusConfig(sources=tuple(sources), folder="x", seed=seed, tokens=settings)
        encoding = tokens_stage(
            tokenizer=self.tokenizer, min_tokens=0, lineage=Lineage(cleaned=True), sentences=settings.has_sentences
        )
        self.results = run(self.work, [encoding, packing_stage(config, self.tokenizer)])
        publish(self.work, self.target, ProgressBar(shown=False))
        return TokenFolder.open(self.target, verify=True)


@pytest.fixture
def corpus(parts: Path, tokenizer_file: Path, tmp_path: Path) -> Corpus:
    work = shutil.copytree(parts, tmp_path / "corpus" / "work")
    copied = write_tokenizer(work, tokenizer_file)
    return Corpus(work, copied)


def write_tokenizer(work: Path, file: Path) -> Path:
    """The tokenizer as a stage leaves it."""

    def copy(output: Output) -> dict[str, int]:
        shutil.copyfile(file, output.path("tokenizer.json"))
        return {}

    execute(work / "tokenizer", StageTask(name="making", function=copy), "copied")
    return work / "tokenizer" / "tokenizer.json"


def texts_of(folder: TokenFolder, *shards: Shard) -> list[str]:
    tokenizer = folder.tokenizer()
    return [
        tokenizer.decode(shard.document(number).tolist()) for shard in shards for number in range(shard.num_documents)
    ]


ALL = [text_of(source, number) for source in ("news", "books") for number in range(1, COUNT + 1)]


def test_every_document_is_once_in_training_or_validation(corpus: Corpus) -> None:
    folder = corpus.pack()
    validation = texts_of(folder, folder.validation)
    assert len(validation) == 2 * COUNT // 30
    assert Counter(texts_of(folder, *folder.train) + validation) == Counter(ALL)
    sizes = [shard.num_tokens for shard in folder.train]
    assert max(sizes) - min(sizes) <= max(len(folder.tokenizer().encode(text)) for text in ALL) + 1


def test_origin_names_file_and_record(corpus: Corpus) -> None:
    folder = corpus.pack()
    for shard in (*folder.train, folder.validation):
        for number, text in enumerate(texts_of(folder, shard)):
            source, record = text.split(":")[0].split()
            assert shard.origin(number) == (f"{source}/a#b/{source}.jsonl", int(record))


def test_tasks_travel_to_other_processes(corpus: Corpus) -> None:
    corpus.pack()
    config = CorpusConfig(sources=(SourceConfig(name="news", files=("x",)),), folder="x")
    encoding = tokens_stage(tokenizer=corpus.tokenizer, min_tokens=0, lineage=Lineage(cleaned=True))
    for stage in (encoding, packing_stage(config, corpus.tokenizer)):
        for task in stage.tasks(corpus.work):
            assert pickle.loads(pickle.dumps(task)).name == task.name


def test_folder_is_sampled_as_any_other(corpus: Corpus) -> None:
    folder = corpus.pack()
    batch = Sampler(folder.train, sequence_length=16, seed=1).batch(0, batch_size=4)
    assert batch.tokens.shape == batch.targets.shape == (4, 16)


@pytest.mark.parametrize("weights", [(2, 0.25), (1.5, 1), (0.01, 3)])
def test_weights_repeat_and_thin_out_training_and_nothing_else(corpus: Corpus, weights: tuple[float, float]) -> None:
    plain = corpus.pack()
    validation = texts_of(plain, plain.validation)
    folder = corpus.pack(weights=weights)
    assert texts_of(folder, folder.validation) == validation
    counts = Counter(texts_of(folder, *folder.train))
    assert not set(counts) & set(validation)
    for source, weight in zip(("news", "books"), weights, strict=True):
        own = [counts[text] for text in ALL if text.startswith(source) and text not in validation]
        assert set(own) <= {int(np.floor(weight)), int(np.ceil(weight))}
        assert abs(sum(own) - weight * len(own)) <= 3 * np.sqrt(len(own) * (weight % 1) * (1 - weight % 1))
        train = corpus.results["packing"].counts["sources"][source].get("train", {"documents": 0})
        assert train["documents"] == sum(own)


def test_result_is_a_function_of_the_seed(corpus: Corpus) -> None:
    def contents(seed: int) -> dict[str, bytes]:
        shutil.rmtree(corpus.work / "packing", ignore_errors=True)
        folder = corpus.pack(weights=(1, 0.5), seed=seed).path
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    first, other = contents(5), contents(6)
    assert contents(5) == first
    assert other["validation.tokens"] != first["validation.tokens"]


def test_pieces_of_a_document_stay_on_one_side(corpus: Corpus) -> None:
    folder = corpus.pack()
    assert folder.validation.num_documents == 10
    path = corpus.work / "tokens" / "000000-0000.index.arrow"
    index = read_table(path)
    columns = {name: index[name].to_pylist() for name in index.column_names}
    columns["row"] = [number // 5 for number in range(COUNT)]  # five texts in a row are now a document's pieces
    write_table(path, columns, index.schema)
    output = Output(corpus.work / "packing")
    config = CorpusConfig(
        sources=(SourceConfig(name="news", files=("x",), weight=0.5),),
        folder="x",
        seed=1,
        tokens=TokensConfig(num_shards=2, train_to_validation=3),
    )
    packing_module.pack([Part(corpus.work, "000000-0000")], corpus.tokenizer, config, output)
    validation = np.fromfile(corpus.work / "packing" / "validation.index", dtype=INDEX_DTYPE)
    documents = Counter(((validation["record"] - 1) // 5).tolist())
    assert len(documents) == 8 and set(documents.values()) == {5}
    training = [np.fromfile(corpus.work / "packing" / f"train-{n}.index", dtype=INDEX_DTYPE) for n in (0, 1)]
    copies = Counter(((np.concatenate(training)["record"] - 1) // 5).tolist())
    assert set(copies.values()) == {5} and not set(copies) & set(documents)


def test_megatron_reads_each_shard(corpus: Corpus) -> None:
    folder = corpus.pack(megatron=True)
    for shard in (*folder.train, folder.validation):
        theirs = IndexedTokens.open(folder.path / shard.name)
        assert theirs.num_documents == shard.num_documents
        assert theirs.tokens.dtype == np.uint16
        for number in range(shard.num_documents):
            assert theirs.document(number).tolist() == shard.document(number).tolist()
    corpus.pack(megatron=False)
    assert not list(corpus.target.glob("*.idx"))


def test_wide_ids_are_signed_for_megatron(tmp_path: Path) -> None:
    (tmp_path / "train-0.index").write_bytes(np.array([(3, 1, 0), (5, 2, 0)], INDEX_DTYPE).tobytes())
    (tmp_path / "train-0.bin").write_bytes(np.arange(5, dtype="<u4").tobytes())
    packing_module._index_for_megatron(tmp_path, "train-0", np.dtype("<u4"))
    theirs = IndexedTokens.open(tmp_path / "train-0")
    assert (theirs.tokens.dtype, theirs.document(1).tolist()) == (np.int32, [3, 4])


def test_published_folder_is_left_alone_while_it_is_the_same(corpus: Corpus) -> None:
    corpus.pack()
    before = corpus.target.stat().st_ino
    publish(corpus.work, corpus.target, ProgressBar(shown=False))
    assert corpus.target.stat().st_ino == before
    (corpus.target / "train-0.tokens").unlink()
    publish(corpus.work, corpus.target, ProgressBar(shown=False))
    assert corpus.target.stat().st_ino != before
    TokenFolder.open(corpus.target, verify=True)
    assert [path.name for path in corpus.target.parent.iterdir() if path.name.startswith(".")] == [".crosscut"]


@pytest.mark.parametrize("before", ["nothing", "a corpus", "a file"])
def test_other_things_are_not_replaced(corpus: Corpus, before: str) -> None:
    mine = corpus.target if before == "a file" else corpus.target / "mine.txt"
    if before == "a corpus":
        corpus.pack()
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    told = refusal(DataError, corpus.pack, seed=6)
    assert "tokens` must not exist, or must hold only token shards of a corpus, but holds other files" in told
    assert mine.read_text() == "mine"


def test_files_are_copied_where_links_cannot_be_made(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path, **_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    folder = corpus.pack(megatron=True)
    assert (folder.path / "train-0.bin").read_bytes() == (folder.path / "train-0.tokens").read_bytes()


def test_disk_that_is_full_is_told_and_leaves_the_old_folder(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    before = corpus.pack()

    def fill(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packing_module, "_link", fill)
    with pytest.raises(DataError, match="must be writable, but writing failed: No space left on device"):
        corpus.pack(seed=6)
    assert TokenFolder.open(corpus.target, verify=True).manifest == before.manifest
    assert [path.name for path in corpus.target.parent.iterdir() if path.name.startswith(".")] == [".crosscut"]


def test_too_few_documents(corpus: Corpus, tmp_path: Path) -> None:
    work = tmp_path / "other" / "work"
    write_part(work, ["only one"], file="news/one.jsonl")
    lonely = Corpus(work, write_tokenizer(work, corpus.tokenizer))
    with pytest.raises(DataError, match=r"must have at least 2 documents, .* its filters keep 1\. The report shows"):
        lonely.pack()


def test_weights_that_leave_nothing(corpus: Corpus) -> None:
    with pytest.raises(DataError, match=r"`sources\.weight` must keep some training documents, but keeps none"):
        corpus.pack(weights=(1e-12, 1e-12))


def test_run_with_text_of_its_own_does_not_take_a_corpus_for_it(corpus: Corpus, tmp_path: Path) -> None:
    folder = corpus.pack()
    (tmp_path / "text.txt").write_text("some text\n" * 5000)
    config = DataConfig(text=(str(tmp_path / "text.txt"),), tokens=str(folder.path), tokenizer=str(corpus.tokenizer))
    with pytest.raises(DataError, match=r"but was made from a corpus of several sources.*leave `data.text` empty"):
        prepare(config, tmp_path / "unused", seed=1, progress=False)
    assert prepare(replace(config, text=()), tmp_path / "unused", seed=1, progress=False).manifest == folder.manifest


@pytest.mark.slow
def test_training_runs_on_it(corpus: Corpus, tmp_path: Path) -> None:
    folder = corpus.pack(weights=(2, 0.5))
    options = (*TINY, f"data.tokens={folder.path}", "data.text=[]", f"output.folder={tmp_path / 'run'}")
    command = [sys.executable, "-m", "crosscut", "train", *options, "layout.tensor=1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "run").glob("checkpoints/*"))


def test_masked_objective_packs_the_sentences_of_every_copy(corpus: Corpus) -> None:
    plain = corpus.pack(weights=(2, 1))
    assert plain.train[0].sentences is None
    masked = corpus.pack(weights=(2, 1), objective="masked")
    assert masked.manifest.settings.objective == "masked"
    tokenizer = masked.tokenizer()
    for before, after in zip((*plain.train, plain.validation), (*masked.train, masked.validation), strict=True):
        assert np.array_equal(before.tokens[:], after.tokens[:])
        assert np.array_equal(before.index[:], after.index[:])
        # Each text is one sentence, which ends before its end of text.
        assert np.array_equal(after.sentences[:], after.ends - np.uint64(1))
        assert "and so on" in tokenizer.decode(after.tokens[:].tolist())
    assert corpus.pack(weights=(2, 1)).train[0].sentences is None
