"""Reduction of gradients between the backward pass and the optimizer.

The ranks that see different tokens (`ParallelMesh.tokens`, the data ranks) sum their gradients in buckets. The buckets
are sent during the backward pass (paper, section 3.2). If ranks share experts, the gradients of experts are summed over
the ranks that hold the same experts (`PlanAxes.tokens`), since each expert has seen the tokens of all ranks that share
experts.

The tensor ranks sum only some gradients of replicated parameters: if a parameter is used on a split sequence or inside
a parallel region, each rank computes only a part of the gradient. Such gradients have the placement `Partial`. After
the backward pass, one message per element type sums all `Partial` gradients.

Gradients are summed over the ranks, never averaged: before the backward pass, the loss is divided by the number of
target tokens on all ranks. If data ranks share one copy of the model, `sharding.ShardedReducer` replaces
`GradientReducer`.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from crosscut.config import LayoutError
from crosscut.config.conventions import BUCKET_BYTES
from crosscut.parallel.collectives import all_reduce, start_all_reduce_owned, wait
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.state.parameters import cut_dim, is_partial, plan_of

_Placements = tuple[Placement, ...] | None


class _Bucket:
    """Parameters whose gradients are sent over one axis in one message."""

    def __init__(self, parameters: list[nn.Parameter], axis: Axis) -> None:
        self.parameters, self.axis = parameters, axis
        self.missing = len(parameters)
        self.sent: Tensor | None = None
        self.placements: list[_Placements] = []
        """Placements of the sent gradients; None for a parameter without a gradient."""


class GradientReducer:
    """Reducer of the gradients of a model that is not sharded. It sums gradients over the ranks that see different
    tokens, and partial gradients also over the tensor axis.

    Only the last backward pass of a step may send gradients. (With gradient accumulation, a step has several backward
    passes.) Call `arm` before the last backward pass, and `finish` after it:

        reducer.arm()
        loss.backward()
        reducer.finish()

    Every rank must call `arm` and `finish` in the same steps. The reducer ignores parameters that do not require a
    gradient when the reducer is created. A parameter that the backward pass does not reach gets a gradient of zeros.

    Communication: one all-reduce per bucket over `mesh.tokens` (the data axis) or, for experts, over the axis of their
    plan, overlapped with the backward pass, and at most one all-reduce per element type over the tensor axis. Raises
    `LayoutError` if a parameter is not a `DTensor` or is of a module whose images are cut, or if the mesh shards the
    model.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], mesh: ParallelMesh, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        if mesh.sharding is not None:
            raise LayoutError(
                "`GradientReducer` needs a mesh on which every data rank holds a whole copy of the model, but this "
                "mesh shards the model. Call `make_reducer`, which returns the right reducer."
            )
        self.mesh = mesh
        self.parameters = [p for p in parameters if p.requires_grad]
        require_distributed(self.parameters)
        self._armed = False
        self._buckets: list[_Bucket] = []
        self._num_sent = 0
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._fill_buckets(bucket_bytes)

    def begin(self) -> None:
        """Do nothing: this reducer needs no preparation at the start of a step."""

    def arm(self) -> None:
        """Make the next backward pass send each bucket of gradients as soon as the bucket is complete."""
        self._armed = True
        self._num_sent = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def finish(self) -> None:
        """Wait for all messages and store the summed gradients in each parameter's `.grad`."""
        self._armed = False
        for bucket in self._buckets:
            if bucket.sent is None:  # a parameter without a gradient has kept the bucket from being sent
                self._send(bucket)
        for bucket in self._buckets:
            self._receive(bucket)
        for parameter in self.parameters:
            if parameter.grad is None:  # zeros on every layout: an optimizer skips parameters without a gradient
                parameter.grad = torch.zeros_like(parameter)
        _sum_partial([p for p in self.parameters if is_partial(p.grad)], self.mesh.tensor)

    def _fill_buckets(self, bucket_bytes: int) -> None:
        """Put the parameters of each plan into buckets. A bucket that is complete earlier in the backward pass is sent
        earlier.
        """
        order = list(reversed(self.parameters))  # the backward pass reaches the last parameters first
        places = {parameter: place for place, parameter in enumerate(order)}
        for plan in self.mesh.plans:
            if plan.tokens.size > 1:
                mine = [parameter for parameter in order if plan_of(parameter, self.mesh) is plan]
                self._buckets += (_Bucket(some, plan.tokens) for some in _in_buckets(mine, bucket_bytes))
        self._buckets.sort(key=lambda bucket: places[bucket.parameters[-1]])
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        bucket = self._bucket_of[parameter]  # type: ignore[index]  # the hook is given the parameter itself
        if bucket.missing <= 0:
            raise RuntimeError(
                "`GradientReducer.arm` must be followed by one backward pass and `finish`, but a second backward pass "
                "has begun after gradients were sent. Call `arm` only before the last backward pass of a step."
            )
        bucket.missing -= 1
        # Send buckets in a fixed order. Otherwise ranks on which different parameters lack a gradient would mix up
        # buckets.
        while self._num_sent < len(self._buckets) and self._buckets[self._num_sent].missing == 0:
            self._send(self._buckets[self._num_sent])
            self._num_sent += 1

    def _send(self, bucket: _Bucket) -> None:
        """Start summing a bucket over its axis. Remove the gradients from their parameters to save memory."""
        flat = torch.cat([_flat_gradient(p) for p in bucket.parameters])
        bucket.placements = [_placements(p.grad) for p in bucket.parameters]
        for parameter in bucket.parameters:
            parameter.grad = None
        bucket.sent = start_all_reduce_owned(flat, bucket.axis)

    def _receive(self, bucket: _Bucket) -> None:
        assert bucket.sent is not None
        summed = wait(bucket.sent, bucket.axis)
        bucket.sent = None
        if self.mesh.sequence_parallel:
            _require_use_alike(bucket, summed)
        _set_gradients(bucket.parameters, summed, bucket.placements)


