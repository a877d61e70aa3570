"""Compare two checkpoints: their tensors, other stored values, and the settings of the runs that wrote the checkpoints.

Only one tensor of each checkpoint is in memory at a time. The layouts may differ, because each tensor is assembled from
its shards before the comparison. If two vocabularies are padded to different sizes, only the rows without padding are
compared.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from crosscut.checkpoint.damage import require_undamaged
from crosscut.checkpoint.format.manifest import Manifest
from crosscut.checkpoint.storage import Folder
from crosscut.checkpoint.stored import StoredTensors
from crosscut.config.conventions import VOCABULARY_MULTIPLE

Differences = dict[str, tuple[object, object]]
"""Values that differ, by name: the value of the first and of the second checkpoint. None stands for a missing value."""


@dataclass(frozen=True)
class TensorDifference:
    """Difference between a tensor `a` of the first checkpoint and the tensor `b` of the same name in the second
    checkpoint.
    """

    name: str
    largest: float | None = None
    """Largest absolute difference |a - b| of an element. None if a and b cannot be compared."""
    relative: float | None = None
    """Relative difference |a - b| / |a| over all elements, in the Euclidean norm. None if a and b cannot be
    compared."""
    note: str = ""
    """Reason why a and b cannot be compared, or the rows to which the comparison is limited."""

    @property
    def same(self) -> bool:
        """Whether all elements of a and b are equal as numbers. 0 equals -0, but NaN and infinity do not equal
        anything.
        """
        return self.largest == 0


@dataclass(frozen=True)
class Comparison:
    """Differences between two checkpoints."""

    tensors: list[TensorDifference]
    values: Differences
    """Stored values that differ and are not tensors, such as learning rates."""
    settings: Differences
    """Settings and progress that differ between the two runs, by dotted name."""

    @property
    def same(self) -> bool:
        """Whether all tensors and values are equal. The settings of the runs may differ."""
        return not self.values and all(tensor.same for tensor in self.tensors)


def compare(first: Folder, second: Folder, *, advance: Callable[[str], None] = lambda _: None) -> Comparison:
    """Compare two complete checkpoints. `advance` is called with the name of each tensor before the tensor is compared.

    Raises `CheckpointError` if one of the checkpoints is damaged.
    """
    ours, theirs = require_undamaged(first, progress=True), require_undamaged(second, progress=True)
    a, b = StoredTensors(first), StoredTensors(second)
    real_rows = _vocab_size(ours)
    differences = []
    for name in sorted({*a.tensors, *b.tensors}):
        advance(name)
        differences.append(_compare_tensor(name, a, b, real_rows))
    return Comparison(differences, _differences(a.values, b.values), _differences(_settings(ours), _settings(theirs)))


def _vocab_size(manifest: Manifest) -> int:
    """Return the vocabulary size, which is the number of rows of a padded tensor without its padding. Return 0 if the
    checkpoint does not state the size.
    """
    model = manifest.progress.config.get("model")
    size = model.get("vocab_size") if isinstance(model, dict) else None
    return size if type(size) is int and size > 0 else 0


def _compare_tensor(name: str, a: StoredTensors, b: StoredTensors, real_rows: int) -> TensorDifference:
    for where, stored in (("first", a), ("second", b)):
        if name not in stored.tensors:
            return TensorDifference(name, note=f"missing in the {where}")
    shapes = a.tensors[name].shape, b.tensors[name].shape
    note, rows = "", None
    if shapes[0] != shapes[1]:
        if not _differ_in_padding(*shapes, real_rows):
            return TensorDifference(name, note=f"shape {list(shapes[0])} and {list(shapes[1])}")
        rows = real_rows
        note = f"compared only the {real_rows} rows without padding, of {shapes[0][0]} and {shapes[1][0]}"
    ours, theirs = a.read(name), b.read(name)
    if rows is not None:
        ours, theirs = ours[:rows], theirs[:rows]
    return TensorDifference(name, *_distance(ours, theirs), note=note)


def _differ_in_padding(one: tuple[int, ...], other: tuple[int, ...], real_rows: int) -> bool:
    """Whether two shapes belong to the same vocabulary, padded for two different tensor-parallel sizes."""
    return (
        bool(one and other and real_rows)
        and one[1:] == other[1:]
        and min(one[0], other[0]) >= real_rows
        and not one[0] % VOCABULARY_MULTIPLE
        and not other[0] % VOCABULARY_MULTIPLE
    )


def _distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    a, b = a.double(), b.double()
    difference = a - b
    size, norm = float(a.norm()), float(difference.norm())
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    return largest, norm / size if size else (0.0 if norm == 0 else float("inf"))


def _settings(manifest: Manifest) -> dict[str, object]:
    """Return the settings and the progress of the run that wrote a checkpoint, by dotted name."""
    progress = manifest.progress
    other = {name: value for name, value in progress.identity.items() if name.partition(".")[0] not in progress.config}
    known = {"step": progress.step, "samples": progress.samples, "seed": progress.seed, **other}
    return dict(_flat({**progress.config, **known, "versions": manifest.versions}))


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _differences(a: Mapping[str, object], b: Mapping[str, object]) -> Differences:
    return {name: (a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)}
