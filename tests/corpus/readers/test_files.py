"""Which files a source is made of, in which order, under which names, and what is said of those that are not there."""

import bz2
import gzip
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest

from crosscut.config import DataError
from crosscut.config.corpora import SourceConfig
from crosscut.corpus.readers.files import File, find_source
from crosscut.corpus.readers.selection import is_html
from tests.endless import ENDLESS
from tests.refusals import refusal
from tests.timing import quickest

NOBODY = 65534


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def find(*files: object, kind: str = "auto") -> list[File]:
    return find_source(SourceConfig(name="web", files=tuple(map(str, files)), format=kind)).files


def names(*files: object, kind: str = "auto") -> list[str]:
    return [file.name for file in find(*files, kind=kind)]


def check_message(message: str, *files: object, kind: str = "auto") -> None:
    assert refusal(DataError, find, *files, kind=kind) == message


def test_names_are_paths_below_what_was_named(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.txt", "a/deep/y.txt", "b/z.txt")
    assert names(tmp_path) == ["a/deep/y.txt", "a/x.txt", "b/z.txt"]
    assert names(tmp_path / "b", tmp_path / "a" / "x.txt") == ["z.txt", "x.txt"]
    assert names(tmp_path / "*" / "*.txt") == ["a/x.txt", "b/z.txt"]
    assert names(tmp_path / "**" / "*.txt") == ["a/deep/y.txt", "a/x.txt", "b/z.txt"]
    assert names(tmp_path / "a*") == ["a/deep/y.txt", "a/x.txt"]


def test_file_is_there_once_and_has_a_name_of_its_own(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.txt", "b/x.txt")
    assert names(tmp_path / "a", tmp_path / "a/x.txt", tmp_path / "b") == ["x.txt", "b/x.txt"]


def test_taken_names_get_the_folders_that_tell_them_apart(tmp_path: Path) -> None:
    touch(tmp_path, "book/html/print.txt", "book/html/only.txt", "guide/html/print.txt", "guide/html/other.txt")
    book, guide = tmp_path / "book/html", tmp_path / "guide/html"
    assert names(book) == ["only.txt", "print.txt"]
    # `html/print.txt` would be the end of both paths. `other.txt` is free, but gets the same folders.
    assert names(book, guide) == ["only.txt", "print.txt", "guide/html/other.txt", "guide/html/print.txt"]
    touch(tmp_path, "third/html/print.txt")
    assert names(book, guide, tmp_path / "third" / "html" / "*.txt")[-1:] == ["third/html/print.txt"]


def test_new_entry_at_the_end_changes_no_name(tmp_path: Path) -> None:
    folders = ["a", "b", "deep/a", "deep/b"]
    touch(tmp_path, *(f"{folder}/{name}.txt" for folder in folders for name in ("x", "y")))
    entries = [tmp_path / folder for folder in folders]
    listed = [names(*entries[:number]) for number in range(1, 5)]
    assert all(after[: len(before)] == before for before, after in pairwise(listed))
    assert len(set(listed[-1])) == 8
    assert listed[-1][4:] == ["deep/a/x.txt", "deep/a/y.txt", "deep/b/x.txt", "deep/b/y.txt"]


def test_paths_that_look_alike_as_text_get_a_number(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"x\xff.txt")).write_text("x")
    (tmp_path / "x\\xff.txt").write_text("x")
    assert sorted(names(tmp_path)) == ["x\\xff.txt", "x\\xff.txt~2"]


def test_taken_names_in_a_store_get_folders_too(store: str) -> None:
    fsspec.filesystem("memory").pipe("/corpus/c/x.jsonl", b"other")
    assert names(f"{store}/a", f"{store}/c") == ["deep/y.jsonl", "x.jsonl", "c/x.jsonl"]


def test_formats_and_compressions_are_told_by_suffixes(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl.zst", "b.PARQUET", "c.txt.gz", "d.htm", "e.mbox", "f.xml.bz2", "unknown.md", ".hidden.txt")
    assert [(file.format, file.compression) for file in find(tmp_path)] == [
        ("jsonl", ".zst"),
        ("parquet", ""),
        ("text", ".gz"),
        ("html", ""),
        ("mail", ""),
        ("wikipedia", ".bz2"),
    ]


PIECES = (
    "enwiki-20240101-pages-articles-multistream1.xml-p1p41242.bz2",
    "enwiki-20240101-pages-articles.xml.gz",
    "enwiki-20240101-pages-articles1.xml-p1p41242.bz2",
    "enwiki-20240101-pages-articles2.xml-p41243p151573",
)


@pytest.mark.parametrize("kind", ["auto", "wikipedia"])
def test_pieces_of_a_dump_are_found_under_their_published_names(tmp_path: Path, kind: str) -> None:
    touch(tmp_path, *PIECES, "enwiki-20240101-pages-articles-multistream-index1.txt-p1p41242.bz2", "SHA1SUMS")
    touch(tmp_path, "enwiki-20240101-pages-articles-multistream-index.txt.bz2")
    assert [(file.name, file.format) for file in find(tmp_path, kind=kind)] == [(name, "wikipedia") for name in PIECES]
    assert [file.compression for file in find(tmp_path, kind=kind)] == [".bz2", ".gz", ".bz2", ""]
    assert names(tmp_path / "*-articles[12].xml-*", kind=kind) == list(PIECES[2:])
    assert names(tmp_path / PIECES[0], kind=kind) == [PIECES[0]]


@pytest.mark.parametrize("name", ["enwiki-pages-articles1.xml-p1p2.7z", "dump.xml.7z"])
@pytest.mark.parametrize("kind", ["auto", "wikipedia"])
def test_dump_that_no_reader_unpacks_is_an_error(tmp_path: Path, name: str, kind: str) -> None:
    touch(tmp_path, "a.xml.bz2", name, "other.7z")
    message = (
        f"`{tmp_path}/{name}` of the source `web` must be an unpacked file or end in .gz, .zst or .bz2, but is a .7z "
        "file. Unpack the file, or get the dump as .bz2."
    )
    check_message(message, tmp_path, kind=kind)
    check_message(message, tmp_path / name, kind=kind)


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
MAIL = b"Return-Path: <jo@example.org>\nReceived: from a\n\nDear Al\n"
PAGE = b"\n<!-- made by hand -->\n<!DOCTYPE html><p>Hello"

CONTENTS = {
    "index": PAGE,
    "page.php?id=3": PAGE,
    "a.html.gz": gzip.compress(PAGE),
    "b.SHTML": b"no tag at all",
    "c.htm.bz2": bz2.compress(PAGE),
    "packed.gz": gzip.compress(PAGE),
    "logo.png": PNG,
    "logo": PNG,
    "style.css": b"p { color: red }",
    "notes.txt": b"Just some notes",
    "empty": b"",
    "cur/1037.host:2,S": MAIL,
    "new/0001.7848dde101aa985090474a91ec93fcf0": b"From jo@example.org Sat Nov 21 22:44:22 2026\nTo: al\n\n",
    "new/2.txt": MAIL,
    "cmds": b"mv 0001 0001.7848dde101aa985090474a91ec93fcf0\n",
    "damaged.gz": gzip.compress(PAGE)[:12],
    ".hidden": MAIL,
    ".git/config": PAGE,
}


def fill(folder: Path) -> None:
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "taken", "left_out"),
    [
        (
            "html",
            ["a.html.gz", "b.SHTML", "c.htm.bz2", "damaged.gz", "index", "packed.gz", "page.php?id=3"],
            {".css": 1, ".png": 1, ".txt": 2, "no suffix": 5},
        ),
        (
            "mail",
            ["cur/1037.host:2,S", "damaged.gz", "new/0001.7848dde101aa985090474a91ec93fcf0", "new/2.txt"],
            {".css": 1, ".htm": 1, ".html": 1, ".png": 1, ".shtml": 1, ".txt": 1, "no suffix": 6},
        ),
        (
            "text",
            [name for name in CONTENTS if "logo" not in name and name != "empty"][:-2],
            {".png": 1, "no suffix": 2},
        ),
        (
            "auto",
            ["a.html.gz", "b.SHTML", "c.htm.bz2", "new/2.txt", "notes.txt"],
            {".css": 1, ".png": 1, "no suffix": 9},
        ),
    ],
)
def test_folder_gives_the_files_of_the_format_and_counts_the_others(
    tmp_path: Path, kind: str, taken: list[str], left_out: dict[str, int]
) -> None:
    fill(tmp_path)
    source = SourceConfig(name="web", files=(str(tmp_path), f"{tmp_path}/"), format=kind)
    found = find_source(source)
    assert [file.name for file in found.files] == sorted(taken)
    assert found.left_out == left_out


