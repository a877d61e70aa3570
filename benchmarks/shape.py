"""Shape of the code of one or more checkouts, as a markdown table with a column for each checkout.

    python benchmarks/shape.py                   # this checkout
    python benchmarks/shape.py ../before .       # two checkouts side by side
    python benchmarks/shape.py --places          # also list the file and line of everything that is counted

The figures come from the syntax trees of the Python files in `crosscut/`, so comments and strings are not mistaken for
code. Only the last row also looks at `benchmarks/`. The docstring of each function below defines its row.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import ROOT, command_line
from docs.docstrings import OPENINGS, docstrings_of

MOST_LINES = 40
"""Lines that a function should have at most."""
MOST_FILES = 15
"""Python files that a folder may hold."""

FIELDS_OF_KINDS = {"biases", "family", "layers", "mlp", "norm", "positions", "qk_norm"}
"""Fields of the model's config that choose a kind of sublayer."""
FACTS_OF_KINDS = FIELDS_OF_KINDS | {
    "attends", "attention", "attention_gate", "gated_delta", "has_keys_of_heads", "has_pooler", "head", "head_size",
    "is_causal", "key_value_size", "kinds", "latent_attention", "layers", "mamba", "mamba2", "mlp_of", "mlp_pattern",
    "mlp_size", "norm_place", "num_classes", "num_heads", "num_kv_heads", "predicts_masked", "qk_norm_kind",
    "qk_norm_over", "query_size", "sections", "sentence_order", "sliding_attention", "solves_task", "sparse_attention",
    "token_types",
}  # fmt: skip
"""Attributes of the model's config that say something about a kind of layer, or about the head."""
HOMES_OF_KINDS = {"architecture", "config", "model", "pretrained"}
"""Packages that may branch on a kind of sublayer."""
WITHOUT_FACTS = HOMES_OF_KINDS | {"finetuning", "kernels"}
"""Packages whose uses of `FACTS_OF_KINDS` do not count: `HOMES_OF_KINDS`; `finetuning/`, whose subject is heads; and
`kernels/`, which never sees the model's config, but has shapes of its own."""
AXES = {
    "context", "data", "expert", "expert_data", "expert_replica", "expert_shard", "pipeline", "replica", "shard",
    "tensor",
}  # fmt: skip
"""Names of the axes."""
HOMES_OF_AXES = {"config", "parallel"}
"""Packages that may name a single axis."""
NUMERIC = {"architecture", "kernels", "launch", "model", "parallel", "planner", "rehearsal", "training", "verification"}
"""Packages in which names belong to parameters, operators or messages, and not to files."""
FILE_SUFFIXES = (".bin", ".idx", ".json", ".toml")
LAUNCHERS = {"launch", "process_group"}
"""Functions that start ranks or join them."""


@dataclass(frozen=True)
class Source:
    """A Python file of the package, the tests or the benchmarks."""

    path: Path
    """Relative to the folder of the package, the tests or the benchmarks."""
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """Name of the folder directly below `crosscut`, `tests` or `benchmarks` that holds the file."""
        return self.path.parts[0] if len(self.path.parts) > 1 else ""

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree. They are collected once, because every row of the table looks through them."""
        return tuple(ast.walk(self.tree))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods, nested ones included."""
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    def calls(self) -> Iterator[ast.Call]:
        """All calls."""
        return (node for node in self.nodes if isinstance(node, ast.Call))

    def place(self, line: int) -> str:
        """File and line."""
        return f"{self.path.as_posix()}:{line}"


@dataclass(frozen=True)
class Row:
    """A row of the table for one checkout."""

    name: str
    figure: str
    places: Sequence[str] = ()
    """File and line of everything that the figure counts, or the names of the folders."""


