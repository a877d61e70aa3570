"""Which files a corpus is made of, and what is wrong with files that cannot be read."""

import gzip
from pathlib import Path

import pytest
import zstandard

from crosscut.config import DataError
from crosscut.data.text.sources import find_sources, read_chunks
from tests.endless import ENDLESS
from tests.refusals import refusal

SUFFIXES = ".txt, .jsonl, .parquet, .tsv, .txt.gz, .txt.zst, .jsonl.gz, .jsonl.zst, .tsv.gz or .tsv.zst"
IN_FOLDERS = ".txt, .jsonl, .parquet, .txt.gz, .txt.zst, .jsonl.gz or .jsonl.zst"


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def found(*patterns: object) -> list[str]:
    return [source.path.name for source in find_sources([str(pattern) for pattern in patterns])]


def read(path: Path) -> bytes:
    return b"".join(chunk for chunk, _ in read_chunks(find_sources([str(path)])[0]))


def test_patterns_keep_their_order_and_their_files_are_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b.txt", "a.txt", "more/c.jsonl")
    assert found(tmp_path / "more", tmp_path / "*.txt") == ["c.jsonl", "a.txt", "b.txt"]


def test_folder_is_searched_all_the_way_down_for_known_suffixes(tmp_path: Path) -> None:
    touch(
        tmp_path, "x/y/deep.txt.gz", "x/PAGES.TXT", "x/readme.md", "x/.hidden.txt", "x/.git/config.txt", "x/z.jsonl.zst"
    )
    assert found(tmp_path) == ["PAGES.TXT", "deep.txt.gz", "z.jsonl.zst"]


def test_file_named_twice_is_read_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", "b.txt")
    assert found(tmp_path / "b.txt", tmp_path / "*.txt", tmp_path) == ["b.txt", "a.txt"]


def test_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    touch(tmp_path, "part[1].txt", "part1.txt")
    assert found(tmp_path / "part[1].txt") == ["part[1].txt"]


def test_glob_goes_through_folders(tmp_path: Path) -> None:
    touch(tmp_path, "one/a.txt", "two/deep/b.txt", "two/c.md")
    assert found(tmp_path / "**" / "*.txt") == ["a.txt", "b.txt"]
    assert found(tmp_path / "t*") == ["b.txt"]


def test_builtin_corpus_is_found_by_name() -> None:
    (source,) = find_sources(["builtin:state-of-the-union"])
    assert source.name == "builtin:state-of-the-union"
    assert source.size > 2_000_000


def test_chunks_tell_how_much_of_the_disk_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(range(256)) * 2000))
    *_, (_, position) = read_chunks(find_sources([str(path)])[0])
    assert position == path.stat().st_size


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_streams_packed_one_after_the_other_are_all_read(tmp_path: Path, suffix: str, pack) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack(b"first ") + pack(b"") + pack(b"second"))
    assert read(path) == b"first second"


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_packed_file_that_is_cut_short_is_an_error(tmp_path: Path, suffix: str, pack) -> None:
    path = tmp_path / f"a.txt{suffix}"
    packed = pack(bytes(range(256)) * 1000)
    for length in (0, 5, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:length])
        assert refusal(DataError, read, path) == (
            f"`{path}` must hold complete {suffix} data, but is truncated at byte {length}. Get the file again."
        )


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_damaged_packed_file_is_an_error(tmp_path: Path, suffix: str, pack) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack(b"text") + b"no such data")
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value).startswith(f"`{path}` must be valid {suffix} data, but is damaged near byte ")
    assert str(error.value).endswith(". Get the file again.")


def check_message(patterns: list[str], message: str) -> None:
    assert refusal(DataError, find_sources, patterns) == message


def test_no_pattern_is_an_error() -> None:
    check_message([], "`data.text` must name at least one file, folder or glob, but is empty. Name a text file.")


def test_empty_pattern_is_an_error() -> None:
    check_message([""], "`data.text` must name files, folders or globs, but one name is empty. Remove this name.")


@pytest.mark.parametrize("is_in_folder", [False, True])
def test_link_to_itself_is_an_error(tmp_path: Path, is_in_folder: bool) -> None:
    link = tmp_path / "a.txt"
    link.symlink_to(link.name)
    pattern = tmp_path if is_in_folder else link
    check_message(
        [str(pattern)],
        f"`{link}` must be a readable file, but is not: Too many levels of symbolic links. Check the path.",
    )


def test_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    pattern = str(tmp_path / "*.txt")
    check_message([pattern], f"`data.text` must name existing files, but nothing matches `{pattern}`. Check the path.")


def test_folder_without_text_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "a.md")
    check_message(
        [str(tmp_path)], f"`{tmp_path}` must hold a file ending in {IN_FOLDERS}, but holds none. Check the path."
    )


@pytest.mark.parametrize("name", ["a.md", "text", "a.parquet.gz", "a.gz"])
def test_unsupported_suffix_is_an_error(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name)
    message = f"`{tmp_path / name}` must end in {SUFFIXES}, but does not. Convert the file, or name other files."
    check_message([str(tmp_path / name)], message)
    check_message([str(tmp_path / f"{name[:-1]}?")], message)


def test_unknown_builtin_corpus_is_an_error() -> None:
    check_message(
        ["builtin:books"],
        "A built-in corpus must be `builtin:tales` or `builtin:state-of-the-union`, but `data.text` names "
        "`builtin:books`. Correct the name.",
    )


def test_file_that_cannot_be_looked_at_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    path = tmp_path / "gone.txt"
    check_message(
        [str(path)], f"`{path}` must be a readable file, but is not: No such file or directory. Check the path."
    )
    long = "a" * 300
    check_message([long], f"`{long}` must be a readable file, but is not: File name too long. Check the path.")


def test_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt")
    (source,) = find_sources([str(tmp_path)])
    source.path.unlink()
    assert (
        refusal(DataError, list, read_chunks(source))
        == f"`{source.name}` must be a readable file, but is not: No such file or directory. Check the path."
    )


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl", ".", "**/a*"])
def test_file_whose_reading_may_never_end_is_refused(tmp_path: Path, kind: str, pattern: str) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "b"}')
    ENDLESS[kind](tmp_path / "a.jsonl")
    assert refusal(DataError, find_sources, [str(tmp_path / pattern)]) == (
        f"`{tmp_path}/a.jsonl` must be a readable file, but is not: It is {kind}, not a regular file. Write the data "
        "to a file, and name that file."
    )


def test_link_that_leads_nowhere_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "b"}')
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    assert refusal(DataError, find_sources, [str(tmp_path)]) == (
        f"`{tmp_path}/a.jsonl` must be a readable file, but is not: No such file or directory. Check the path."
    )