def test_file_that_is_named_or_matches_a_glob_is_always_taken(tmp_path: Path) -> None:
    fill(tmp_path)
    assert names(tmp_path / "logo.png", tmp_path / "*.css", kind="html") == ["logo.png", "style.css"]


def test_files_of_crawls_are_known_by_their_names(tmp_path: Path) -> None:
    published = "CC-MAIN-20261126000000-00000.warc"
    touch(tmp_path, f"{published}.gz", f"{published}.wet.gz", f"{published}.wat.gz", "a.warc.zst", "b.warc", "c.wet")
    found = find_source(SourceConfig(name="web", files=(str(tmp_path),)))
    assert [(file.format, file.compression) for file in found.files] == [
        ("warc", ".gz"),
        ("wet", ".gz"),
        ("warc", ".zst"),
        ("warc", ""),
        ("wet", ""),
    ]
    assert found.left_out == {".wat": 1}
    assert names(tmp_path / "*.warc.wet.gz", kind="wet") == [f"{published}.wet.gz"]
    assert names(tmp_path, kind="warc") == [f"{published}.gz", "a.warc.zst", "b.warc"]


def test_folder_of_other_formats_gives_the_files_of_their_suffix(tmp_path: Path) -> None:
    touch(tmp_path, "part-0.parquet", "_SUCCESS", "notes.txt")
    assert names(tmp_path, kind="parquet") == ["part-0.parquet"]


