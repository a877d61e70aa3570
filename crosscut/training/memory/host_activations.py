"""Activations that autograd keeps for the backward pass, held in host memory.

On a GPU the copies run on streams of their own, beside the layers: out while the forward pass goes on, and back one
tensor ahead of the backward pass, which needs them in the opposite order. On the CPU both are plain copies.

Both directions are bounded in the device's own time, for the host gives out work long before it is done: a layer waits
until the inputs of all layers but the last `_NUM_LEAVING` are out, and no copy back begins before the layer is done
whose memory it may take.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_NUM_LEAVING = 2
"""Tensors that may still be on their way out: the one of the layer that runs, and one more for an uneven bus."""


@dataclass(eq=False)
class _Waiting:
    """A tensor in host memory."""

    host: Tensor
    before: "ReferenceType[_Waiting] | None"
    """The tensor that was put away before this one; the backward pass needs it after this one."""
    is_out: torch.cuda.Event | None = None
    """Event at the end of the copy to the host."""
    device: Tensor | None = None
    """The copy back, once it has begun."""
    is_back: torch.cuda.Event | None = None
    """Event at the end of the copy back."""
    is_used: bool = False
    """Whether the backward pass has taken the tensor."""


class HostActivations:
    """Keeps tensors of one device in host memory, in the order of a forward pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if self._is_cuda else None
        self._back = torch.cuda.Stream(device) if self._is_cuda else None
        self._last: ReferenceType[_Waiting] | None = None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        """Tensors on their way to the host, each held until the event that marks the end of its copy."""

    def instead_of_device(self) -> AbstractContextManager[None]:
        """Context in which autograd saves its tensors in host memory."""
        return saved_tensors_hooks(self._put, self._get)

    def _put(self, tensor: Tensor) -> _Waiting | Tensor:
        if tensor.device.type != self.device.type or not tensor.numel():  # such as PyTorch's own marks
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._is_cuda)
        waiting = _Waiting(host, self._last)
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self.device))  # until it is computed
        with self._on(self._out):
            host.copy_(tensor, non_blocking=self._is_cuda)
        if self._out is not None:
            waiting.is_out = self._out.record_event()
            self._leaving.append((tensor, waiting.is_out))
            self._let_go(_NUM_LEAVING)
        self._last = ref(waiting)
        return waiting

    def _get(self, waiting: _Waiting | Tensor) -> Tensor:
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
        if before is not None and not before.is_used:  # else it is of an earlier forward pass
            self._fetch(before)
        return tensor

    # Who may use memory again, without `record_stream`, whose blocks stay taken for as long as the host runs ahead:
    # - What leaves was made on the layers' stream, so that stream may have its memory once it has waited for the copy.
    # - What comes back is made on the stream of the copies back and used by the layers'. The host frees it when all
    #   that uses it is given out. Only the next copy back can have its memory, and waits for what is given out by then,
    #   so that copies run no further ahead than one layer. A copy that nobody asks for is safe likewise.

    def _let_go(self, num_left: int) -> None:
        """Let the layers use the memory of all but the last tensors that leave, after waiting until they are out."""
        while len(self._leaving) > num_left:
            _, is_out = self._leaving.popleft()
            torch.cuda.current_stream(self.device).wait_event(is_out)

    def _fetch(self, waiting: _Waiting) -> None:
        """Begin the copy back, unless it has begun."""
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
