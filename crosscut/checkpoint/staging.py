"""A consistent copy of the state in host memory, made while the training goes on.

Between two optimizer steps parameters and optimizer state only get read. So a step need not stand still while they are
copied: the copy runs in another thread beside the next forward and backward pass, and only the next optimizer step
waits for its end (a hook on the optimizer sees to that). The buffers are kept for the next time.
"""

import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from crosscut.parallel.state.parameters import local_part


class HostBuffers:
    """This rank's parts of the state in host memory, by name; made at the first copy and used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor], ready: "torch.cuda.Event | None") -> dict[str, Tensor]:
        """Copy this rank's part of each tensor; the copies are complete on return, and change with the next call.

        `ready` tells when a CUDA device has computed the tensors; they are copied beside what it does next.
        """
        if ready is None:
            return {name: self._copy(name, local_part(tensor)) for name, tensor in tensors.items()}
        if not all(local_part(tensor).is_cuda for tensor in tensors.values()):
            ready.synchronize()  # a host that copies host memory does not wait for a device that writes to it
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
            # Pinned memory is what a device copies to at full speed, and without waiting.
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(source.detach(), non_blocking=True)
        return buffer


def computed(device: torch.device) -> "torch.cuda.Event | None":
    """An event that a CUDA device reaches when it has done all that it was given so far; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class CopyGuard:
    """Holds an optimizer's steps, and only these, while its state is being copied."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._done = threading.Event()
        self._done.set()
        self.seconds_held = 0.0
        """Seconds that steps have waited in all."""
        self._hook = optimizer.register_step_pre_hook(lambda *_: self.wait())

    def begin(self) -> None:
        """From now on steps wait."""
        self._done.clear()

    def end(self) -> None:
        """The copy is complete, or failed."""
        self._done.set()

    def wait(self) -> None:
        """Return when nothing is being copied."""
        if not self._done.is_set():
            start = time.perf_counter()
            self._done.wait()
            self.seconds_held += time.perf_counter() - start

    def remove(self) -> None:
        """Take the hook off the optimizer."""
        self._hook.remove()
