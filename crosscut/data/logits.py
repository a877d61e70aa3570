"""Store of a teacher's logits: for each token of a run's samples, the logits of its k likeliest successors.

A teacher's logits for a token depend on all tokens that the token attends to, and every epoch cuts the documents into
other samples. The key of a row is therefore the position of the token in the order of the samples, which depends only
on the data and on settings of the run, and not on a layout. `cache.json` names everything on which the logits depend.

The rows are in parts, files of equally many samples; the last part may be shorter. A part is written atomically, and
after it a small file with its number of samples and its hash. A process that is killed leaves only whole parts.

Legend: S tokens of a sample, k likeliest tokens.
"""

import hashlib
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import ConfigError, DamagedDataError, DataError
from crosscut.config.system.deletion import remove_made
from crosscut.config.system.files import json_or_none, read_json, write_json, write_whole
from crosscut.config.system.folder_lock import LOCK_FILE
from crosscut.config.system.records import Count, from_json
from crosscut.data.folders import is_taken
from crosscut.data.hashing import sha256_of_all
from crosscut.data.shards.array_file import ArrayFile

MANIFEST = "cache.json"
_FORMAT = 1
_MOST_TOKENS, _MOST_BYTES = 1 << 16, 1 << 26
"""Maximum number of tokens and of bytes of a part, if a sample is not larger. A killed command loses one part."""
_AGAIN = "Run `crosscut prepare teacher` with the file of the run."

_UNFINISHED = re.compile(r"\.(logits-\d{5,}\.(rows|json)|cache\.json)\.[0-9a-f]{8}")
"""Names of the temporary files of `write_whole`."""

Rows: TypeAlias = npt.NDArray[np.void]


