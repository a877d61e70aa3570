"""Edits: small damages to a valid input, from which every case is made.

An edit names its file, its action, the place and a hostile value. All edits of a case are applied in one order,
whatever order they were drawn in: values of a tree, then text, then bytes, then whole files. An edit whose place no
longer exists does nothing, so edits can be left out one by one to make a case smaller.
"""

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fuzzing.arrays import damaged_arrays
from benchmarks.fuzzing.formats import Format, format_of, packing_of, rebuilt
from benchmarks.fuzzing.hostile import ARGUMENTS as VALUES
from benchmarks.fuzzing.hostile import JSON, TEMPLATES, WORDS
from benchmarks.recovery.damages import REPLACEMENTS

TREE = ("set", "set", "set", "remove", "rename", "add", "twice")
TEXT = ("insert", "scalar", "scalar", "repeat line", "drop line")
BYTES = ("flip", "flip", "flip", "cut", "drop", "zero", "repeat")
FILES = ("delete", *REPLACEMENTS, "sparse")
ARGUMENTS = ("replace", "insert", "remove", "repeat")

COMMAND_LINE = ""
"""Name that stands for the command line in place of a file."""

PLACES = 1000
"""Number of places that text and bytes are divided into. An edit's place is one of them."""

_SPARSE = 1200 << 20
_SCALAR = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\b\d[\d.e+-]*\b|\b(?:true|false|null)\b')
_LEFT_OUT = re.compile(rb'"@@(.+?)@@"')


@dataclass(frozen=True)
class Edit:
    """One damage."""

    file: str
    action: str
    where: tuple[str | int, ...] = ()
    """Path in a tree, or one number: the index of an argument, or a place in the text or the bytes."""
    value: str = ""
    """Name of a hostile value; for an argument the argument itself, if no value has this name."""

    def __str__(self) -> str:
        place = ".".join(map(str, self.where))
        return " ".join(
            filter(None, (self.file or "arguments", f"`{place}`" if place else "", self.action, self.value))
        )

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Edit":
        """Read an edit that `dataclasses.asdict` has written to JSON."""
        return cls(**{**fields, "where": tuple(fields["where"])})


def apply(edits: Iterable[Edit], folder: Path, arguments: Sequence[str]) -> list[str]:
    """Damage the files of a folder, and return the damaged arguments."""
    line = list(arguments)
    of_file: dict[str, list[Edit]] = {}
    for edit in edits:
        of_file.setdefault(edit.file, []).append(edit)
    for edit in of_file.pop(COMMAND_LINE, []):
        _edit_arguments(line, edit)
    for name, damages in of_file.items():
        path = folder / name
        if path.is_file() and (content := path.read_bytes()) != (damaged := damage(name, content, damages)):
            path.write_bytes(damaged)
        for edit in damages:
            if edit.action in FILES:
                _edit_file(path, edit.action)
    return line


def damage(name: str, content: bytes, edits: Sequence[Edit]) -> bytes:
    """Content of a file after its edits of values, text and bytes."""
    packing, inner = packing_of(name)
    text = unpacked = packing.unpack(content)
    form = format_of(name)
    if form is not None and any(edit.action in TREE for edit in edits):
        text = rebuilt(inner, text, _edit_tree(form, text, [edit for edit in edits if edit.action in TREE]))
    values = form.values if form is not None else JSON | TEMPLATES
    if arrays := {str(edit.where[0]): edit.value for edit in edits if edit.action == "array"}:
        text = damaged_arrays(text, arrays)
    for edit in edits:
        if edit.action in TEXT:
            text = _edit_text(text, edit, values)
        elif edit.action == "template":
            text = TEMPLATES[edit.value].encode("utf-8", "surrogatepass")
    content = content if text == unpacked else packing.pack(text)
    for edit in edits:
        if edit.action in BYTES:
            content = _edit_bytes(content, edit)
    return content


def _edit_arguments(line: list[str], edit: Edit) -> None:
    index = int(edit.where[0])
    if index >= len(line):
        if edit.action != "insert":
            return
        index = len(line) - 1
    value = WORDS.get(edit.value, edit.value)
    if "=@" in value:  # an option or an override with a hostile value
        option, _, name = value.partition("=@")
        value = f"{option}={VALUES[name]}"
    if edit.action == "replace":
        line[index] = value
    elif edit.action == "insert":
        line.insert(index + 1, value)
    elif edit.action == "remove":
        del line[index]
    elif edit.action == "repeat":
        line.insert(index, line[index])


def _edit_tree(form: Format, content: bytes, edits: Sequence[Edit]) -> bytes:
    tree = form.parse(content)
    for edit in edits:
        *path, key = edit.where
        try:
            parent = tree
            for step in path:
                parent = parent[step]
            _edit_value(parent, key, edit)
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an earlier edit has removed the place
    return _LEFT_OUT.sub(lambda found: form.values[_unquoted(found[1])].encode(), form.dump(tree))


def _unquoted(name: bytes) -> str:
    return name.decode().replace('\\"', '"')


def _edit_value(parent: Any, key: Any, edit: Edit) -> None:
    value = f"@@{edit.value}@@"
    if edit.action == "set":
        parent[key] = value
    elif edit.action == "remove":
        del parent[key]
    elif edit.action == "add":
        inner = parent[key]
        inner.append(value) if isinstance(inner, list) else inner.__setitem__("unknown", value)
    elif edit.action == "rename" and edit.value.startswith('"'):
        parent[value] = parent.pop(key)
    elif edit.action == "twice" and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif edit.action == "twice":
        parent[f"{key}."] = parent[key]


def _edit_text(text: bytes, edit: Edit, values: dict[str, str]) -> bytes:
    place = int(edit.where[0])
    value = values.get(edit.value, "").encode("utf-8", "surrogatepass")
    if edit.action == "insert":
        at = len(text) * place // PLACES
        return text[:at] + value + text[at:]
    if edit.action == "scalar":
        found = list(_SCALAR.finditer(text))
        if not found:
            return text
        start, end = found[len(found) * place // PLACES].span()
        return text[:start] + value + text[end:]
    lines = text.splitlines(keepends=True) or [b""]
    at = len(lines) * place // PLACES
    lines[at : at + 1] = [lines[at]] * 2 if edit.action == "repeat line" else []
    return b"".join(lines)


def _edit_bytes(content: bytes, edit: Edit) -> bytes:
    at = len(content) * int(edit.where[0]) // PLACES
    if edit.action == "flip":
        return content[:at] + bytes(one ^ 1 << int(edit.where[1]) for one in content[at : at + 1]) + content[at + 1 :]
    if edit.action == "cut":
        return content[:at]
    piece = content[at : at + 64]
    others = {"drop": b"", "zero": bytes(len(piece)), "repeat": piece * 2}
    return content[:at] + others[edit.action] + content[at + 64 :]


def _edit_file(path: Path, action: str) -> None:
    if not path.is_file():
        return
    size = path.stat().st_size
    path.unlink()
    if action == "sparse":
        path.touch()
        os.truncate(path, _SPARSE + size)
    elif action != "delete":
        REPLACEMENTS[action](path)


def copied(source: Path, target: Path) -> None:
    """Copy a file or a folder of valid inputs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