def test_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    touch(tmp_path, "part[1].txt", "part1.txt")
    assert names(tmp_path / "part[1].txt") == ["part[1].txt"]


def test_symlinks_to_files_are_followed(tmp_path: Path) -> None:
    touch(tmp_path, "real/x.txt")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "l.txt").symlink_to(tmp_path / "real" / "x.txt")
    assert names(tmp_path / "links") == ["l.txt"]


def test_relative_path_and_file_url_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "x.txt")
    monkeypatch.chdir(tmp_path)
    assert find("x.txt") == find(tmp_path / "x.txt") == find(f"file://{tmp_path}/x.txt")


def test_version_changes_with_the_file(tmp_path: Path) -> None:
    touch(tmp_path, "x.txt")
    before = find(tmp_path / "x.txt")
    os.utime(tmp_path / "x.txt", ns=(1, 1))
    assert find(tmp_path / "x.txt") != before


def test_name_that_is_no_utf8_can_be_written_in_an_id(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_bytes(b"good")
    (file,) = find(tmp_path)
    assert file.name == "caf\\xe9.txt"
    assert b"".join(chunk for chunk, _ in file.chunks()) == b"good"


@pytest.fixture
def store() -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    for name in ("a/x.jsonl", "a/deep/y.jsonl", "b/z.txt", "b/.hidden.txt"):
        memory.pipe(f"/corpus/{name}", name.encode())
    yield "memory://corpus"
    memory.rm("/corpus", recursive=True)


def test_urls_are_searched_like_paths(store: str) -> None:
    assert names(store) == ["a/deep/y.jsonl", "a/x.jsonl", "b/z.txt"]
    assert names(f"{store}/b/z.txt", f"{store}/a/") == ["z.txt", "deep/y.jsonl", "x.jsonl"]
    assert names(f"{store}/*/*.jsonl") == ["a/x.jsonl"]
    assert names(f"{store}/*/*.txt") == ["b/z.txt"]
    (file,) = find(f"{store}/b")
    assert (file.size, list(file.chunks())) == (7, [(b"b/z.txt", 7)])


def test_nothing_that_matches_is_an_error(tmp_path: Path, store: str) -> None:
    for pattern in (str(tmp_path / "*.txt"), str(tmp_path / "gone.txt"), f"{store}/*.txt", f"{store}/gone.txt"):
        check_message(
            f"`sources.files` of `web` must name existing files, but no file matches `{pattern}`. Correct the path.",
            pattern,
        )


def test_folder_without_files_is_an_error(tmp_path: Path) -> None:
    remedy = "Correct the path, or set the source's `format`."
    check_message(
        f"`{tmp_path}` of the source `web` must contain a file ending in .eml or .mbox, or a file whose content has "
        f"the format `mail`, but contains none. {remedy}",
        tmp_path,
        kind="mail",
    )
    check_message(
        f"`{tmp_path}` of the source `web` must contain a file ending in .jsonl or .ndjson, but contains none. "
        f"{remedy}",
        tmp_path,
        kind="jsonl",
    )


def test_suffix_that_tells_no_format_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "notes.md")
    path = tmp_path / "notes.md"
    check_message(
        f"`{path}` of the source `web` must end in .jsonl, .ndjson, .parquet, .txt, .html, .htm, .xhtml, .shtml, "
        ".eml, .mbox, .xml, .idx, .warc or .wet, but does not. Set the source's `format`, or rename the file.",
        path,
    )
    assert names(path, kind="text") == ["notes.md"]