@dataclass(frozen=True, kw_only=True)
class LogitForm:
    """Form of a store, and everything on which its logits depend."""

    k: Count
    """Number of tokens whose logits are known."""
    vocab_size: Count
    precision: str
    """Element type of the logits: `float32`, `bfloat16`, `float16` or `float64`."""
    length: Count
    """Number S of tokens of a sample."""
    depends_on: dict[str, str] = field(default_factory=dict)
    """Values on which the logits depend, as JSON, by the names of their settings."""
    part_samples: Count = 0
    """Number of samples of a whole part. 0 means the default."""
    format: Count = _FORMAT

    def __post_init__(self) -> None:
        if not self.part_samples:
            own = max(1, min(_MOST_TOKENS // self.length, _MOST_BYTES // self.sample_bytes))
            object.__setattr__(self, "part_samples", own)

    @property
    def row(self) -> np.dtype[np.void]:
        """Type of the row of a token. The logit of the rest is only one number, so it is never narrow."""
        ids = "<u2" if self.vocab_size <= 1 << 16 else "<u4"
        logits = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[self.precision]
        rest = "<f8" if self.precision == "float64" else "<f4"
        return np.dtype([("ids", ids, (self.k,)), ("logits", logits, (self.k,)), ("rest", rest)])

    @property
    def sample_bytes(self) -> int:
        """Number of bytes of a sample."""
        return self.length * self.row.itemsize

    def differences(self, wanted: "LogitForm") -> Iterator[str]:
        """Describe the differences of this form from the one that a run wants."""
        for name, ours in wanted.depends_on.items():
            if (theirs := self.depends_on.get(name, "unknown")) != ours:
                yield f"`{name}` {theirs} instead of {ours}"


class _Part(NamedTuple):
    """Description of a part that is whole."""

    samples: Count
    sha256: str


@dataclass(frozen=True, eq=False)
class LogitStore:
    """Store of logits in a folder."""

    folder: Path
    form: LogitForm
    _opened: dict[int, ArrayFile] = field(default_factory=dict)
    """The part from which rows were read last."""

    @classmethod
    def open(cls, folder: Path, *, remedy: str = _AGAIN) -> Self:
        """Open a store. Raises `ConfigError` if there is none, `DamagedDataError` if `cache.json` is damaged, and
        `DataError` if it has another format. `remedy` ends the messages about the last two.
        """
        if not (folder / MANIFEST).is_file():
            raise ConfigError(
                f"`teacher.cache` must name a folder with stored logits, but `{folder}` has no `{MANIFEST}`. {_AGAIN}"
            )
        table = read_json(folder / MANIFEST, DataError, invalid=DamagedDataError, remedy=remedy)
        try:
            form = from_json(LogitForm, table)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise DamagedDataError(
                f"`{folder / MANIFEST}` must describe stored logits, but does not: {error}. {remedy}"
            ) from None
        if form.format != _FORMAT:
            raise DataError(f"`{folder / MANIFEST}` must have the format {_FORMAT}, but has {form.format}. {remedy}")
        return cls(folder, form)

    @classmethod
    def find(cls, folder: Path, form: LogitForm) -> Self:
        """Open a store with this form, or return a new one, which `begin` makes. Raises `ConfigError` for a folder with
        other content, and the errors of `open`.
        """
        is_there = (folder / MANIFEST).is_file()
        if not is_there and is_taken(folder) and not all(_is_own(path) for path in folder.iterdir()):
            raise ConfigError(
                f"`teacher.cache` must be an empty folder or one with stored logits, but `{folder}` has no "
                f"`{MANIFEST}`. Choose another folder."
            )
        remedy = "Delete the folder with its logits, or choose another `teacher.cache`."
        store = cls.open(folder, remedy=remedy) if is_there else cls(folder, form)
        store.require(form)
        return store

    def begin(self) -> None:
        """Make the store if it is new, and remove the files that a killed process left unfinished. Call this method
        only while no other process writes to the store. Raises `OSError` if the disk is full.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.iterdir():
            if _UNFINISHED.fullmatch(left.name) and stat.S_ISREG(left.lstat().st_mode):
                remove_made(left)
        if not (self.folder / MANIFEST).is_file():
            write_json(self.folder / MANIFEST, self.form)

    def require(self, form: LogitForm) -> None:
        """Raise `ConfigError` unless the logits are those that a run with this form needs."""
        if differences := list(self.form.differences(form)):
            raise ConfigError(
                f"`teacher.cache` must hold the logits of this run's data and teacher, but `{self.folder}` was made "
                f"with {', '.join(differences)}. Choose another folder, or change these settings."
            )

    def require_samples(self, number: int, *, verify: bool) -> None:
        """Raise an error unless the store holds the first `number` samples: `ConfigError` if they are not written yet,
        and `DamagedDataError` if a file is missing or has another length or, with `verify`, another hash.
        """
        parts: dict[int, _Part] = {}
        held = 0
        for part in range(-(-number // self.form.part_samples)):
            found = self._described(part)
            if found is None or held % self.form.part_samples:
                break
            parts[part] = found
            held += found.samples
        if held < number:
            raise ConfigError(
                f"`teacher.cache` must hold the logits of {number:,} sequences, which the run reads or leaves out, but "
                f"`{self.folder}` holds those of {held:,}: {number - held:,} are missing. {_AGAIN}"
            )
        for part, found in parts.items():
            path, length = self._path(part), found.samples * self.form.sample_bytes
            actual = path.stat().st_size if path.is_file() else None
            if actual != length:
                told = "missing" if actual is None else f"{actual:,} bytes long"
                raise DamagedDataError(f"`{path}` must be {length:,} bytes long, but is {told}. {_AGAIN}")
        if verify:
            self._check(parts)

    def _check(self, parts: dict[int, _Part]) -> None:
        actual = sha256_of_all([self._path(part) for part in parts], description=f"check {self.folder}")
        for part, found in zip(parts, actual, strict=True):
            if found != parts[part].sha256:
                raise DamagedDataError(
                    f"`{self._path(part)}` must have the SHA-256 {parts[part].sha256[:12]}..., but has "
                    f"{found[:12]}.... The file was changed or damaged. Delete it. {_AGAIN}"
                )

    def missing(self, number: int) -> list[range]:
        """Return the samples of each part that is not whole, of the first `number` samples."""
        size, found = self.form.part_samples, []
        for part, first in enumerate(range(0, number, size)):
            wanted = range(first, min(first + size, number))
            if self._whole(part) < len(wanted):
                found.append(wanted)
        return found

    def _whole(self, part: int) -> int:
        """Number of samples of a part. 0 if it is not whole."""
        described, path = self._described(part), self._path(part)
        length = path.stat().st_size if path.is_file() else -1
        return described.samples if described and length == described.samples * self.form.sample_bytes else 0

    def write(self, samples: range, rows: Rows) -> None:
        """Write the rows [samples, S] of the part that holds these samples. Raises `OSError` if the disk is full."""
        part = samples.start // self.form.part_samples
        path = self._path(part)
        if not self._whole(part):  # a whole one may be in use by a run with fewer steps
            remove_made(path.with_suffix(".json"))
        write_whole(path, data := np.ascontiguousarray(rows).tobytes())
        write_json(path.with_suffix(".json"), _Part(len(samples), hashlib.sha256(data).hexdigest())._asdict())

    def read(self, first: int, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.floating]]:
        """Return the ids [count, S, k] of the likeliest tokens of consecutive samples, and the logits of these tokens
        and of the rest [count, S, k + 1], in float32 or float64. Raises `DataError` for samples that are not stored.
        """
        size, pieces = self.form.part_samples, []
        while count:
            part, place = divmod(first, size)
            taken = min(count, size - place)
            pieces.append(
                self._file(part, place + taken)[place * self.form.length : (place + taken) * self.form.length]
            )
            first, count = first + taken, count - taken
        rows = np.concatenate(pieces).reshape(-1, self.form.length)
        logits = rows["logits"]
        if self.form.precision == "bfloat16":
            logits = (logits.astype(np.uint32) << 16).view(np.float32)
        rest = rows["rest"]
        return rows["ids"].astype(np.int32), np.concatenate([logits.astype(rest.dtype), rest[..., None]], -1)

    def _file(self, part: int, samples: int) -> ArrayFile:
        """Open a part that must have at least so many samples."""
        held = self._opened.get(part)  # another thread may open another part in the meantime
        if held is None:
            found = self._described(part)
            held = ArrayFile(self._path(part), self.form.row, found.samples * self.form.length if found else 0)
            self._opened.clear()
            self._opened[part] = held
        if len(held) < samples * self.form.length:
            raise DataError(
                f"`teacher.cache` must hold the logits of sequence {part * self.form.part_samples + samples:,} of the "
                f"run, but `{self.folder}` does not. The run may have left out sequences after a spike. {_AGAIN} Then "
                "resume the run."
            )
        return held

    def _described(self, part: int) -> _Part | None:
        """Description of a part. None if the part is not whole."""
        try:
            return from_json(_Part, json_or_none(self._path(part).with_suffix(".json")))
        except ValueError:
            return None

    def _path(self, part: int) -> Path:
        return self.folder / f"logits-{part:05}.rows"


def _is_own(path: Path) -> bool:
    """Whether a file may be in the folder of a store that is not begun: the lock, or what a killed process left."""
    return path.name == LOCK_FILE or bool(_UNFINISHED.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode))
