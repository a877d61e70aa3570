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
    """Record of a run of `num_steps` steps, which continues from the step `start`. A run without experts writes no
    file. All methods raise `OSError` if the file cannot be written.
    """

    def __init__(self, folder: Path, *, num_steps: int, start: int) -> None:
        self._last = num_steps
        self._every = -(-num_steps // _MOST_ROWS)
        self.file = RowFile(folder / LOADS_FILE, begin=start)

    def step(self, step: int, loads: StepLoads) -> None:
        """Record the loads of a step, if its turn has come. `step` is the number of steps done so far."""
        if step % self._every and step != self._last:
            return
        numbers = [[int(load) for load in of_layer] for of_layer in loads.loads.tolist()]
        entropies = [round(entropy, 6) for entropy in loads.entropies.tolist()]
        self.file.append(
            {
                "step": step,
                "loads": dict(zip(loads.names, numbers, strict=True)),
                "entropy": dict(zip(loads.names, entropies, strict=True)),
            }
        )
