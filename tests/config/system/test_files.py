"""JSON that no one would write is a mistake like any other, in whichever file it stands."""

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import ConfigError, CrosscutError, load_run
from crosscut.config.system import files
from crosscut.config.system.files import parse_json, parse_toml, read_json, read_lines, write_whole
from crosscut.data.manifest import TokenManifest
from crosscut.evaluation.lambada import _passages
from crosscut.generation.prompts import read_prompts
from crosscut.planner.hardware.files import read_hardware
from crosscut.pretrained.tensors import list_tensors
from tests.disks import small_disk
from tests.refusals import refusal

NESTED = ["[" * 100_000, '{"a":' * 100_000, "[" * 5000 + "]" * 5000, '{"weight_map":' + '{"a":' * 50_000]


@pytest.mark.parametrize("text", [*NESTED, "9" * 5000, "", "\ud800"])
def test_json_that_cannot_be_parsed_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize(
    "text",
    [
        f"[{'.'.join(['a'] * 50_000)}]",
        f"[[{' . '.join(['a'] * 50_000)}]]",
        f"{'.'.join(['a'] * 50_000)} = 1",
        "x = {" + ".".join(['"a.b"'] * 50_000) + " = 1}",
        "x = " + "[" * 50_000 + "]" * 50_000,
    ],
    ids=["section", "array of tables", "key", "inline table", "arrays"],
)
def test_deep_toml_is_a_value_error_at_once(text):
    start = time.process_time()
    with pytest.raises(ValueError, match=r"a key has more than 64 parts|it is nested too deeply"):
        parse_toml(text)
    assert time.process_time() - start < 2


def test_dots_in_strings_and_comments_are_no_parts():
    dots = ".".join("a" * 100)
    text = f'x = "{dots}"\ny = \'{dots}\'\n# {dots}\nz = """\n{dots}"""\na.b.c = 1.5'
    assert parse_toml(text) == {"x": dots, "y": dots, "z": dots, "a": {"b": {"c": 1.5}}}


READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": read_json,
    "manifest.json": lambda path: TokenManifest.read(path.parent),
    "model.safetensors.index.json": lambda path: list_tensors(path.parent),
    "prompts.jsonl": read_prompts,
    "lambada.jsonl": _passages,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", NESTED, ids=["lists", "tables", "closed", "inner"])
def test_nested_json_in_a_file_is_told(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(CrosscutError) as told:
        READERS[name](path)
    assert str(tmp_path) in str(told.value)
    assert len(str(told.value)) < 500


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket"])
def test_file_that_is_not_regular_is_told_at_once(tmp_path, name, kind):
    make_special(tmp_path / name, kind)
    with pytest.raises(CrosscutError, match=re.escape(str(tmp_path))):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket"])
def test_toml_that_is_not_a_regular_file_is_told(tmp_path, kind):
    path = tmp_path / "run.toml"
    make_special(path, kind)
    name = {"fifo": "named pipe"}.get(kind, kind)
    reason = "Is a directory" if kind == "folder" else f"It is a {name}, not a regular file"
    assert refusal(ConfigError, load_run, path) == f"`{path}` must be a readable TOML file, but is not: {reason}."
    with pytest.raises(ConfigError, match="must name a known device or a device file"):
        read_hardware(path)


def test_file_too_large_to_parse_is_told(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate((1 << 28) + 1)  # a sparse file
    with pytest.raises(ConfigError, match="but is not: It is larger than 256 MiB"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("text", [r'{"a": "\ud800"}', r'["\uDFFF"]', r'{"\udc00": 1}'])
def test_json_with_half_a_character_is_told(text):
    with pytest.raises(ValueError, match="it holds a lone surrogate"):
        parse_json(text)
    assert parse_json(r'"\ud83d\ude00"') == "\N{GRINNING FACE}"


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "9" * 5000, "a = " + "{a=" * 20_000, "a."])
def test_toml_that_cannot_be_parsed_is_told(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="must be valid TOML, but is not"):
        load_run(path)
    with pytest.raises(ConfigError, match="must be valid TOML, but is not"):
        read_hardware(path)


def make_special(path: Path, kind: str) -> None:
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "socket":
            # A socket's address holds about 100 bytes, fewer than the path of a folder of tests may have.
            with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)


def test_only_line_feeds_end_a_line_and_a_mark_at_the_start_is_no_text(tmp_path):
    (tmp_path / "lines.txt").write_bytes("\ufeffone\r\ntwo\u2028\ufeff\rstill\n\nlast".encode())
    assert list(read_lines(tmp_path / "lines.txt")) == ["one", "two\u2028\ufeff\rstill", "", "last"]


def test_a_line_must_end_and_be_text(tmp_path, monkeypatch):
    path = tmp_path / "lines.txt"
    assert files.MOST_BYTES_OF_LINE == 64 << 20
    monkeypatch.setattr(files, "MOST_BYTES_OF_LINE", 1 << 20)
    path.write_bytes(b"fine\n\xff\n")
    with pytest.raises(UnicodeDecodeError) as error:
        list(read_lines(path))
    assert error.value.start == 5
    with path.open("wb") as file:
        file.truncate((1 << 20) + 1)
    with pytest.raises(OSError, match="A line is longer than 1 MiB"):
        list(read_lines(path))
    path.write_bytes(b"x" * ((1 << 20) - 1) + b"\n")
    assert len(next(read_lines(path))) == (1 << 20) - 1


def test_file_that_does_not_fit_on_the_disk_keeps_its_old_content_and_is_named(tmp_path):
    with small_disk(tmp_path / "disk", 16) as disk:
        path = disk / "file"
        write_whole(path, "old")
        for size in (13_000, 100_000):
            with pytest.raises(OSError, match="No space left on device") as failed:
                write_whole(path, bytes(size))
            assert failed.value.filename == str(path)
            assert [*disk.iterdir()] == [path], "no part of the new content is left"
            assert path.read_text() == "old"
