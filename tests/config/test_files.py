"""JSON that no one would write is a mistake like any other, in whichever file it stands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import CrosscutError
from crosscut.config.files import parse_json
from crosscut.config.published.folders import read_json
from crosscut.data.manifest import Manifest
from crosscut.evaluation.lambada import _passages
from crosscut.generation.prompts import read_prompts
from crosscut.pretrained.tensors import list_tensors

NESTED = ["[" * 100_000, '{"a":' * 100_000, "[" * 5000 + "]" * 5000, '{"weight_map":' + '{"a":' * 50_000]


@pytest.mark.parametrize("text", [*NESTED, "9" * 5000, "", "\ud800"])
def test_json_that_cannot_be_parsed_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": read_json,
    "manifest.json": lambda path: Manifest.read(path.parent),
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
