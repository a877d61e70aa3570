"""Lines of keys in a TOML file."""

import tomllib

import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.config.loading.toml_lines import key_lines

FILE = '''\
# [model] in a comment
folder = "out" # = x

[model] # a comment
preset = "gpt2-small"
"dropout" = 0.1
inline = { a = 1, b = [2] }

[data]
text = [
    "a ] = b", # ]
    'c = "',
]
note = """
[layout]
tensor = 2 \\""" ""\"""
raw = \'\'\'
steps = 1\'\'\'
empty = ""
tokens = """"""
after.all = 2

[[sources]]
name = "one"
[[sources]]

name = "two"
[ a . "b c" ]
d=1'''


def test_every_key_has_its_line() -> None:
    tomllib.loads(FILE)
    assert key_lines(FILE) == {
        "folder": 2,
        "model": 4,
        "model.preset": 5,
        "model.dropout": 6,
        "model.inline": 7,
        "data": 9,
        "data.text": 10,
        "data.note": 14,
        "data.raw": 17,
        "data.empty": 19,
        "data.tokens": 20,
        "data.after.all": 21,
        "sources.0": 23,
        "sources.0.name": 24,
        "sources.1": 25,
        "sources.1.name": 27,
        "a.b c": 28,
        "a.b c.d": 29,
    }


plain = st.text("abcxyz", min_size=1, max_size=8)
odd = st.text("[]{}=#\"'\\\n x", max_size=9)
values = st.one_of(st.integers(-9, 9), odd, st.lists(odd, max_size=3))


@settings(max_examples=30)
@given(st.dictionaries(plain, st.dictionaries(plain, values, max_size=4), max_size=4), st.booleans())
def test_lines_are_those_of_the_text(table: dict[str, dict[str, object]], multiline: bool) -> None:
    text = tomli_w.dumps(table, multiline_strings=multiline)
    lines, found = text.split("\n"), key_lines(text)
    assert set(found) == {*table, *(f"{name}.{key}" for name, section in table.items() for key in section)}
    for name, number in found.items():
        section, _, key = name.rpartition(".")
        assert lines[number - 1].startswith(f"{key} = " if section else f"[{key}]")
