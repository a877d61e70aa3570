"""Ledger of a step: every allocation and release of memory, and the FLOPs of every product.

A piece is the storage of a tensor. The category of a piece depends on the code that made the piece, on the tensors from
which the piece was computed and, for gradients, on the later use:

| category       | a piece has this category if it                                                           |
|----------------|-------------------------------------------------------------------------------------------|
| weights        | is a parameter, or was cast from a parameter to another type                              |
| master_weights | is a parameter, and products use another type                                             |
| optimizer      | is a moment of AdamW, the momentum of Muon or a moving average of weights                 |
| gradients      | became a parameter's gradient, or was made in a backward pass with a parameter's shape    |
| logits         | was made by the loss and is as wide as a rank's part of the vocabulary                    |
| buffers        | is the result of a collective, or was made by code that prepares collectives, or by Muon  |
| activations    | has no other category                                                                     |

A piece belongs to the module whose forward pass made the piece. A piece that is made in a backward pass belongs to the
module of the operator's first input that existed before the backward pass.
"""

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from crosscut.kernels import onednn
from crosscut.parallel.pretended import is_collective
from crosscut.parallel.state.parameters import local_part
from crosscut.training.watching.storages import OperatorCall, OperatorMode, frames, peak_of, storages_of

_OURS = f"{Path(__file__).resolve().parents[1]}/"
_LOSS = f"{_OURS}parallel/cross_entropy.py"
_REDUCTION = (f"{_OURS}parallel/state/gradients.py", f"{_OURS}parallel/state/gradient_norm.py")
_MUON = f"{_OURS}training/optimization/muon.py"
_HOST = f"{_OURS}training/memory/host_activations.py"
_FOR_OTHERS = (f"{_OURS}rehearsal/", f"{_OURS}kernels/", f"{_OURS}training/watching/storages.py")
"""Files whose functions make tensors for their callers. The caller counts as the maker of such a tensor."""
_SHARDING = "torch/distributed/fsdp/"
_SHAPES = "torch/distributed/tensor/_sharding_prop.py"
"""File in which PyTorch computes shapes of distributed tensors, with fake tensors of its own."""
aten = torch.ops.aten


@dataclass(slots=True, eq=False)
class StoragePiece:
    """Memory of one tensor storage: its category, and the module that it belongs to."""

    category: str
    module: str
    is_kept: bool
    """Whether the storage was made outside of a backward pass."""
    instant: str
    """Pass or phase during which the storage was made."""


@dataclass(frozen=True)
class Peak:
    """Bytes held at the peak of the step, in total and by category and module."""

    total: int
    parts: dict[tuple[str, str], int]
    """Bytes, keyed by (category, module). The module names are the keys of `modules`."""
    categories: dict[str, int]
    modules: dict[str, int]
    """Bytes of each module, largest first. `*` in a module's name stands for any layer number."""
    instant: str
    """Pass or phase during which the peak occurred."""


