"""Make consistent copies of the state in host memory while training continues.

Between two optimizer steps, parameters and optimizer state are only read. Training therefore need not stop for the
copy. The copy runs in another thread and overlaps with the next forward and backward pass, and only the next optimizer
step waits for the copy, through a hook on the optimizer. The buffers are reused for the next copy.
"""

import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from crosscut.parallel.state.parameters import local_part


class HostBuffers:
    """Buffers in host memory for this rank's parts of the state, by name. The buffers are allocated at the first copy
    and then reused.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor], ready: "torch.cuda.Event | None") -> dict[str, Tensor]:
        """Copy this rank's part of each tensor to host memory, and return the copies by name. The copies are complete
        on return, and the next call overwrites them.

        `ready` is the CUDA event that occurs once the tensors are computed, or None on the CPU. The copy overlaps with
        work that the device does after this event.
        """
        if ready is None:
            return {name: self._copy(name, local_part(tensor)) for name, tensor in tensors.items()}
        if not all(local_part(tensor).is_cuda for tensor in tensors.values()):
            ready.synchronize()  # the host must wait explicitly for a device that writes to host memory
        with torch.cuda.device(ready.device):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                copies = {name: self._copy(name, local_part(tensor)) for name, tensor in tensors.items()}
            stream.synchronize()
        return copies

    def _copy(self, name: str, source: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            # A device copies to pinned memory at full speed and asynchronously.
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(source.detach(), non_blocking=True)
        return buffer


def computed(device: torch.device) -> "torch.cuda.Event | None":
    """Record a CUDA event after all work that is queued on the device's current stream, and return the event. Returns
    None on the CPU.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class CopyGuard:
    """Guard that delays the steps of an optimizer while the optimizer's state is being copied."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._done = threading.Event()
        self._done.set()
        self.seconds_held = 0.0
        """Total number of seconds that optimizer steps have waited for copies."""
        self._hook = optimizer.register_step_pre_hook(lambda *_: self.wait())

    def begin(self) -> None:
        """Delay optimizer steps until `end` is called."""
        self._done.clear()

    def end(self) -> None:
        """Stop delaying optimizer steps. Call this method when the copy is complete or has failed."""
        self._done.set()

    def wait(self) -> None:
        """Wait until no copy is in progress."""
        if not self._done.is_set():
            start = time.perf_counter()
            self._done.wait()
            self.seconds_held += time.perf_counter() - start

    def remove(self) -> None:
        """Remove the hook from the optimizer."""
        self._hook.remove()
