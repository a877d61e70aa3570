"""Where real files are, and parts made by hand."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from crosscut.corpus.documents import INGEST, Document, Part
from crosscut.corpus.execution import engine
from tests.corpus.ingested import write_documents
from tests.workers import fork_workers


@pytest.fixture(scope="module", autouse=True)
def _forked_workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fork_workers(patch, engine)
        yield


@pytest.fixture
def make_part(tmp_path: Path) -> Callable[..., Part]:
    """Function that writes an ingested part with the given texts and their sources."""

    def make(texts: Sequence[str], sources: Sequence[str] = (), name: str = "000000-0000") -> Part:
        (tmp_path / INGEST).mkdir(exist_ok=True)
        sources = sources or ["s"] * len(texts)
        ids = [f"{source}/f#{row}" for row, source in enumerate(sources, start=1)]
        write_documents(tmp_path / INGEST / f"{name}.arrow", ids, texts)
        return Part(tmp_path, name)

    return make


def documents(*texts: str) -> list[Document]:
    """Documents in the form in which a filter receives them."""
    return [Document(row, f"s/f#{row}", text) for row, text in enumerate(texts)]
