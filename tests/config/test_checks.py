import dataclasses
import json
import pickle
from dataclasses import dataclass

import pytest
import tomli_w

from crosscut.config import ConfigError
from crosscut.config.checks import Choice, divisors, resolve_choices
from crosscut.config.loading import dump_toml, load_run
from tests.refusals import refusal


class Colour(Choice):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Paint:
    colour: Colour = Colour.RED
    accents: tuple[Colour, ...] = ()
    shade: str = "red"

    def __post_init__(self) -> None:
        resolve_choices(self, "paint")


def paint(**fields: object) -> Paint:
    return Paint(**fields)


def test_strings_become_members() -> None:
    mixed = paint(colour="blue", accents=("red", Colour.BLUE))
    assert mixed.colour is Colour.BLUE
    assert mixed.accents == (Colour.RED, Colour.BLUE)
    assert all(type(accent) is Colour for accent in mixed.accents)
    assert type(mixed.shade) is str


def test_a_member_equals_its_string() -> None:
    assert paint(colour="blue").colour == "blue"
    assert {"blue": 1}[Colour.BLUE] == 1


@pytest.mark.parametrize(("field", "value"), [("colour", "green"), ("accents", ("red", "green"))])
def test_an_error_lists_the_choices(field: str, value: object) -> None:
    assert refusal(ConfigError, paint, **{field: value}) == f"`paint.{field}` must be 'red' or 'blue', but is 'green'."


def test_members_are_shown_and_written_as_plain_strings() -> None:
    mixed = paint(accents=("blue",))
    assert f"{mixed.colour} {mixed.colour!r} {list(mixed.accents)}" == "red 'red' ['blue']"
    assert repr(mixed).endswith("Paint(colour='red', accents=('blue',), shade='red')")
    table = dataclasses.asdict(mixed)
    assert json.dumps(table) == '{"colour": "red", "accents": ["blue"], "shade": "red"}'
    assert tomli_w.dumps({"colour": mixed.colour}) == 'colour = "red"\n'
    assert Colour.values() == ["red", "blue"]
    assert [type(value) for value in Colour.values()] == [str, str]


def test_a_member_survives_the_way_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(paint(colour="blue"))).colour is Colour.BLUE


def test_a_run_writes_its_choices_as_plain_values() -> None:
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 1}
    text = dump_toml(load_run({"model": model}, ["training.offload=optimizer", "training.precision=float64"]))
    assert 'precision = "float64"' in text
    assert 'recompute = "none"' in text
    assert '"optimizer",' in text


def test_a_choice_is_no_number() -> None:
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 1}
    with pytest.raises(ConfigError, match=r"^`training\.device` must be 'auto', 'cpu' or 'cuda', but is 3\.$"):
        load_run({"model": model, "training": {"device": 3}})


@pytest.mark.parametrize("number", [1, 2, 7, 12, 36, 49, 97, 512, 5040])
def test_divisors_are_all_and_ascend(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
