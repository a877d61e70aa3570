"""Only `parallel` and `launch` talk to other ranks: no other room's code names `torch.distributed`.

The import contract cannot tell, since it sees `torch` as one package and no attributes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "crosscut"

ALLOWED = {
    # Saving and loading is this library's; what it sends is its own affair and never part of a step.
    "checkpoint": ("torch.distributed.checkpoint",),
}
"""Room to the parts of `torch.distributed` that its code may name. Nobody else may even name the type `DTensor`: a
parameter is one, but the rooms above treat it as a tensor, or ask `parallel` for the local part."""

FORBIDDEN = re.compile(r"torch\.distributed\b|(\w+\.)*_c10d_functional\b|(\w+\.)*_distributed_c10d\b")


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of all that the code imports, reaches through attributes, or gives as a text."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, resolve(node, bound)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield node.lineno, node.value  # such as importlib and `python -m` take


def resolve(node: ast.expr, bound: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{resolve(node.value, bound)}.{node.attr}"
    return bound.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def mentions(code: str, room: str) -> list[str]:
    """`line: name` of what code of this room may not name."""
    if "distributed" not in code and "c10d" not in code:
        return []  # without a look at the syntax, which takes seconds for all rooms
    return [
        f"{line}: {name}"
        for line, name in names(ast.parse(code))
        if FORBIDDEN.match(name)
        and not any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED.get(room, ()))
    ]


ROOMS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")} - {"parallel", "launch"})


def files_of(room: str) -> Iterator[Path]:
    """Files of a room, or the file of this name at the top of the package."""
    return (PACKAGE / room).rglob("*.py") if (PACKAGE / room).is_dir() else iter((PACKAGE / room,))


@pytest.mark.parametrize("room", ROOMS)
def test_only_parallel_and_launch_name_torch_distributed(room: str) -> None:
    found = {str(path): mentions(path.read_text(encoding="utf-8"), room) for path in files_of(room)}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_what_is_allowed_is_used() -> None:
    for room, parts in ALLOWED.items():
        found = {name for path in (PACKAGE / room).rglob("*.py") for _, name in names(ast.parse(path.read_text()))}
        for part in parts:
            assert any(name == part or name.startswith(f"{part}.") for name in found), (room, part)


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "def late():\n    from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "import torch\ntorch.distributed.all_reduce(x)",
        "import torch as t\nt.distributed.get_rank()",
        "import torch\ntorch.ops._c10d_functional.all_reduce(x, 'sum', g)",
        "from torch import ops\nops._c10d_functional.all_reduce(x, 'sum', g)",
        "import torch.distributed._functional_collectives",
        "import importlib\nimportlib.import_module('torch.distributed')",
    ],
)
def test_every_way_to_name_it_is_seen(code: str) -> None:
    assert mentions(code, "model")


@pytest.mark.parametrize(
    "code",
    [
        '"""Prose may speak of torch.distributed."""',
        "import torch\ntorch.distributions.Normal(0, 1)",
        "from crosscut.parallel import launch",
    ],
)
def test_other_code_is_left_alone(code: str) -> None:
    assert mentions(code, "model") == []


def test_checkpoint_may_name_its_own_part_only() -> None:
    assert mentions("import torch.distributed.checkpoint as dcp\ndcp.save({})", "checkpoint") == []
    assert mentions("import torch.distributed as dist\ndist.barrier()", "checkpoint")
