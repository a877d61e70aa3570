"""Encoding on many processes gives what encoding on one gives, in bounded memory, and leaves no process behind."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosscut.config import DataError
from crosscut.data import TextDocument, Tokenizer, read_documents
from crosscut.data.tokenization import encoding
from crosscut.data.tokenization.encoding import encode_documents
from tests.refusals import refusal


@pytest.fixture(autouse=True)
def small_batches(forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 1000)


def test_every_number_of_workers_gives_the_same_batches(corpus: Path, tokenizer_file: Path, texts: list[str]) -> None:
    results = []
    for workers in (1, 3):
        batches = list(encode_documents(read_documents([str(corpus)]), tokenizer_file, workers=workers))
        results.append([(b.tokens.tolist(), b.lengths.tolist(), *b[2:]) for b in batches])
    assert results[0] == results[1]
    assert len(results[0]) > 10
    inner = Tokenizer.load(tokenizer_file)
    tokens = [token for batch in results[0] for token in batch[0]]
    assert tokens == [token for text in texts for token in [*inner.encode(text), inner.end_of_text]]
    assert [origin for batch in results[0] for origin in batch[2]] == [(0, line) for line in range(1, 91)]
    assert sum(batch[3] for batch in results[0]) == sum(len(text.encode()) for text in texts)
    assert results[0][-1][4] == corpus.stat().st_size


def test_reading_keeps_a_bounded_distance_ahead(corpus: Path, tokenizer_file: Path) -> None:
    read = 0

    def counted() -> Iterator[TextDocument]:
        nonlocal read
        for document in read_documents([str(corpus)]):
            read += 1
            yield document

    done = 0
    for batch in encode_documents(counted(), tokenizer_file, workers=2):
        done += len(batch.lengths)
        assert read - done <= 5 * 20  # 2 x workers + 1 batches of at most 20 such documents
    assert done == 90


def test_fault_in_the_text_ends_the_workers(corpus: Path, tokenizer_file: Path) -> None:
    others = set(multiprocessing.active_children())
    with corpus.open("a") as file:
        file.write("{")
    with pytest.raises(DataError, match="line 91, must be valid JSON"):
        list(encode_documents(read_documents([str(corpus)]), tokenizer_file, workers=2))
    assert set(multiprocessing.active_children()) <= others


def test_worker_that_dies_is_an_error(corpus: Path, tokenizer_file: Path) -> None:
    others = set(multiprocessing.active_children())  # such as the ranks that the tests share
    batches = encode_documents(read_documents([str(corpus)]), tokenizer_file, workers=2)
    next(batches)
    for worker in set(multiprocessing.active_children()) - others:
        worker.kill()
    assert refusal(DataError, list, batches) == (
        "All 2 tokenizing processes must finish, but one died, perhaps because memory ran out, or because "
        'a Python program calls `prepare` outside of `if __name__ == "__main__":`. Free some memory, or use fewer '
        "cores: `taskset --cpu-list 0 crosscut prepare ...` on Linux, `prepare(..., workers=1)` in Python."
    )
