"""Messages about a write that fails in the middle of a file."""

import errno
import io
from typing import Any

import pytest
import torch

from crosscut.checkpoint.format.tensor_file import Form, file_header, tensor_bytes
from crosscut.checkpoint.saving.writer import _HashingStream
from crosscut.checkpoint.storage import reason


class Full(io.RawIOBase):
    """A disk with so much room."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.taken = room, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.taken

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.taken + size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.taken += size
        return size


@pytest.mark.parametrize("room", range(0, 4001, 400))
def test_failed_write_is_told_by_its_cause_wherever_it_fails(room: int) -> None:
    with pytest.raises(OSError) as failed:
        stream = _HashingStream(Full(room))
        stream.write(file_header({"zeros": Form((1000,), torch.float32)}))
        stream.write(tensor_bytes(torch.zeros(1000)))
    assert reason(failed.value) == "No space left on device"
