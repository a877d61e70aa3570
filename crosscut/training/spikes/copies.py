"""Copies of a run's state in host memory. After a loss spike, the run rolls back to one of these copies.

Each rank copies its own parts of the parameters, of the optimizer's state, of the loss scale and of the moving average.
Two copies are kept, because the newest copy may already be damaged: a spike is found a few steps after its cause.
Random streams need no copy, because dropout is a function of the seed and the step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crosscut.checkpoint.saving.staging import HostBuffers, computed
from crosscut.config.system.machine import available_memory
from crosscut.launch.processes import ranks_on_this_machine
from crosscut.parallel import reshard
from crosscut.parallel.state.parameters import local_part
from crosscut.training.step import Trainer

NUM_COPIES = 2

MOST_MEMORY = 0.25
"""Largest share of the machine's memory for the copies of all ranks on the machine."""

FEWEST_STEPS, MOST_STEPS = 10, 100
"""Minimum and maximum number of steps between copies."""


def steps_between_copies(num_steps: int) -> int:
    """Return the number of steps between copies in a run of `num_steps` steps: 0.5% of the steps, but at least 10 and
    at most 100.
    """
    return min(max(num_steps // 200, FEWEST_STEPS), MOST_STEPS)


@dataclass
class _Copy:
    step: int
    """Number of steps done at the time of the copy; -1 for a copy that must not be used."""
    buffers: HostBuffers
    tensors: dict[str, Tensor]
    average_has_begun: bool


class StateCopies:
    """Copies of one rank's state. Every rank calls the same methods in the same order, so all ranks hold copies of the
    same steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._copies = [_Copy(-1, HostBuffers(), {}, False) for _ in range(NUM_COPIES)]

    @property
    def steps(self) -> list[int]:
        """Number of steps done in each copy, in ascending order."""
        return sorted(copy.step for copy in self._copies if copy.step >= 0)

    @property
    def num_bytes(self) -> int:
        """Bytes that all copies of this rank take."""
        return NUM_COPIES * sum(local_part(t).numel() * t.element_size() for t in self._live().values())

    def fit(self) -> bool:
        """Whether the copies of all ranks on this machine fit into `MOST_MEMORY` of the machine's memory."""
        world_size = self.trainer.run.layout.world_size
        return self.num_bytes * ranks_on_this_machine(world_size) <= MOST_MEMORY * available_memory()

    def keep(self, step: int) -> None:
        """Copy the state after `step` steps, in place of the oldest copy. Waits for the copy."""
        oldest = min(self._copies, key=lambda copy: copy.step)
        oldest.step = -1
        oldest.tensors = oldest.buffers.copy(self._live(), computed(self.trainer.mesh.device))
        oldest.average_has_begun = self.trainer.average is not None and self.trainer.average.has_begun
        oldest.step = step

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Restore the state after `step` steps, and drop all later copies. There must be a copy of this state."""
        copy = next(copy for copy in self._copies if copy.step == step)
        reshard(self.trainer.model)  # gathered copies hold the later values
        for name, tensor in self._live().items():
            local_part(tensor).copy_(copy.tensors[name])
        if self.trainer.average is not None:
            self.trainer.average.has_begun = copy.average_has_begun
        for later in self._copies:
            if later.step > step:
                later.step = -1

    def _live(self) -> dict[str, Tensor]:
        """Return the tensors of the state by name. They are the tensors that training updates, not copies."""
        trainer = self.trainer
        trainer.optimizer.prepare()  # before the first step, the optimizer has no state yet
        state: dict[str, Tensor] = dict(trainer.model.named_parameters())
        for number, parameter in enumerate(trainer.parameters):
            entries = trainer.optimizer.state[parameter].items()
            state.update({f"optimizer.{number}.{name}": tensor for name, tensor in entries})
        for group, tensors in trainer.more_state.items():
            state.update({f"{group}.{name}": tensor for name, tensor in tensors.items()})
        return {name: tensor.detach() for name, tensor in state.items()}
