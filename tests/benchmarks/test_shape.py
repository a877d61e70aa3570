"""The shape of a small package is counted line by line, two checkouts stand side by side, and ours keeps its limits."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import shape
from tests.benchmarks.conftest import write_files

FILES = {
    "training/loop.py": '''"""What a loop does."""

import torch
from crosscut.parallel import launch, process_group


def train(a, b, c, d, e, f, g):
    """Train."""
    for step in a:
        with b:
            if c:
                pass
            elif d:
                while e:
                    pass
    launch(train, ())
    launch(train, ())
    text = "launch() and torch.compiler.is_compiling() in a string"
    return text  # type: ignore[no-any-return]


def compile_block(block, mlp):
    def forward(x):
        return x if torch.compiler.is_compiling() else -x

    block.forward = forward
    mlp.activation = forward
    block.count = 3
    setattr(block, mlp.name, forward)
    return 1 if block.mlp == "swiglu" else block.qk_norm


def count(run):
    asked = gpt.model.head.logits(run)
    return asked, run.model.is_causal, run.layout.tensor, Layout(data=2), run.task.is_causal, run.world.tensor
''',
    "model/gpt.py": '''class GPT:
    """Of all models, this."""

    size: int
    """How many parameters there are."""

    def __init__(self, a, b, *, c, d, e, f, g, h, i):
        self.forward = self.run
        self.is_gated = a.mlp == "swiglu"

    def run(self, name, file):
        run = self.config.settled("float32").settled("float32")
        return name.endswith(".weight"), name.endswith(".toml"), file.name.endswith("x"), torch.compiler.is_compiling()
''',
    "model/long.py": "def long():\n" + "    pass\n" * 40 + "\n\ndef short():\n" + "    pass\n" * 39,
    **{f"data/file{number}.py": "" for number in range(16)},
    **{f"planner/file{number}.py": "" for number in range(15)},
}

EXPECTED = {
    "files": "35",
    "longest package": "model, 96 lines",
    "functions over 40 lines": "1",
    "functions with more than 6 arguments": "2",
    "functions with more than 8 arguments": "1",
    "`is_compiling` branches": "2",
    "files with `is_compiling` branches": "2",
    "methods replaced from outside": "3",
    "decisions by the end of a name": "1",
    "branches on a kind of sublayer elsewhere": "2",
    "facts about a kind of layer or head read elsewhere": "1",
    "single axes named elsewhere": "2",
    "ways into the ranks": "1",
    "calls of `settled`": "2",
    "`type: ignore`": "1",
    "deepest nesting of `training/loop.py`": "4",
    'docstrings that open with "What"': "1",
    'docstrings that open with "Of"': "1",
    'docstrings that open with "Those"': "0",
    'docstrings that open with "That"': "0",
    'docstrings that open with "How"': "1",
    "folders with more than 15 files": "1",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_files(tmp_path, {f"crosscut/{name}": text for name, text in {"__init__.py": "", **FILES}.items()})


def test_every_row_counts_what_its_docstring_defines(checkout):
    rows = {row.name: row for row in shape.measure(checkout)}
    assert {name: row.figure for name, row in rows.items() if name != "lines"} == EXPECTED
    assert rows["methods replaced from outside"].places == [f"training/loop.py:{line}" for line in (26, 27, 29)]
    assert rows["functions over 40 lines"].places == ["model/long.py:1"]
    assert rows["folders with more than 15 files"].places == ["crosscut/data (16)"]


def test_two_checkouts_are_columns_and_places_are_listed(checkout, capsys):
    after = write_files(checkout / "after", {"crosscut/__init__.py": ""})
    shape.main([str(checkout), str(after), "--places"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"| | {checkout} | {after} |\n|---|---|---|\n| files | 35 | 1 |\n")
    assert "| deepest nesting of `training/loop.py` | 4 | - |\n" in printed
    assert f"{checkout}, calls of `settled`:\n  model/gpt.py:12\n  model/gpt.py:12\n" in printed


def test_a_folder_without_the_package_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        shape.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "`checkouts` must be folders that hold `crosscut/`" in capsys.readouterr().err


LIMITS = {
    "functions over 40 lines": 0,
    "functions with more than 6 arguments": 0,
    "files with `is_compiling` branches": 5,
    "methods replaced from outside": 1,  # PyTorch has no hook for `UntypedStorage.resize_`
    "decisions by the end of a name": 0,
    "branches on a kind of sublayer elsewhere": 0,
    "facts about a kind of layer or head read elsewhere": 0,
    "ways into the ranks": 1,
    "calls of `settled`": 0,
    "deepest nesting of `training/loop.py`": 4,
    "folders with more than 15 files": 0,
}


@pytest.fixture
def no_collections() -> Iterator[None]:
    """The syntax trees of the package are a million objects, and none of them is garbage."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_the_package_keeps_its_shape():
    rows = {row.name: row for row in shape.measure(shape.ROOT)}
    assert {name: rows[name].places for name, most in LIMITS.items() if int(rows[name].figure) > most} == {}