class Ledger(OperatorMode):
    """Context manager that records the memory and the FLOPs of the code inside.

    `vocabulary` is the width of the logits on a rank. `shapes` are the shapes of the parameters on the rank. With
    `host_apart`, tensors in host memory (offloaded tensors) are not counted.
    """

    def __init__(self, *, vocabulary: int, shapes: Iterable[Sequence[int]], host_apart: bool) -> None:
        super().__init__()
        self.flops = 0
        self._vocabulary, self._shapes, self._host_apart = vocabulary, {tuple(shape) for shape in shapes}, host_apart
        self._known: dict[int, StoragePiece] = {}
        self._elsewhere: set[int] = set()
        self._events: list[tuple[int, int, StoragePiece | None]] = []
        self._running: list[str] = []

    def watch(self, model: nn.Module) -> None:
        """Track the forward passes and gradients of `model` and its modules, for the model's lifetime."""

        def leave(*_: object) -> None:
            self._running.pop()

        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _m, _x, name=name: self._running.append(name))
            module.register_forward_hook(leave, always_call=True)
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(self.name_gradient)

    def enter(self, category: str, tensors: Mapping[str, Tensor]) -> None:
        """Record tensors that exist before the step, and assign them to `category`. `tensors` maps parameter names to
        tensors.
        """
        for name, tensor in tensors.items():
            storage = local_part(tensor.detach()).untyped_storage()
            if storage.nbytes() and storage._cdata not in self._known:
                self._take(storage, category, name.rpartition(".")[0], instant="before")

    def enter_like(self, tensor: Tensor, other: Tensor) -> None:
        """Record `tensor` in the way in which `other` has been recorded, if at all."""
        storage, piece = tensor.untyped_storage(), self._known.get(other.untyped_storage()._cdata)
        if piece is not None and storage._cdata not in self._known:
            self._take(storage, piece.category, piece.module, instant="step")

    def pass_over(self, tensors: Iterable[Tensor]) -> None:
        """Exclude `tensors` from the count. Use this method for tensors that are offloaded to host memory during the
        step.
        """
        self._elsewhere.update(local_part(tensor).untyped_storage()._cdata for tensor in tensors)

    def peak(self) -> Peak:
        """Return the peak of the memory held during the step, in total and by category and module."""
        most, live = peak_of(self._events)
        categories: dict[str, int] = defaultdict(int)
        modules: dict[str, int] = defaultdict(int)
        parts: dict[tuple[str, str], int] = defaultdict(int)
        for size, piece in live:
            module = re.sub(r"\d+", "*", piece.module)
            categories[piece.category] += size
            modules[module] += size
            parts[piece.category, module] += size
        ordered = dict(sorted(modules.items(), key=lambda item: -item[1]))
        return Peak(most, dict(parts), dict(categories), ordered, live[-1][1].instant if live else "")

    def note(self, call: OperatorCall) -> None:
        """Count the FLOPs of an operator, and record the storages of its results."""
        packet = getattr(call.operator, "_overloadpacket", None)
        if (count := _COUNTS.get(packet) or flop_registry.get(packet)) is not None:
            self.flops += count(*call.args, **call.kwargs, out_val=call.result)
        sources: list[StoragePiece] | None = None
        for tensor, storage in storages_of(call.result):
            if storage._cdata not in self._known and storage._cdata not in self._elsewhere:
                sources = self._sources(call.args) if sources is None else sources
                self._made(call.operator, tensor, storage, sources)

    def _sources(self, args: tuple[object, ...]) -> list[StoragePiece]:
        """Return the recorded pieces of an operator's tensor arguments. Tensors inside lists are ignored."""
        known = (self._known.get(x.untyped_storage()._cdata) for x in args if isinstance(x, Tensor))
        return [piece for piece in known if piece is not None]

    def _made(
        self, operator: OpOverload, tensor: Tensor, storage: torch.UntypedStorage, sources: list[StoragePiece]
    ) -> None:
        if category := self._category(operator, tensor, sources):
            of = sorted(sources, key=lambda piece: not piece.is_kept)
            module = self._running[-1] if self._running else of[0].module if of else ""
            self._take(storage, category, module, instant=self._instant(module))

    def _category(self, operator: OpOverload, tensor: Tensor, sources: list[StoragePiece]) -> str | None:
        """Return the category of a new tensor. None for a tensor that would not exist on a real device."""
        file, function = _maker()
        if _SHAPES in file:
            return None
        if self._host_apart and file == _HOST and function == "_put":
            return None
        if is_collective(operator) or file in (*_REDUCTION, _MUON) or _SHARDING in file:
            return "buffers"
        if file == _LOSS and tensor.shape[-1:] == (self._vocabulary,):
            return "logits"
        if operator is aten._to_copy.default and sources and sources[0].category in ("weights", "master_weights"):
            return "weights"
        if tuple(tensor.shape) in self._shapes and (_is_backward() or file == _LOSS):
            return "gradients"
        return "activations"

    def _take(self, storage: torch.UntypedStorage, category: str, module: str, *, instant: str) -> None:
        piece = self._known[storage._cdata] = StoragePiece(category, module, not _is_backward(), instant)
        self._events.append((storage._cdata, storage.nbytes(), piece))
        weakref.finalize(storage, self._gone, storage._cdata)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has been resized."""
        if (piece := self._known.get(storage._cdata)) is not None:
            piece = self._known[storage._cdata] = replace(piece, instant=self._instant(piece.module))
            self._events.append((storage._cdata, storage.nbytes(), piece))

    def _gone(self, key: int) -> None:
        del self._known[key]
        self._events.append((key, 0, None))

    def _instant(self, module: str) -> str:
        """Return the name of the running work: a module's forward or backward pass, the loss, or a later phase."""
        if _is_backward():
            return f"backward, {module}"
        if self._running:
            return f"forward, {module}"
        return {_LOSS: "loss", **dict.fromkeys(_REDUCTION, "reduction")}.get(_maker()[0], "step")

    def name_gradient(self, parameter: Tensor) -> None:
        """Assign the category `gradients` to the gradient of a parameter, if it has one."""
        if parameter.grad is None:
            return
        piece = self._known.get(local_part(parameter.grad).untyped_storage()._cdata)
        if piece is not None and piece.category == "activations":
            piece.category = "gradients"


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _maker() -> tuple[str, str]:
    """Return the file and the name of the function that runs the operator.

    This is the innermost function on the stack that is in this package or in PyTorch's code for sharding.
    """
    for frame in frames():
        file = frame.f_code.co_filename
        ours = file.startswith(_OURS) and not file.startswith(_FOR_OTHERS)
        if ours or _SHARDING in file or _SHAPES in file:
            return file, frame.f_code.co_name
    return "", ""


def _scores_and_values(query: Tensor, key: Tensor) -> int:
    """Return the FLOPs of two products of [S, D] and [D, S] per head. The products are counted in full, even if a
    kernel skips masked parts or computes parts twice.
    """
    batch, heads, length, width = query.shape
    return 4 * batch * heads * length * key.shape[-2] * width


def _forward(query: Tensor, key: Tensor, *_: object, **__: object) -> int:
    return _scores_and_values(query, key)


def _backward(_grad: Tensor, query: Tensor, key: Tensor, *_: object, **__: object) -> int:
    return 2 * _scores_and_values(query, key)


def _added(_total: Tensor, a: Tensor, b: Tensor, *_: object, **__: object) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _linear(x: Tensor, weight: Tensor, *_: object, **__: object) -> int:
    return 2 * x.numel() * weight.shape[0]


def _solved(system: Tensor, wanted: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of a triangular system as those of a product with the whole square."""
    return 2 * wanted.numel() * system.shape[-1]


_COUNTS: dict[object, Callable[..., int]] = {
    aten.addmm_: _added,
    aten.addmm: _added,
    aten.linalg_solve_triangular: _solved,
    **({torch.ops.mkldnn._linear_pointwise: _linear} if onednn.IS_THERE else {}),
    aten._scaled_dot_product_flash_attention: _forward,
    aten._scaled_dot_product_flash_attention_backward: _backward,
    aten._scaled_dot_product_efficient_attention: _forward,
    aten._scaled_dot_product_efficient_attention_backward: _backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
"""Functions that count an operator's FLOPs. They are for operators without a formula in PyTorch, and for attention,
which is counted in the same way as in the planner (`planner.compute`).
"""
