"""Find the public names of the package, and write the pages of the reference.

A name is public if a page's Python block or a program in `examples/` imports it, or if it stands in `__all__` of a
package from which they import. The names are read from the source, so this module imports nothing of the package.
"""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r"^```python *\n(.*?)^```", re.MULTILINE | re.DOTALL)


def imported_names(root: Path) -> dict[str, set[str]]:
    """Names that pages and examples import from the package, by module."""
    found: dict[str, set[str]] = defaultdict(set)
    for program in _programs(root):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "crosscut":
                found[str(node.module)].update(alias.name for alias in node.names)
    return found


def public_names(root: Path) -> dict[str, list[str]]:
    """Public names of each public module. A name that a package has from another room stands in that room only."""
    return {module: _public(root, module, names) for module, names in sorted(imported_names(root).items())}


def home_of(root: Path, module: str, name: str) -> str:
    """Path of the file that defines a name, which packages may pass on."""
    path = root / Path(*module.split("."))
    home = _exports(path)[1].get(name)
    if home:
        return home_of(root, home, name)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return str(file.relative_to(root))


def anchor_of(path: str, name: str) -> str:
    """Anchor of a class or function on the page of its source file. Case is lost in anchors, so classes say that they
    are classes.
    """
    words = re.split(r"[^a-z0-9]+", f"{path}/{name}".lower())
    return "-".join(filter(None, ["class" if name[0].isupper() else "", *words]))


def definitions(text: str) -> dict[str, int]:
    """First line, from 1, of each public class and function of a Python file, with its decorators."""
    return {
        node.name: min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_"
    }


def reference_pages(root: Path) -> dict[str, str]:
    """Markdown of the reference's pages: one for each room with public modules, and a page that lists them."""
    rooms: dict[str, list[str]] = defaultdict(list)
    for module, names in public_names(root).items():
        rooms[module.split(".")[1]].append(_section(root, module, names))
    pages = {
        f"reference/{room}": "\n\n".join([f"# `crosscut.{room}`", *sections]) + "\n" for room, sections in rooms.items()
    }
    listed = "\n".join(f"- [`crosscut.{room}`]({room}.md): {_purpose(root, room)}" for room in rooms)
    tree = "\n".join(["```{toctree}", ":hidden:", "", *rooms, "```"])
    return pages | {"reference/index": f"# Reference\n\n{_INTRODUCTION}\n\n{listed}\n\n{tree}\n"}


_INTRODUCTION = """\
The names that the pages and the examples import, and those beside them. All other names may change in any version. The
settings of a run are on the page [Configuration](../configuration.md)."""


def _programs(root: Path) -> Iterator[str]:
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        yield from _BLOCK.findall(page.read_text(encoding="utf-8"))
    for file in sorted((root / "examples").rglob("*.py")):
        yield file.read_text(encoding="utf-8")


def _public(root: Path, module: str, imported: set[str]) -> list[str]:
    room = ".".join(module.split(".")[:2])
    exported, homes = _exports(root / Path(*module.split(".")))
    own = {name for name in exported if homes.get(name, room).startswith(room)}
    return sorted(own | imported)


def _exports(path: Path) -> tuple[list[str], dict[str, str]]:
    """`__all__` of a package (empty for a module), and the module from which the package imports each name."""
    if not path.is_dir():
        return [], {}
    exported: list[str] = []
    homes: dict[str, str] = {}
    for node in ast.parse((path / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
    return exported, homes


def _purpose(root: Path, room: str) -> str:
    """First paragraph of a package's docstring, on one line."""
    text = ast.get_docstring(ast.parse((root / "crosscut" / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _section(root: Path, module: str, names: list[str]) -> str:
    """Section of one module. Sphinx reads classes and functions; it does not find the texts of passed on constants."""
    constants = {name: text for name in names if (text := _constant(root, module, name))}
    members = ", ".join(name for name in names if name not in constants)
    heading = [f"## `{module}`"] if module.count(".") > 1 else []
    listed = f"```{{eval-rst}}\n.. automodule:: {module}\n   :members: {members}\n   :imported-members:\n```"
    return "\n\n".join([*heading, listed, *constants.values()])


def _constant(root: Path, module: str, name: str) -> str | None:
    """Description of a constant by its annotation and the text under it. None if the name is no constant."""
    body = ast.parse((root / home_of(root, module, name)).read_text(encoding="utf-8")).body
    for node, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if name in map(ast.unparse, targets):
            kind = f":type: {ast.unparse(node.annotation)}\n" if isinstance(node, ast.AnnAssign) else ""
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            return f"````{{py:data}} {name}\n:module: {module}\n{kind}\n{inspect.cleandoc(str(text))}\n````"
    return None
