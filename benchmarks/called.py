"""Files of quick tests that call each function of the package, so that a fault is tried on these files only.

`catch_rate.py map` writes the map. Each file of tests runs in a fork of one process that has imported most of the
package. In the copy of the checkout, every function and every module of the package notes when it is first called in a
process. All processes that a test starts note it too, because the package itself installs the notes when it is
imported (`install`). The environment variable `CROSSCUT_CALLED` tells a process for which file it works.

The map leaves a file out only if no process of it has called the function. Functions that were called without a file,
such as by the imports before the forks, count for all files. A file of which a test failed under the notes, or that
reads the source of the package (`READERS`), counts for all functions.
"""

import ast
import builtins
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

VARIABLE = "CROSSCUT_CALLED"
ROOT = Path(__file__).parents[1]
NOTES = ROOT / ".called"
"""Folder of the notes: a file for each file of tests, and `_NO_FILE` for calls that belong to none."""
_NO_FILE, _FAILED = "none", "failed"
READERS = ("tests/docs/", "tests/benchmarks/test_shape.py", "tests/test_contract.py", "tests/test_untrusted_files.py")
"""Tests that read the source of the package, by the beginning of the path."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def function_at(text: str, line: int) -> int:
    """Line of the innermost function of a module that has this line; 0 for code outside of functions. The defaults of
    arguments belong to their function, because only its callers get them.
    """
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, _DEFINITIONS))
    return max((node.lineno for node in nodes if node.lineno <= line <= (node.end_lineno or 0)), default=0)


def _must_be_first(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring or an import from `__future__`."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Loader(SourceFileLoader):
    """Loader of a module of the package that adds a note to the beginning of the module and of each function."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        """Compile the module with its notes."""
        tree = ast.parse(data)
        for node in [one for one in ast.walk(tree) if isinstance(one, (ast.Module, *_DEFINITIONS))]:
            key = f"{Path(path).relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 0)}"
            note = ast.parse(f"{key!r} in __called__ or __note_call__({key!r})").body[0]
            place = 0
            while place < len(node.body) and _must_be_first(node.body[place]):
                place += 1
            for part in ast.walk(note):
                ast.copy_location(part, node.body[0] if node.body else note)
            node.body.insert(place, note)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


class _Finder(PathFinder):
    """Finder of the package's modules."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module of the package, and give it the loader with the notes."""
        spec = super().find_spec(fullname, path, target) if fullname.startswith("crosscut.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Let all modules of the package that this process imports from now on note their calls."""
    called = set[str]()
    opened, write, close = os.open, os.write, os.close  # a test may replace them

    def note(key: str) -> None:
        called.add(key)
        file = opened(NOTES / os.environ.get(VARIABLE, _NO_FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        write(file, f"{key}\n".encode())
        close(file)

    vars(builtins).update(__called__=called, __note_call__=note)
    sys.meta_path.insert(0, _Finder)


@dataclass(frozen=True)
class CallMap:
    """Files of tests that call the functions of a checkout's package."""

    always: Sequence[str]
    """Files that count for all functions."""
    calls: Mapping[str, Sequence[str] | None]
    """Files that call a function, by the function's file and line; None if all files count."""

    @classmethod
    def of(cls, copy: Path, files: Sequence[str], workers: int) -> "CallMap":
        """Run files of tests in a copy of the checkout, which is of no other use afterwards."""
        notes = copy / NOTES.name
        notes.mkdir()
        with (copy / "crosscut" / "__init__.py").open("a", encoding="utf-8") as package:
            package.write("\n__import__('benchmarks.called').called.install()\n")
        command = [sys.executable, "-m", "benchmarks.called", str(workers), *files]
        subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, check=True)
        calls: dict[str, list[str] | None] = {}
        for file in files:
            for key in set(_lines(notes / _name(file))):
                calls.setdefault(key, []).append(file)
        failed = _lines(notes / _FAILED)
        always = [file for file in files if file in failed or file.startswith(READERS)]
        return cls(always, calls | dict.fromkeys(_lines(notes / _NO_FILE)))

    def files_for(self, path: str, text: str, line: int, files: Sequence[str]) -> list[str]:
        """Files among `files` on which a fault must be tried that is in this line of a file of the package."""
        chosen = self.calls.get(f"{path}:{function_at(text, line)}", ())
        return [file for file in files if chosen is None or file in chosen or file in self.always]


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _name(file: str) -> str:
    return file.replace("/", "-")


def main(workers: int, files: Sequence[str]) -> None:
    """Run each file of tests in a fork of this process."""
    from tests.nursery import _IMPORTED

    for module in ("pytest", "crosscut.cli.main", *_IMPORTED):
        import_module(module)
    running: dict[int, str] = {}
    for file in [*files, *[""] * workers]:
        if len(running) == workers or (running and not file):
            pid, status = os.wait()
            ended = running.pop(pid)
            if status:
                with (NOTES / _FAILED).open("a", encoding="utf-8") as failed:
                    failed.write(f"{ended}\n")
        if file:
            running[pid := os.fork()] = file
            if pid == 0:
                _run(file)


def _run(file: str) -> None:
    """Run a file of tests in this fork, and end the fork with status 1 if a test fails."""
    import pytest

    os.environ[VARIABLE] = _name(file)
    vars(sys.modules["__main__"]).update(__spec__=None, __file__=None)  # which spawned processes would import
    output = os.open(NOTES / f"{_name(file)}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    options = ("-m", "not slow", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    status = pytest.main([file, *options])
    sys.stdout.flush()
    os._exit(status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
