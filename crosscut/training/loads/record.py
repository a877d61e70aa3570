"""Record of the experts' loads in a run's folder (`experts.jsonl`).

A row holds the loads and the entropies of one step. A run writes about `_MOST_ROWS` rows, evenly spread over its
steps, and one of its last step. The rows do not depend on where the run was interrupted.
"""

from pathlib import Path

from crosscut.logbook.rows import RowFile
from crosscut.logbook.schema import LOADS_FILE
from crosscut.training.loads.step_loads import StepLoads

_MOST_ROWS = 500


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
            file = RowFile(self._path)
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