def _in_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in lists of one element type, each of at least `bucket_bytes` bytes if there are enough."""
    pending: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if pending and (size >= bucket_bytes or parameter.dtype != pending[0].dtype):
            yield pending
            pending, size = [], 0
        pending.append(parameter)
        size += _local(parameter).nbytes
    if pending:
        yield pending


def sum_copies(parameter: nn.Parameter, ends: Axis) -> None:
    """Sum the gradients of a tied embedding over the first and the last rank of a pipeline, which both hold a copy.

    Call this function after the reducer's `finish` and before the gradient norm. The optimizer then changes both copies
    in the same way. Communication: one all-reduce of the local gradient over `ends`.
    """
    gradient = parameter.grad
    assert isinstance(gradient, DTensor) and isinstance(parameter, DTensor)
    parameter.grad = _distributed(all_reduce(gradient._local_tensor, ends), gradient, gradient.placements)


def _sum_partial(parameters: list[nn.Parameter], axis: Axis) -> None:
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        alike = [parameter for parameter in parameters if parameter.dtype == dtype]
        summed = all_reduce(torch.cat([_flat_gradient(p) for p in alike]), axis)
        _set_gradients(alike, summed, [None] * len(alike))  # after the sum, the gradients are no longer Partial


def _set_gradients(parameters: list[nn.Parameter], flat: Tensor, placements: Sequence[_Placements]) -> None:
    """Make each parameter's gradient a view of the parameter's piece of `flat`. `placements` has the placement of each
    gradient, or None for the placement of the parameter.
    """
    for (parameter, piece), placed in zip(_pieces(parameters, flat), placements, strict=True):
        assert isinstance(parameter, DTensor)
        parameter.grad = _distributed(piece.view_as(_local(parameter)), parameter, placed or parameter.placements)


def _distributed(local: Tensor, like: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Return a distributed tensor of the shape of `like` with these placements. `local` is this rank's part."""
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _pieces(parameters: list[nn.Parameter], flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    return zip(parameters, flat.split([_local(p).numel() for p in parameters]), strict=True)


def require_distributed(parameters: Iterable[Tensor]) -> None:
    """Raise `LayoutError` if a parameter is not a `DTensor`."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            raise LayoutError(
                "Every parameter must be a DTensor on the tensor axis, but a parameter of shape "
                f"{tuple(parameter.shape)} is an ordinary tensor. Create the parameter with `replicated_parameter` or "
                "`sharded_parameter`."
            )


def _require_use_alike(bucket: _Bucket, summed: Tensor) -> None:
    """Raise `RuntimeError` if a replicated parameter has no gradient on this rank, but has a gradient (or a part of
    one) on another data rank.

    On CUDA, the error is raised when the device reaches the check; the step does not wait for the check.
    """
    for (parameter, piece), placed in zip(_pieces(bucket.parameters, summed), bucket.placements, strict=True):
        if placed is None and cut_dim(parameter) is None:
            torch._assert_async(
                ~piece.any(),
                "Under sequence parallelism, a replicated parameter must be used on all data ranks or on no data rank, "
                f"but a parameter of shape {tuple(parameter.shape)} was used on some data ranks only. Use the "
                "parameter on every rank, if necessary multiplied by zero.",
            )


def _placements(gradient: Tensor | None) -> _Placements:
    assert gradient is None or isinstance(gradient, DTensor)
    return None if gradient is None else gradient.placements


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    local = _local(parameter)
    return torch.zeros_like(local).view(-1) if parameter.grad is None else _local(parameter.grad).reshape(-1)


def _local(tensor: Tensor | None) -> Tensor:
    """Return the local part of a distributed tensor, without autograd."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor
