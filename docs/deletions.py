"""Check that nothing outside the modules of deletion removes, renames or replaces files.

    python docs/deletions.py [PATH ...]

`crosscut/config/system/deletion.py`, and `object_deletion.py` beside it for object stores, remove only what carries
Crosscut's marker. This check refuses the calls that remove or rename files in all other Python files of the paths
(`crosscut/` by default): functions of `os`, `shutil` and `tempfile`, methods of paths, and methods of an object store.
Each finding is printed as `file:line: call`, and the exit status is then 1.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.docstrings import ROOT, parsed

HOMES = tuple(ROOT / "crosscut" / "config" / "system" / name for name in ("deletion.py", "object_deletion.py"))

OF_MODULES = {
    "os": frozenset({"remove", "unlink", "rmdir", "removedirs", "rename", "renames", "replace", "truncate"}),
    "shutil": frozenset({"rmtree", "move"}),
}
"""Functions of modules, also if they are imported by name."""

METHODS = frozenset({"unlink", "rmdir", "rmtree", "rm", "rm_file", "mv", "move", "removedirs", "renames", "delete"})
"""Methods that remove or move files, whatever the object is: those of paths and of fsspec's stores."""

BY_NAME = frozenset({"unlink", "rmdir", "rmtree", "rm_file", "removedirs", "renames"})
"""Names that no other thing has, so that a text with this content can only serve to look a function up."""

ON_PATHS = frozenset({"rename", "replace"})
"""Methods with one argument that rename a path. With two arguments, `replace` is a method of texts."""


class Finding(NamedTuple):
    """A call that removes or renames a file, and its line."""

    line: int
    text: str


def calls_of(tree: ast.Module) -> Iterator[Finding]:
    """Yield the calls and imports in a module that may remove or rename a file."""
    nodes = list(ast.walk(tree))
    modules = {one.asname or one.name: one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = OF_MODULES.get(node.module or "", frozenset())
            yield from (Finding(node.lineno, ast.unparse(node)) for one in node.names if one.name in names)
        elif isinstance(node, ast.Constant) and node.value in BY_NAME:
            yield Finding(node.lineno, f"the name {node.value!r}")  # `getattr(path, "unlink")`
        elif isinstance(node, ast.Attribute):
            value = node.value.id if isinstance(node.value, ast.Name) else ""
            is_own = value == "self" and node.attr in own
            if value in modules:
                is_found = node.attr in OF_MODULES.get(modules[value], frozenset())
            else:
                is_found = node.attr in METHODS or (
                    node.attr in ON_PATHS and not _is_of_texts(ast.unparse(node.value), calls.get(id(node)))
                )
            if is_found and not is_own:
                yield Finding(node.lineno, ast.unparse(node))


def _is_of_texts(value: str, call: ast.Call | None) -> bool:
    """Whether a call of `replace` or `rename` has other arguments than a path's method takes: `replace` of a text has
    two, that of a code object has keywords or none.
    """
    if call is None or value.endswith("Path"):
        return False
    return len(call.args) != 1 and all(word.arg not in ("target", None) for word in call.keywords)


def findings(paths: Sequence[Path]) -> Iterator[str]:
    """Yield `file:line: call` for every call outside `HOMES`."""
    for file, shown, tree in parsed(paths):
        if file.resolve() not in HOMES:
            yield from (f"{shown}:{line}: {text}" for line, text in sorted(set(calls_of(tree))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "crosscut"], help="files or folders to check")
    found = list(findings(parser.parse_args(arguments).paths))
    for finding in found:
        print(finding)
    if found:
        homes = " and ".join(f"`{home.relative_to(ROOT)}`" for home in HOMES)
        print(
            f"Only {homes} may remove, rename or replace files, but "
            f"{'1 other place does' if len(found) == 1 else f'{len(found)} other places do'}. Use its functions.",
            file=sys.stderr,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
