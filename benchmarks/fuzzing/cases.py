"""Cases: a valid command with up to four edits, drawn by Hypothesis.

Cases are drawn in batches. A batch depends only on the seed, the kind and its number, so `SEED/KIND/CASE` names a case
as long as Hypothesis and the valid inputs stay the same. The file of a kept case lists its edits, so it does not depend
on Hypothesis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from benchmarks.fuzzing.arrays import ARRAYS, names_of
from benchmarks.fuzzing.edits import ARGUMENTS, BYTES, COMMAND_LINE, FILES, PLACES, TEXT, TREE, Edit
from benchmarks.fuzzing.formats import format_of, packing_of, paths_of
from benchmarks.fuzzing.hostile import JSON, TEMPLATES

_T = TypeVar("_T")

BATCH = 100
"""Number of cases that are drawn together."""

_MOST_EDITS = 4
_TEXTS = (".json", ".jsonl", ".toml", ".txt", ".jinja", ".html", ".eml", ".mbox", ".xml", ".warc", ".wet", ".tsv")


@dataclass(frozen=True)
class Base:
    """A valid command with its files."""

    name: str
    arguments: tuple[str, ...]
    files: Mapping[str, str]
    """Source of each file or folder, in the folder of valid inputs, by its name in the case's folder."""
    damaged: tuple[str, ...] = ("**/*",)
    """Globs of the files that are damaged, in the case's folder."""
    kept: int = 0
    """Number of arguments at the start of the command that are not damaged. If 0, no argument is damaged."""
    words: tuple[str, ...] = ()
    """Arguments to insert, apart from hostile words. `--option=@name` has the hostile word `name` as its value."""
    ends_with: tuple[int, ...] = (0,)
    """Exit statuses of the undamaged command."""
    statuses: tuple[int, ...] = (0, 2, 65)
    """Exit statuses that the documentation allows for any input."""
    weight: int = 1


@dataclass(frozen=True)
class Case:
    """A damaged command."""

    kind: str
    number: int
    base: str
    edits: tuple[Edit, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values for JSON."""
        return asdict(self)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Case":
        """Read the fields that `to_json` has returned."""
        return cls(**{**fields, "edits": tuple(map(Edit.read, fields["edits"]))})

    @property
    def terminal(self) -> str:
        """Value of TERM. Half of the cases run on a terminal without colours, where any escape is a finding."""
        return "dumb" if self.number % 2 else "xterm-256color"


def draw(strategy: st.SearchStrategy[tuple[str, tuple[Edit, ...]]], seed: int, kind: str, batch: int) -> list[Case]:
    """Draw the cases of one batch."""
    drawn: list[tuple[str, tuple[Edit, ...]]] = []

    @seeded(f"{seed}/{kind}/{batch}")
    @settings(max_examples=BATCH, phases=[Phase.generate], database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def take(case: tuple[str, tuple[Edit, ...]]) -> None:
        drawn.append(case)

    take()
    return [Case(kind, batch * BATCH + i, base, edits) for i, (base, edits) in enumerate(drawn[:BATCH])]


def cases_of(bases: Sequence[Base], valid: Path) -> st.SearchStrategy[tuple[str, tuple[Edit, ...]]]:
    """Strategy of the bases' names and edits."""
    chosen = [base for base in bases for _ in range(base.weight)]
    edits = {base.name: st.lists(_edits(base, valid), min_size=1, max_size=_MOST_EDITS).map(tuple) for base in bases}
    return st.sampled_from([base.name for base in chosen]).flatmap(
        lambda name: st.tuples(st.just(name), edits[name])  # type: ignore[arg-type]
    )


def _edits(base: Base, valid: Path) -> st.SearchStrategy[Edit]:
    files = sorted(
        name for name in files_of(base, valid) if any(glob == "**/*" or Path(name).match(glob) for glob in base.damaged)
    )
    ways = []
    if base.kept:
        ways += [_arguments(base)] * (3 if files else 1)
    if files:
        ways += [st.sampled_from(files).flatmap(lambda name: _edits_of(name, files_of(base, valid)[name]))] * 3
    return _weighted(ways)


def _weighted(ways: list[st.SearchStrategy[_T]]) -> st.SearchStrategy[_T]:
    """Draw from one of the strategies. A strategy that is listed twice is twice as likely; `one_of` would
    count it once.
    """
    return st.sampled_from(ways).flatmap(lambda way: way)


def files_of(base: Base, valid: Path) -> dict[str, Path]:
    """Files of a case before any edit, by name."""
    found = {}
    for target, source in base.files.items():
        path = valid / source
        if path.is_dir():
            found |= {f"{target}/{one.relative_to(path)}": one for one in path.rglob("*") if one.is_file()}
        else:
            found[target] = path
    return found


@cache
def _edits_of(name: str, path: Path) -> st.SearchStrategy[Edit]:
    """Strategy of the edits of one file."""
    form, (packing, inner) = format_of(name), packing_of(name)
    place = st.integers(0, PLACES - 1).map(lambda number: (number,))
    bits = st.tuples(st.integers(0, PLACES - 1), st.integers(0, 7))
    file = st.just(name)
    ways = [st.builds(Edit, file, st.sampled_from(BYTES), bits)] * (16 if form is None else 4)
    if form is not None and (paths := paths_of(form.parse(packing.unpack(path.read_bytes())))):
        values = st.sampled_from(list(form.values))
        ways += [st.builds(Edit, file, st.sampled_from(TREE), st.sampled_from(paths), values)] * 32
    if inner.endswith(_TEXTS):
        values = st.sampled_from(list(form.values if form is not None else JSON))
        ways += [st.builds(Edit, file, st.sampled_from(TEXT), place, values)] * 8
    if inner.endswith(".jinja"):
        ways += [st.builds(Edit, file, st.just("template"), st.just(()), st.sampled_from(list(TEMPLATES)))] * 48
    if inner.endswith(".npz"):
        damages = st.sampled_from([*ARRAYS, "missing"])
        arrays = st.sampled_from(names_of(path.read_bytes())).map(lambda array: (array,))
        ways += [st.builds(Edit, file, st.just("array"), arrays, damages)] * 32
    if name not in ("head.txt", "body.json"):  # not files, but parts of a request
        ways += [st.builds(Edit, file, st.sampled_from(FILES))]
    return _weighted(ways)


def _arguments(base: Base) -> st.SearchStrategy[Edit]:
    from benchmarks.fuzzing.hostile import ARGUMENTS as HOSTILE

    last = max(len(base.arguments), base.kept)
    words = st.sampled_from(base.words or ("",))
    hostile = st.sampled_from(list(HOSTILE))
    valued = st.tuples(words, hostile).map(lambda pair: f"{pair[0]}=@{pair[1]}")
    value = _weighted([valued, valued, valued, words, hostile])
    action = st.sampled_from((*ARGUMENTS, "insert", "insert", "insert"))

    def edit(action: str, index: int, value: str) -> Edit:
        index = max(index, base.kept - (action == "insert"))
        return Edit(COMMAND_LINE, action, (index,), "" if action in ("remove", "repeat") else value)

    return st.builds(edit, action, st.integers(base.kept - 1, last), value)
