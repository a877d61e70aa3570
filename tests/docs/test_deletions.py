"""The check of deletions finds every way to remove, rename or replace a file, and nothing else."""

import pytest

from tests.docs.conftest import load_program

deletions = load_program("deletions")


@pytest.mark.parametrize(
    "planted",
    [
        "import shutil\nshutil.rmtree(path)",
        "import shutil as s\ns.move(path, other)",
        "from shutil import rmtree",
        "from shutil import copyfile, move as put",
        "import shutil\nfrom functools import partial\nclean = partial(shutil.rmtree, ignore_errors=True)",
        "import os\nos.remove(path)",
        "import os\nos.unlink(name, dir_fd=folder)",
        "import os\nos.replace(path, other)",
        "import os\nos.renames(path, other)",
        "import os as system\nsystem.removedirs(path)",
        "from os import rename",
        "path.unlink(missing_ok=True)",
        "(folder / name).rmdir()",
        "path.with_suffix('.new').replace(path)",
        "path.replace(target=other)",
        "path.replace(*names)",
        "path.rename(other)",
        "Path.replace(path, other)",
        "pathlib.Path.rename(path, other)",
        "for path in map(Path.unlink, paths): pass",
        "move = path.rename",
        "store.rm(path, recursive=True)",
        "store.rm_file(path)",
        "self.store.mv(old, new)",
        "getattr(path, 'unlink')()",
        "getattr(shutil, 'rmtree')(path)",
        "class Folder:\n    def clear(self):\n        self.path.rmdir()",
    ],
)
def test_planted_deletion_is_found(tmp_path, capsys, planted):
    (tmp_path / "planted.py").write_text(f'"""A module."""\n{planted}\n')
    assert deletions.main([str(tmp_path)]) == 1
    out = capsys.readouterr()
    assert out.out.startswith(f"{tmp_path}/planted.py:")
    homes = "`crosscut/config/system/deletion.py` and `crosscut/config/system/object_deletion.py`"
    assert out.err.startswith(f"Only {homes} may remove, rename or replace files, but ")


@pytest.mark.parametrize(
    "harmless",
    [
        "text.replace('a', 'b')",
        "text.replace('a', 'b', 1)",
        "import dataclasses\ndataclasses.replace(run, seed=1)",
        "from dataclasses import replace\nreplace(run, seed=1)",
        "function.__code__.replace(co_name='a')",
        "names.remove(name)",
        "handle.remove()",
        "import os\nos.path.join(a, b)",
        "root.rename(old, new)",
        "class Words:\n    def rename(self, word): ...\n    def all(self):\n        self.rename(self.word)",
        "'the file is removed'",
    ],
)
def test_what_removes_no_file_passes(tmp_path, harmless):
    (tmp_path / "harmless.py").write_text(f'"""A module."""\n{harmless}\n')
    assert list(deletions.findings([tmp_path])) == []


def test_the_modules_that_the_check_leaves_out_are_those_that_remove_files():
    """`make check` runs the check of the whole package."""
    local, objects = (home.read_text(encoding="utf-8") for home in deletions.HOMES)
    assert "os.unlink" in local and "shutil.rmtree" in local and ".rm_file(" in objects
