"""The check of docstrings names the file and the line of each docstring that opens with an unwanted word."""

from tests.docs.conftest import load_program

docstrings = load_program("docstrings")

MODULE = '''"""How a module is described by a clause."""

from dataclasses import dataclass

LIMIT = 3
"""Those that may take part."""
"What follows a docstring is a string of no meaning."


@dataclass
class Layout:
    """Whatever names the thing."""

    tensor: int = 1
    """Of each matrix, the number of parts."""
    data: int = 1
    """Number of replicas."""

    def world_size(self) -> int:
        """What comes of all axes."""
        return self.tensor * self.data


async def wait() -> str:
    """
    That which is waited for.
    """
    return "What a value."
'''


def test_each_unwanted_opening_is_named_with_its_line(tmp_path, capsys):
    file = tmp_path / "package" / "layout.py"
    file.parent.mkdir()
    file.write_text(MODULE)
    assert docstrings.main([str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        f"{file}:1: How a module is described by a clause.",
        f"{file}:6: Those that may take part.",
        f"{file}:15: Of each matrix, the number of parts.",
        f"{file}:20: What comes of all axes.",
        f"{file}:25: That which is waited for.",
    ]
    assert told.err == (
        "A docstring must not open with What, Of, Those, That or How, but 5 do. Name the thing first.\n"
    )


def test_docstrings_that_name_their_thing_pass(tmp_path, capsys):
    file = tmp_path / "plain.py"
    file.write_text(
        '"""Rates of a step."""\n\nNAME = 1\n"""Whatever: a longer word may begin like an unwanted one."""\n'
    )
    assert docstrings.main([str(file)]) == 0
    assert capsys.readouterr() == ("", "")
