"""Record of the experts' loads in a run's folder (`experts.jsonl`).

A row holds the loads and the entropies of one step. A run writes about `_MOST_ROWS` rows, evenly spread over its
steps, and one of its last step. The rows do not depend on where the run was interrupted.
"""

import math
from pathlib import Path

from crosscut.config.system.row_file import Row, RowFile, read_rows
from crosscut.training.loads.step_loads import StepLoads

LOADS_FILE = "experts.jsonl"
_MOST_ROWS = 500
_LONGEST_LINE = 1 << 24
"""Maximum number of characters in a row. A model with 100 layers of 1,000 experts has rows of a million characters."""


class LoadsRecord:
    """Record of a run of `num_steps` steps, which continues from the step `start`. The file is opened with the first
    loads: a run without experts has none. All methods raise `OSError` if the file cannot be written.
    """

    def __init__(self, folder: Path, *, num_steps: int, start: int) -> None:
        self._path, self._last, self._start = folder / LOADS_FILE, num_steps, start
        self._every = -(-num_steps // _MOST_ROWS)
        self._file: RowFile | None = None

    def step(self, step: int, loads: StepLoads) -> None:
        """Record the loads of a step, if its turn has come. `step` is the number of steps done so far."""
        if self._file is None:
            file = RowFile(self._path, _is_row, longest=_LONGEST_LINE)
            file.start(self._start)
            self._file = file
        if step % self._every and step != self._last:
            return
        numbers = [[int(load) for load in of_layer] for of_layer in loads.loads.tolist()]
        entropies = [round(entropy, 6) for entropy in loads.entropies.tolist()]
        self._file.append(
            {
                "step": step,
                "loads": dict(zip(loads.names, numbers, strict=True)),
                "entropy": dict(zip(loads.names, entropies, strict=True)),
            }
        )

    def rewind(self, step: int) -> None:
        """Remove the rows of the steps after `step`."""
        if self._file is not None:
            self._file.rewind(step)
        self._start = min(self._start, step)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_loads(folder: Path) -> list[Row]:
    """Read the rows of a run's `experts.jsonl` (`row_file.read_rows`), sorted by their steps. Rows of another shape
    than the last one are left out.
    """
    rows = read_rows(folder / LOADS_FILE, _is_row, longest=_LONGEST_LINE)
    return sorted((row for row in rows if _shape(row) == _shape(rows[-1])), key=lambda row: int(row["step"]))


def _shape(row: Row) -> dict[str, int]:
    return {name: len(loads) for name, loads in row["loads"].items()}


def _is_row(row: Row) -> bool:
    loads, entropies = row.get("loads"), row.get("entropy")
    return (
        isinstance(loads, dict)
        and isinstance(entropies, dict)
        and bool(loads)
        and loads.keys() == entropies.keys()
        and all(isinstance(of, list) and of and all(map(_is_count, of)) for of in loads.values())
        and all(isinstance(entropy, int | float) and math.isfinite(entropy) for entropy in entropies.values())
    )


def _is_count(load: object) -> bool:
    return type(load) is int and 0 <= load < 1 << 53