def test_packed_parquet_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet.gz")
    path = tmp_path / "a.parquet.gz"
    check_message(
        f"`{path}` must not be compressed, but is a .gz file. The reader of parquet files needs random access. Unpack "
        "the file first.",
        path,
    )


def test_url_of_no_known_store_is_an_error() -> None:
    assert refusal(DataError, find, "nowhere://a/b.txt").startswith(
        "`sources.files` of `web` must name readable files, but `nowhere://a/b.txt` cannot be read: "
    )


@contextmanager
def without_rights() -> Iterator[Path]:
    """A folder whose contents the test may not see, whoever runs it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        touch(folder, "open/a.txt", "closed/b.txt", "open/c.txt")
        folder.chmod(0o755)
        (folder / "closed").chmod(0)
        (folder / "open" / "c.txt").chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            if is_root:
                os.seteuid(0)
            (folder / "closed").chmod(0o755)


def test_folder_without_rights_is_an_error_that_names_it() -> None:
    with without_rights() as folder:
        for pattern in (folder, folder / "closed", folder / "*" / "*.txt", folder / "**" / "*.txt"):
            check_message(
                f"`{folder}/closed` must be a readable file, but is not: Permission denied. Check the path.", pattern
            )
        closed = folder / "closed" / "b.txt"
        check_message(f"`{closed}` must be a readable file, but is not: Permission denied. Check the path.", closed)


def test_file_without_rights_is_an_error_that_names_it() -> None:
    with without_rights() as folder:
        (file,) = find(folder / "open" / "c.txt")
        assert (
            refusal(DataError, list, file.chunks())
            == f"`{file.url}` must be a readable file, but is not: Permission denied. Check the path."
        )


def test_megatron_pair_in_a_store_is_an_error() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a.idx", b"x")
    check_message(
        "`memory:///corpus/a.idx` must be a local file, but is a URL. Files of the format `megatron` need random "
        "access. Copy the file to a local disk.",
        "memory://corpus/a.idx",
    )
    memory.rm("/corpus", recursive=True)


def test_folders_behind_links_are_searched_once(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "src" / "y.jsonl").write_text("{}\n")
    (tmp_path / "elsewhere" / "x.jsonl").write_text("{}\n")
    (tmp_path / "src" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "src")
    found = find_source(SourceConfig(name="s", files=(str(tmp_path / "src"),))).files
    assert [file.name for file in found] == ["link/x.jsonl", "y.jsonl"]


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl", ".", "**/a*", "c.idx"])
def test_file_whose_reading_may_never_end_is_refused(tmp_path: Path, kind: str, pattern: str) -> None:
    touch(tmp_path, "b.jsonl", "c.idx")
    name = "c.bin" if pattern == "c.idx" else "a.jsonl"
    ENDLESS[kind](tmp_path / name)
    check_message(
        f"`{tmp_path}/{name}` must be a readable file, but is not: It is {kind}, not a regular file. Write the data "
        "to a file, and name that file.",
        tmp_path / pattern,
    )


def test_link_that_leads_nowhere_is_not_passed_over(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl")
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    check_message(
        f"`{tmp_path}/a.jsonl` must be a readable file, but is not: No such file or directory. Check the path.",
        tmp_path,
    )


@pytest.mark.parametrize("comment", [b"<!-- -->", b"<!---->", b"<!-- <!-- -->\n"])
def test_page_behind_many_comments_is_judged_in_a_moment(comment: bytes) -> None:
    def judge() -> None:
        assert is_html(comment * 100 + b"<p>")
        assert not is_html(comment * 100 + b"text")

    assert quickest(judge, limit=0.5) < 0.5
