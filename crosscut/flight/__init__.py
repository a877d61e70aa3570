"""Flight recorder: each rank records its recent messages and its position in the program. The record is a small block
of shared memory, which other processes can read while the rank hangs.

The module `record` has the writer, `reading` reads the records of a run, `analysis` finds the ranks that block all
others, `traces` has the collectives of PyTorch's own Flight Recorder, and `report` writes the report about a hang. The
package imports only the standard library, so `crosscut doctor` starts at once.
"""

from crosscut.flight.record import RECORD, MessageKind, ModelPart, RunPhase

__all__ = ["RECORD", "MessageKind", "ModelPart", "RunPhase"]
