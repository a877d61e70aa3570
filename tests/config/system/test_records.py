"""Dataclasses survive JSON, and a value that does not fit its field is refused by name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from crosscut.config.system.records import Count, from_json, to_json


class Kind(StrEnum):
    GOOD, BAD = "good", "bad"


class Place(NamedTuple):
    line: int
    column: int = 1


FIRST = Place(1)


@dataclass(frozen=True, kw_only=True)
class Part:
    size: Count
    share: float = 0.0
    place: Place = FIRST


@dataclass(frozen=True, kw_only=True)
class Whole:
    parts: tuple[Part, ...]
    pairs: tuple[tuple[int, float], ...] = ()
    by_name: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    kind: Kind = Kind.GOOD
    device: Literal["cpu", "cuda"] = "cpu"
    path: Path | None = None
    names: frozenset[str] = frozenset()
    more: Any = None


WHOLE = Whole(
    parts=(Part(size=3, share=0.5, place=Place(2, 7)), Part(size=0)),
    pairs=((1, 2.0), (-3, 4.5)),
    by_name={"a": (Part(size=1),), "b": ()},
    kind=Kind.BAD,
    device="cuda",
    path=Path("there/it.txt"),
    names=frozenset({"y", "x"}),
    more={"any": [1, None]},
)


def test_a_dataclass_survives_json() -> None:
    assert from_json(Whole, json.loads(json.dumps(to_json(WHOLE)))) == WHOLE
    assert from_json(Whole, {"parts": [], "of a newer version": 1}) == Whole(parts=())
    assert from_json(Whole, {"parts": [{"size": 1, "share": 2, "place": [3, 4]}]}).parts[0] == Part(
        size=1, share=2.0, place=Place(3, 4)
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parts": None}, "`parts` must be a list, but is None"),
        ({"parts": "ab"}, "`parts` must be a list, but is 'ab'"),
        ({"parts": [3]}, "`parts[0]` must be an object, but is 3"),
        ({"parts": [{}]}, "`size` is missing"),
        ({"parts": [{"size": -1}]}, "`size` must be from 0 to 2^63 - 1, but is -1"),
        ({"parts": [{"size": True}]}, "`size` must be an integer, but is True"),
        ({"parts": [{"size": 1 << 63}]}, "`size` must be from 0 to 2^63 - 1, but is 9223372036854775808"),
        ({"parts": [{"size": 1, "share": float("nan")}]}, "`share` must be finite, but is nan"),
        ({"parts": [{"size": 1, "share": "1"}]}, "`share` must be a number, but is '1'"),
        ({"parts": [{"size": 1, "place": [1, 2, 3]}]}, "`place` must be an object, but is [1, 2, 3]"),
        ({"parts": [{"size": 1, "place": {}}]}, "`line` is missing"),
        ({"pairs": [[1]]}, "`pairs[0]` must be a list of 2 values, but is [1]"),
        ({"pairs": [[-(1 << 63) - 1, 0]]}, "must be from -2^63 to 2^63 - 1, but is"),
        ({"by_name": {"a": [1]}}, "`by_name.a[0]` must be an object, but is 1"),
        ({"kind": "ugly"}, "`kind` must be one of good, bad, but is 'ugly'"),
        ({"kind": []}, "`kind` must be one of good, bad, but is []"),
        ({"device": "tpu"}, "`device` must be one of cpu, cuda, but is 'tpu'"),
        ({"path": 3}, "`path` must be a string, but is 3"),
        ({"names": ["a", 1]}, "`names[1]` must be a string, but is 1"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as error:
        from_json(Whole, {**to_json(WHOLE), **change})
    assert reason in str(error.value)


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_the_whole_must_be_an_object(value: object) -> None:
    with pytest.raises(ValueError, match="`the content` must be an object, but is"):
        from_json(Whole, value)
