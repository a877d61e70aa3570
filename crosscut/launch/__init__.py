"""Start and end of a run's ranks: this package starts or joins the processes, handles signals and configures the
allocator.
"""

from crosscut.launch.door import Done, Ranks, in_ranks
from crosscut.launch.processes import launch, process_group
from crosscut.launch.stopping import Stopped, StopRequest

__all__ = ["Done", "Ranks", "StopRequest", "Stopped", "in_ranks", "launch", "process_group"]
