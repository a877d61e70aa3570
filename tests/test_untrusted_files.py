"""No code reads a file in a way that can run a program that stands in the file.

Pickles, Python's own code and some forms of YAML can hold programs. Their readers stand nowhere in the package.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.test_contract import PACKAGE, files_of, names

FORBIDDEN = re.compile(
    r"(_?pickle|cPickle|cloudpickle|dill|marshal|shelve|joblib|yaml|ruamel|runpy)(\..*)?"
    r"|torch\.(load|hub|package|jit\.load)(\..*)?"
    r"|torch\.distributed\.checkpoint\.(.*\.)?(FileSystemReader|FsspecReader|format_utils|hf_storage)(\..*)?"
    r"|pandas\.read_pickle"
)
BUILT_IN = {"eval", "exec", "compile", "__import__"}
SAFE = {"weights_only": True, "allow_pickle": False}
"""Arguments that make `load` of torch and numpy safe, with their safe values."""


def finds(code: str) -> list[str]:
    """`line: name` of every unsafe reader in the code."""
    tree = ast.parse(code)
    unsafe = [f"{line}: {name}" for line, name in calls(tree)]
    return unsafe + [f"{line}: {name}" for line, name in names(tree) if FORBIDDEN.fullmatch(name)]


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls of Python's own readers of code, and calls that ask for pickles. Safe calls of `load` lose their name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BUILT_IN:
                yield node.lineno, node.func.id
            for keyword in node.keywords:
                if keyword.arg in SAFE:
                    if isinstance(keyword.value, ast.Constant) and keyword.value.value is SAFE[keyword.arg]:
                        node.func = ast.Name("safe")
                    else:
                        yield node.lineno, ast.unparse(keyword)


@pytest.mark.parametrize("room", sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}))
def test_no_file_can_run_a_program(room: str) -> None:
    found = {str(path.relative_to(PACKAGE)): finds(path.read_text(encoding="utf-8")) for path in files_of(room)}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads as read",
        "import importlib\nimportlib.import_module('pickle')",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, weights_only=trusted)",
        "from torch import load\nload(path)",
        "import torch as t\nread = t.load",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "eval(text)",
        "def late():\n    exec(text)",
        "import yaml\nyaml.load(text)",
        "import marshal",
        "import shelve",
        "from joblib import load",
        "import pandas as pd\npd.read_pickle(path)",
        "import torch.distributed.checkpoint as dcp\ndcp.FileSystemReader(path)",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
    ],
)
def test_every_unsafe_reader_is_seen(code: str) -> None:
    assert finds(code)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path, mmap_mode='r')",
        "import re\nre.compile(text)",
        "model.eval()",
        '"""Prose may speak of pickle.loads and eval."""',
    ],
)
def test_safe_readers_are_left_alone(code: str) -> None:
    assert finds(code) == []


def test_loading_a_checkpoint_never_calls_pytorchs_reader_of_values() -> None:
    """PyTorch's planner would read values as pickles. Ours has a method of its own."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from crosscut.checkpoint.reader import CheckpointReader, PaddingLoadPlanner

    assert PaddingLoadPlanner.load_bytes is not DefaultLoadPlanner.load_bytes
    bases = [kind.__name__ for kind in CheckpointReader.__mro__]
    assert "FileSystemReader" not in bases
