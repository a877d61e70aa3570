"""Megatron-LM's pair of files: byte for byte its layout, read back as it was, and refused with a reason."""

import struct
from pathlib import Path

import numpy as np
import pytest

from crosscut.config import DataError
from crosscut.data.shards import megatron
from crosscut.data.shards.megatron import IndexedTokens
from tests.data.conftest import write_indexed

DOCUMENTS = [[5, 6, 7], [8], [], [9, 10]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    prefix = tmp_path / "pile.v1_text_document"
    write_indexed(prefix, DOCUMENTS, np.uint16)
    return prefix


def index_of(prefix: Path) -> Path:
    return Path(f"{prefix}.idx")


def test_files_have_the_layout_that_megatron_reads(prefix: Path) -> None:
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    body = struct.pack("<4i", 3, 1, 0, 2) + struct.pack("<4q", 0, 6, 8, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    assert index_of(prefix).read_bytes() == head + body
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("suffix", ["", ".idx", ".bin"])
def test_documents_come_back(tmp_path: Path, dtype: str, suffix: str) -> None:
    write_indexed(tmp_path / "some", DOCUMENTS, dtype)
    tokens = IndexedTokens.open(tmp_path / f"some{suffix}")
    assert [tokens.document(number).tolist() for number in range(tokens.num_documents)] == DOCUMENTS
    assert tokens.tokens.dtype == dtype


def test_many_documents_are_written_and_checked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "_AT_ONCE", 3)
    documents = [list(range(length)) for length in (4, 0, 1, 2, 7, 3, 1, 1)]
    write_indexed(tmp_path / "some", documents, np.int32)
    tokens = IndexedTokens.open(tmp_path / "some")
    assert [tokens.document(number).tolist() for number in range(8)] == documents
    assert np.frombuffer(index_of(tmp_path / "some").read_bytes()[-72:], "<i8").tolist() == list(range(9))


def test_document_of_several_sequences_is_one(tmp_path: Path) -> None:
    sizes, documents = [2, 1, 3], [0, 2, 2, 3]  # sentences apart, and a document without any
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 4) + struct.pack("<3i", *sizes)
    modes = b"\0\0\0"
    index_of(tmp_path / "some").write_bytes(
        index + struct.pack("<3q", 0, 8, 12) + struct.pack("<4q", *documents) + modes
    )
    (tmp_path / "some.bin").write_bytes(struct.pack("<6i", *range(6)))
    tokens = IndexedTokens.open(tmp_path / "some")
    assert [tokens.document(number).tolist() for number in range(3)] == [[0, 1, 2], [], [3, 4, 5]]


def test_no_documents(tmp_path: Path) -> None:
    write_indexed(tmp_path / "none", [], np.uint16)
    assert IndexedTokens.open(tmp_path / "none").num_documents == 0


def test_type_without_a_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must have one of the types uint8, .* uint16, but have the type uint32"):
        write_indexed(tmp_path / "some", [[1]], np.uint32)


@pytest.mark.parametrize(
    ("place", "data", "message"),
    [
        (0, b"PK", r"must begin with b'MMIDIDX.*but begins with b'PK"),
        (9, struct.pack("<Q", 2), "must have version 1, but has version 2. Create the `.idx` file and its `.bin`"),
        (17, b"\x07", "must be whole numbers, but are float32"),
        (17, b"\x09", r"must be whole numbers, but are of an unknown type \(code 9\)"),
        (18, struct.pack("<Q", 5), "must be 134 bytes long, but has 122 bytes. The file is truncated"),
        (34, struct.pack("<i", 2), "sequence 1 with 1 ids begins at byte 6 instead of 4"),
        (34, struct.pack("<i", -3), "sequence 0 with -3 ids begins at byte 0"),
        (122 - 8, struct.pack("<q", 3), "in ascending order, starting at 0 and ending with 4, but"),
        (122 - 32, struct.pack("<q", 4), "must list the first sequence of each document"),
        (46, struct.pack("<i", 5), r"some\.bin` must hold the 9 ids of 2 bytes .* but is 12 bytes long"),
    ],
)
def test_damage_is_named(tmp_path: Path, place: int, data: bytes, message: str) -> None:
    write_indexed(tmp_path / "some", DOCUMENTS, np.uint16)
    with index_of(tmp_path / "some").open("r+b") as file:
        file.seek(place)
        file.write(data)
    with pytest.raises(DataError, match=message):
        IndexedTokens.open(tmp_path / "some")


@pytest.mark.parametrize("length", [0, 5, 20, 60, 121])
def test_index_that_is_cut_short_is_refused(prefix: Path, length: int) -> None:
    index_of(prefix).write_bytes(index_of(prefix).read_bytes()[:length])
    with pytest.raises(DataError, match=r"must (begin with|be .* bytes long)"):
        IndexedTokens.open(prefix)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_missing_file_is_named(prefix: Path, suffix: str) -> None:
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(DataError, match=rf"\{suffix}` must be a readable file, but is not: No such file"):
        IndexedTokens.open(prefix)
