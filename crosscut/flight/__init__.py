"""Flight recorder: what each rank sends and does, in a small memory that other processes can read while the rank hangs.

The module `record` has the writer, `reading` reads the records of a run, `analysis` finds the ranks that block all
others, `traces` has the collectives of PyTorch's own Flight Recorder, and `report` describes everything. Only the
standard library is needed, so `crosscut doctor` starts at once.
"""

from crosscut.flight.record import RECORD, Kind, Part, Phase

__all__ = ["RECORD", "Kind", "Part", "Phase"]
