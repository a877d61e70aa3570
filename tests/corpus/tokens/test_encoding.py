"""Documents that are left become ids, with what was cut from them gone, and every id is known by its origin."""

from pathlib import Path

import numpy as np
import pytest

from crosscut.corpus.documents import Drop, Lineage, Part, read_drops, read_table, write_drops, write_table
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.leakage.removal import CUTS, CUTS_SUFFIX
from crosscut.corpus.tokens import encoding as tokens_module
from crosscut.corpus.tokens.encoding import INDEX_SUFFIX, TOKENS_SUFFIX, encode_part, tokens_stage
from crosscut.data import Tokenizer
from crosscut.data.text.sentences import sentence_rules
from tests.corpus.ingested import write_part

NAME = "000000-0000"
TEXTS = [
    "the first text",
    "the second text, which is longer than others",
    "",
    "the t\u00e4xt that is dropped",
    "the last",
]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train(TEXTS * 3, vocab_size=300).save(path)
    return path


@pytest.fixture
def part(tmp_path: Path) -> Part:
    part = write_part(tmp_path / "work", TEXTS, filters=("length", "leakage"))
    for stage, drops in (("length", [Drop(3, "too short")]), ("leakage", [])):
        (part.work / stage).mkdir()
        write_drops(Output(part.work / stage), NAME, drops)
    write_cuts(part)
    return part


def write_cuts(part: Part, *cuts: tuple[int, int, int]) -> None:
    columns = dict(zip(CUTS.names, zip(*cuts, strict=True), strict=True)) if cuts else dict.fromkeys(CUTS.names, ())
    write_table(part.work / "leakage" / f"{NAME}{CUTS_SUFFIX}", columns, CUTS)


def encode(part: Part, tokenizer: Path, *, min_tokens: int = 0) -> tuple[list[str], list[dict], Counts]:
    """The texts that were encoded, their index, and the counts."""
    folder = part.work / "tokens"
    folder.mkdir(exist_ok=True)
    counts = encode_part(part, tokenizer, min_tokens, False, Output(folder))
    index = read_table(folder / f"{NAME}{INDEX_SUFFIX}").to_pylist()
    ids = np.fromfile(folder / f"{NAME}{TOKENS_SUFFIX}", dtype="<u2")
    ends = np.cumsum([row["tokens"] for row in index])
    assert ends[-1] == len(ids)
    loaded = Tokenizer.load(tokenizer)
    assert (ids[ends - 1] == loaded.end_of_text).all()
    return [loaded.decode(text.tolist()) for text in np.split(ids, ends[:-1])], index, counts


def test_documents_that_are_left_are_encoded_in_their_order(part: Part, tokenizer_file: Path) -> None:
    texts, index, counts = encode(part, tokenizer_file)
    assert texts == [TEXTS[row] for row in (0, 1, 2, 4)]
    assert [(row["row"], row["piece"], row["file"], row["record"]) for row in index] == [
        (row, 0, "made/texts.jsonl", row + 1) for row in (0, 1, 2, 4)
    ]
    size = sum(len(text) for text in texts)
    assert counts == {
        "documents_in": 4, "documents_out": 4, "bytes_in": size, "bytes_out": size, "rules": {}, "texts": 4,
        "short_pieces": 0, "tokens": {"made": sum(row["tokens"] for row in index)},
    }  # fmt: skip


def test_result_does_not_depend_on_batches(part: Part, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode(part, tokenizer_file)
    monkeypatch.setattr(tokens_module, "BATCH_CHARACTERS", 20)
    assert encode(part, tokenizer_file) == whole


def test_cuts_leave_pieces_that_are_texts_of_their_own(part: Part, tokenizer_file: Path) -> None:
    write_cuts(part, (1, 10, 16), (1, 32, 37))
    texts, index, counts = encode(part, tokenizer_file)
    assert texts[1:4] == ["the second", "which is longer", "others"]
    assert [(row["row"], row["piece"]) for row in index] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (4, 0)]
    assert (counts["documents_out"], counts["texts"]) == (4, 6)
    assert counts["bytes_out"] == sum(map(len, texts))


def test_pieces_that_are_too_short_go_and_whole_documents_stay(part: Part, tokenizer_file: Path) -> None:
    write_cuts(part, (0, 3, 8), (1, 10, 16), (1, 32, 37))
    enough = len(Tokenizer.load(tokenizer_file).encode("which is longer"))
    texts, _, counts = encode(part, tokenizer_file, min_tokens=enough)
    assert texts == ["which is longer", "", "the last"]  # the empty document is as the filters left it
    assert counts["short_pieces"] == 4
    assert counts["rules"] == {"cut to pieces": {"documents": 1, "bytes": len(TEXTS[0])}}
    assert read_drops(part.work, "tokens", NAME).to_pylist() == [
        {"row": 0, "rule": "cut to pieces", "detail": "1 cut", "other": ""}
    ]


def test_document_that_is_cut_whole_is_dropped(part: Part, tokenizer_file: Path) -> None:
    write_cuts(part, (4, 0, 8))
    texts, _, counts = encode(part, tokenizer_file)
    assert texts == TEXTS[:3]
    assert counts["rules"]["cut to pieces"]["documents"] == 1


def test_part_without_documents_has_no_ids(part: Part, tokenizer_file: Path) -> None:
    write_drops(Output(part.work / "length"), NAME, [Drop(row, "too short") for row in range(5)])
    folder = part.work / "tokens"
    folder.mkdir()
    assert encode_part(part, tokenizer_file, 0, False, Output(folder))["tokens"] == {}
    assert (folder / f"{NAME}{TOKENS_SUFFIX}").stat().st_size == 0


def test_other_rules_for_sentences_encode_a_part_anew(part: Part, tokenizer_file: Path) -> None:
    settings = [
        tokens_stage(tokenizer=tokenizer_file, min_tokens=3, lineage=Lineage(cleaned=True), sentences=sentences)
        .tasks(part.work)[0]
        .settings
        for sentences in (False, True)
    ]
    assert settings == [{"min_tokens": 3, "sentences": rules} for rules in ("", sentence_rules())]


def test_other_cuts_are_encoded_anew(part: Part, tokenizer_file: Path) -> None:
    # As the pipeline's own stages write them, whose drops may stay the same when their cuts do not.
    stage = tokens_stage(tokenizer=tokenizer_file, min_tokens=0, lineage=Lineage(("length", "leakage"), cleaned=True))
    (task,) = stage.tasks(part.work)
    names = [path.relative_to(part.work).as_posix() for path in task.inputs[:-1]]
    assert names == [
        f"ingest/{NAME}.arrow", f"cleaning/{NAME}.arrow", f"length/{NAME}.drops.arrow", f"leakage/{NAME}.drops.arrow",
        f"leakage/{NAME}.cuts.arrow",
    ]  # fmt: skip
    assert task.inputs[-1] == tokenizer_file
    (without,) = tokens_stage(tokenizer=tokenizer_file, min_tokens=0, lineage=Lineage(("length",), cleaned=True)).tasks(
        part.work
    )
    assert len(without.inputs) == 4