def read_sources(folder: Path) -> list[Source]:
    """Parse all Python files of a folder, such as the package of a checkout."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    return [Source(path.relative_to(folder), text, ast.parse(text, str(path))) for path, text in texts.items()]


def measure(checkout: Path) -> list[Row]:
    """Count all rows of a checkout."""
    sources = read_sources(checkout / "crosscut")
    return [
        Row("files", f"{len(sources):,}"),
        Row("lines", f"{sum(len(source.text.splitlines()) for source in sources):,}"),
        longest_package(sources),
        counted(f"functions over {MOST_LINES} lines", sources, long_functions),
        counted("functions with more than 6 arguments", sources, lambda source: wide_functions(source, 6)),
        counted("functions with more than 8 arguments", sources, lambda source: wide_functions(source, 8)),
        counted("`is_compiling` branches", sources, compiling_branches),
        Row("files with `is_compiling` branches", str(sum(any(compiling_branches(source)) for source in sources))),
        counted("methods replaced from outside", sources, replaced_methods),
        counted("decisions by the end of a name", sources, decisions_by_ending),
        counted("branches on a kind of sublayer elsewhere", sources, branches_on_kinds),
        counted("facts about a kind of layer or head read elsewhere", sources, facts_of_kinds),
        counted("single axes named elsewhere", sources, single_axes),
        counted("ways into the ranks", sources, ways_into_ranks),
        counted("calls of `settled`", sources, calls_of_settled),
        counted("`type: ignore`", sources, type_ignores),
        Row("deepest nesting of `training/loop.py`", deepest_nesting(sources)),
        *docstring_openings(sources),
        full_folders(checkout),
    ]


def counted(name: str, sources: Sequence[Source], lines_of: Callable[[Source], Iterator[int]]) -> Row:
    """Count the lines that a function finds in all files."""
    places = [source.place(line) for source in sources for line in sorted(lines_of(source))]
    return Row(name, str(len(places)), places)


def longest_package(sources: Sequence[Source]) -> Row:
    """Name and lines of the package with the most lines, its sub-packages included."""
    lines: Counter[str] = Counter()
    for source in sources:
        lines[source.package] += len(source.text.splitlines())
    ((name, most),) = lines.most_common(1)
    return Row("longest package", f"{name}, {most:,} lines")


def long_functions(source: Source) -> Iterator[int]:
    """Functions of more than 40 lines, from `def` to the last line."""
    return (node.lineno for node in source.functions() if (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES)


def wide_functions(source: Source, most: int) -> Iterator[int]:
    """Functions with more than `most` arguments, without `self`, `cls`, `*args` and `**kwargs`."""
    for node in source.functions():
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if len(names) - (names[:1] in (["self"], ["cls"])) > most:
            yield node.lineno


def compiling_branches(source: Source) -> Iterator[int]:
    """Calls of `torch.compiler.is_compiling()`."""
    return (node.lineno for node in source.calls() if called_name(node) == "is_compiling")


def replaced_methods(source: Source) -> Iterator[int]:
    """Assignments to `forward`, or of a function to any attribute, of an object other than `self`.

    A call of `setattr` with a computed name counts, too.
    """
    functions = {node.name for node in source.functions()}
    for node in source.nodes:
        if isinstance(node, ast.Assign):
            is_function = isinstance(node.value, ast.Lambda) or getattr(node.value, "id", None) in functions
            targets = [each for each in node.targets if isinstance(each, ast.Attribute)]
            if any(is_function or each.attr == "forward" for each in targets if not is_named(each.value, "self")):
                yield node.lineno
        elif isinstance(node, ast.Call) and is_named(node.func, "setattr"):
            place, name, _ = node.args
            if not is_named(place, "self") and not isinstance(name, ast.Constant):
                yield node.lineno


def decisions_by_ending(source: Source) -> Iterator[int]:
    """Calls of `endswith` and `removesuffix` on the name of a parameter, an operator or a message.

    File names do not count: neither `file.name` and `path.name` nor endings such as `.toml`.
    """
    for node in source.calls() if source.package in NUMERIC else ():
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("endswith", "removesuffix"):
            text = ast.unparse(node.func.value)
            is_file = text in ("file.name", "path.name") or any(suffix in ast.unparse(node) for suffix in FILE_SUFFIXES)
            if text.rpartition(".")[2] in ("name", "parameter", "purpose") and not is_file:
                yield node.lineno


def branches_on_kinds(source: Source) -> Iterator[int]:
    """Comparisons with a field of the model's config that chooses a kind of sublayer, and uses of `qk_norm`.

    Files of `config/`, `architecture/`, `model/` and `pretrained/` do not count.
    """
    if source.package in HOMES_OF_KINDS:
        return
    for node in source.nodes:
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
        elif isinstance(node, ast.Match):
            sides = (node.subject,)
        else:
            if isinstance(node, ast.Attribute) and node.attr == "qk_norm":
                yield node.lineno
            continue
        if any(isinstance(side, ast.Attribute) and side.attr in FIELDS_OF_KINDS - {"qk_norm"} for side in sides):
            yield node.lineno


def facts_of_kinds(source: Source) -> Iterator[int]:
    """Uses of an attribute of a model's config that says something about a kind of layer, or about the head.

    Files of the packages in `WITHOUT_FACTS` do not count, and neither does a question to a model's head, such as
    `model.head.operands(x)`.
    """
    if source.package in WITHOUT_FACTS:
        return
    asked = {node.value for node in source.nodes if isinstance(node, ast.Attribute)}
    for node in _attributes(source, FACTS_OF_KINDS, r"(^|\.)(model|config|shape)$"):
        if not (node.attr == "head" and node in asked):
            yield node.lineno


def single_axes(source: Source) -> Iterator[int]:
    """Uses of one axis of a layout, a mesh or a target, and layouts that are made with the size of one axis.

    Files of `config/` and `parallel/` do not count.
    """
    if source.package in HOMES_OF_AXES:
        return
    yield from (node.lineno for node in _attributes(source, AXES, r"(^|[._])(layout|mesh|target|ranks)$"))
    for call in source.calls():
        if called_name(call) in ("Layout", "Target", "replace"):
            yield from (keyword.value.lineno for keyword in call.keywords if keyword.arg in AXES)


def _attributes(source: Source, names: set[str], owner: str) -> Iterator[ast.Attribute]:
    """Uses of one of these attributes of an expression whose text matches `owner`."""
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in names and re.search(owner, ast.unparse(node.value)):
            yield node


def ways_into_ranks(source: Source) -> Iterator[int]:
    """Files that start ranks or join them: the first call of `launch` or `process_group` imported from the package."""
    imported = {
        alias.asname or alias.name
        for node in source.nodes
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("crosscut"))
        for alias in node.names
        if alias.name in LAUNCHERS
    }
    lines = [node.lineno for node in source.calls() if isinstance(node.func, ast.Name) and node.func.id in imported]
    yield from sorted(lines)[:1]


def calls_of_settled(source: Source) -> Iterator[int]:
    """Calls of a method `settled`."""
    return (node.lineno for node in source.calls() if called_name(node) == "settled")


def type_ignores(source: Source) -> Iterator[int]:
    """Lines with a `type: ignore` comment."""
    lines = enumerate(source.text.splitlines(), 1)
    return (number for number, line in lines if re.search(r"#\s*type:\s*ignore", line))


def deepest_nesting(sources: Sequence[Source]) -> str:
    """Most compound statements (`for`, `while`, `if`, `with`, `try`, `match`) around a statement of the loop's file.

    Functions and classes do not count, and an `elif` counts like its `if`. The figure is `-` without such a file.
    """
    trees = [source.tree for source in sources if source.path.as_posix() == "training/loop.py"]
    return str(max(map(nesting, trees))) if trees else "-"


def nesting(node: ast.AST) -> int:
    """Most compound statements around a statement below a node, the node itself included."""
    inner = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        inner = max(inner, nesting(child) - is_elif)
    compound = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
    return inner + isinstance(node, compound)


def docstring_openings(sources: Sequence[Source]) -> Iterator[Row]:
    """Docstrings that open with each word that `docs/docstrings.py` refuses."""
    found: dict[str, list[str]] = {word: [] for word in OPENINGS}
    for source in sources:
        for docstring in sorted(docstrings_of(source.tree)):
            if docstring.opening:
                found[docstring.opening].append(source.place(docstring.line))
    yield from (Row(f'docstrings that open with "{word}"', str(len(places)), places) for word, places in found.items())


def full_folders(checkout: Path) -> Row:
    """Folders of `crosscut/` and `benchmarks/` with more than 15 Python files directly in them."""
    roots = (checkout / "crosscut", checkout / "benchmarks")
    sizes = Counter(path.parent.relative_to(checkout).as_posix() for root in roots for path in root.rglob("*.py"))
    full = [f"{folder} ({size})" for folder, size in sorted(sizes.items()) if size > MOST_FILES]
    return Row(f"folders with more than {MOST_FILES} files", str(len(full)), full)


def called_name(call: ast.Call) -> str:
    """Last part of the name of the called function. Empty if the function has no name."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def is_named(node: ast.expr, name: str) -> bool:
    """Whether an expression is the variable of this name."""
    return isinstance(node, ast.Name) and node.id == name


def to_markdown(columns: dict[str, list[Row]]) -> str:
    """Table of the figures, a column for each checkout."""
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    table = zip(*columns.values(), strict=True)
    return "\n".join([*lines, *(f"| {rows[0].name} | {' | '.join(row.figure for row in rows)} |" for rows in table)])


def refuse_other_folders(parser: argparse.ArgumentParser, checkouts: Sequence[Path]) -> None:
    """End the program if a folder is no checkout."""
    for checkout in checkouts:
        if not any((checkout / "crosscut").glob("*.py")):
            parser.error(f"`checkouts` must be folders that hold `crosscut/`, but {checkout} is not. Name a checkout.")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], help="folders that hold `crosscut/`")
    parser.add_argument("--places", action="store_true", help="also list the file and line of everything counted")
    options = parser.parse_args(arguments)
    refuse_other_folders(parser, options.checkouts)
    columns = {str(checkout): measure(checkout) for checkout in options.checkouts}
    print(to_markdown(columns))
    for checkout, rows in columns.items() if options.places else ():
        for row in rows:
            if row.places:
                print(f"\n{checkout}, {row.name}:", *row.places, sep="\n  ")


if __name__ == "__main__":
    main()
