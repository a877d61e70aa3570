"""Scalars for TensorBoard, written in its file format.

TensorBoard's own writer, which PyTorch also uses, writes in a thread. If the disk is full or the run's folder is gone,
that thread prints a traceback and ends, and the training cannot react. `Board` writes the same records directly, so a
failed write raises `OSError` in the caller.
"""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from crosscut.config.system.deletion import enter_folder

_PREFIX = "events.out.tfevents."


class Board:
    """Event file in `folder`. If older files in the folder hold scalars of step `first_step` or later, TensorBoard
    ignores these scalars.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        enter_folder(folder.parent, folder.name)
        name = f"{_PREFIX}{_begin(folder):010d}.{socket.gethostname()}.{os.getpid()}"
        # Unbuffered, so that a failed record is not written later.
        self._file = (folder / name).open("xb", buffering=0)
        self._write(step=first_step, file_version="brain.Event:2")
        self.restart(first_step)

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars. They are in the file when the call returns."""
        for name, value in values.items():
            self._write(step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)]))

    def restart(self, first_step: int) -> None:
        """Make TensorBoard ignore the scalars that the file already holds for step `first_step` and for later steps."""
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **fields: object) -> None:
        """Write one record. If a record does not fit on the disk, no part of it is left in the file, so that later
        records can be read.
        """
        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        start, left = self._file.tell(), record.getvalue()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.seek(start)
            self._file.truncate()
            raise


def _begin(folder: Path) -> int:
    """Return the time for the name of a new event file, in seconds. TensorBoard reads the files in the order of their
    names, so the time is later than the times in the names of all existing files, even if the clock has been set back.
    """
    times = (path.name.removeprefix(_PREFIX).partition(".")[0] for path in folder.glob(f"{_PREFIX}*"))
    return max([int(time.time()), *(int(text) + 1 for text in times if text.isdecimal() and len(text) <= 10)])
