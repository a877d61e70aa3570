"""Offload of activations: tensors that autograd saves for the backward pass are held in host memory.

On a GPU, the copies run on streams of their own and overlap with the layers. Copies to the host run during the forward
pass. The backward pass needs the tensors in reverse order. While the backward pass uses one tensor, the tensor that it
needs next is copied back. On the CPU, tensors are copied without overlap.

The host queues work long before the device runs it, so events on the device limit how far the copies run ahead. Before
a layer runs, the copies to the host must have finished, except for the newest `_NUM_LEAVING` copies. A copy back may
reuse the memory of a layer that ran before, so it starts only after that layer has finished.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_NUM_LEAVING = 2
"""Number of tensors that may still be on their way to the host: the tensor of the running layer, and one more, so that
one slow copy does not delay the layers.
"""


@dataclass(eq=False)
class _WaitingCopy:
    """Offloaded tensor."""

    host: Tensor
    before: "ReferenceType[_WaitingCopy] | None"
    """Tensor that was offloaded just before this tensor. The backward pass needs it just after this tensor."""
    is_out: torch.cuda.Event | None = None
    """Event at the end of the copy to the host."""
    device: Tensor | None = None
    """Copy of the tensor on the device, once the copy back has started."""
    is_back: torch.cuda.Event | None = None
    """Event at the end of the copy back."""
    is_used: bool = False
    """Whether the backward pass has used the tensor."""


class HostActivations:
    """Offload of the tensors that autograd saves on one device. The tensors are copied to host memory, and copied back
    in reverse order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if self._is_cuda else None
        self._back = torch.cuda.Stream(device) if self._is_cuda else None
        self._last: ReferenceType[_WaitingCopy] | None = None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        """Tensors that are being copied to the host. Each tensor is held until the event at the end of its copy."""

    def instead_of_device(self) -> AbstractContextManager[None]:
        """Return a context in which autograd saves its tensors in host memory."""
        return saved_tensors_hooks(self._put, self._get)

    def _put(self, tensor: Tensor) -> _WaitingCopy | Tensor:
        if tensor.device.type != self.device.type or not tensor.numel():  # empty: a marker of PyTorch
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._is_cuda)
        waiting = _WaitingCopy(host, self._last)
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self.device))  # wait until the tensor is computed
        with self._on(self._out):
            host.copy_(tensor, non_blocking=self._is_cuda)
        if self._out is not None:
            waiting.is_out = self._out.record_event()
            self._leaving.append((tensor, waiting.is_out))
            self._let_go(_NUM_LEAVING)
        self._last = ref(waiting)
        return waiting

    def _get(self, waiting: _WaitingCopy | Tensor) -> Tensor:
        if isinstance(waiting, Tensor):
            return waiting
        self._let_go(0)
        self._fetch(waiting)
        tensor = waiting.device
        assert tensor is not None
        if waiting.is_back is not None:
            torch.cuda.current_stream(self.device).wait_event(waiting.is_back)
        waiting.device = waiting.is_back = None
        waiting.is_used = True
        before = waiting.before() if waiting.before is not None else None
        if before is not None and not before.is_used:  # a used tensor is of an earlier forward pass
            self._fetch(before)
        return tensor

    # Reuse of memory, without `record_stream`, which would keep blocks occupied for as long as the host runs ahead:
    # - A tensor on its way out was allocated on the layers' stream. That stream may reuse its memory once it has waited
    #   for the copy.
    # - A tensor that comes back is allocated on the copy-back stream and used by the layers' stream. The host frees it
    #   once all work that uses it is queued. Only the next copy back can get its memory, and that copy waits for all
    #   work queued until then. So copies run at most one layer ahead. The same holds for a copy that nobody uses.

    def _let_go(self, num_left: int) -> None:
        """Free all tensors that are being copied to the host, except the last `num_left`. The layers' stream first
        waits for the copies of the freed tensors.
        """
        while len(self._leaving) > num_left:
            _, is_out = self._leaving.popleft()
            torch.cuda.current_stream(self.device).wait_event(is_out)

    def _fetch(self, waiting: _WaitingCopy) -> None:
        """Start the copy back to the device, unless it has started."""
        if waiting.device is not None:
            return
        if self._back is not None and waiting.is_out is not None:
            self._back.wait_event(waiting.is_out)
            self._back.wait_stream(torch.cuda.current_stream(self.device))
        with self._on(self._back):
            waiting.device = torch.empty_like(waiting.host, device=self.device, pin_memory=False)
            waiting.device.copy_(waiting.host, non_blocking=self._is_cuda)
            waiting.is_back = None if self._back is None else self._back.record_event()

    @staticmethod
    def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)
