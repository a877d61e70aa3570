"""Start and end of the ranks of a run: starting or joining processes, signals, and settings of the memory allocator."""

from crosscut.launch.door import Done, Ranks, in_ranks
from crosscut.launch.processes import launch, process_group
from crosscut.launch.stopping import Stopped, StopRequest

__all__ = ["Done", "Ranks", "StopRequest", "Stopped", "in_ranks", "launch", "process_group"]
