"""What a rank holds per parameter under each kind of sharding: the table of `docs/sharding.md`."""

from typing import Any

import torch
from torch import nn

from crosscut.config import RunConfig, load_run
from crosscut.parallel import make_mesh
from crosscut.training.step import Trainer
from tests.ranks import RankPool

LAYOUTS = (
    "data=4",
    "data=4, sharding=zero2",
    "data=4, sharding=zero3",
    "data=4, sharding=zero3, shard_group=2",
)
PRECISIONS = ("float32", "bfloat16")


def run_on(layout: str, precision: str) -> RunConfig:
    """Ten layers, so that the embeddings weigh little."""
    sizes = {"num_layers": 10, "hidden_size": 128, "num_heads": 4, "vocab_size": 512, "max_sequence_length": 32}
    table = {
        "model": {**sizes, "dropout": 0.0},
        "training": {"batch_size": 4, "sequence_length": 24, "steps": 2, "precision": precision},
        "optimizer": {"warmup_steps": 0},
    }
    return load_run(table, [f"layout.{setting}" for setting in layout.split(", ")])


def bytes_held(layout: str, precision: str) -> dict[str, float]:
    """On a rank: bytes per parameter of the model, by category."""
    run = run_on(layout, precision)
    trainer = Trainer(run, make_mesh(run.layout, torch.device("cpu")))
    count = sum(p.numel() for p in trainer.parameters)
    tokens = torch.arange(25).unsqueeze(0)
    at_rest = [p.to_local().untyped_storage() for p in trainer.parameters]
    for_products = _WeightsInUse(trainer.model, at_rest)
    with for_products:
        trainer.reducer.arm()
        loss = trainer.model.loss(tokens[:, :-1], tokens[:, 1:], scale=1 / 96)
    between = for_products.nbytes()
    loss.backward()
    trainer.reducer.finish()
    gradients = sum(p.grad.to_local().nbytes for p in trainer.parameters)
    trainer.update(0, loss.detach())
    states = trainer.optimizer.state.values()
    moments = sum(state[name].to_local().nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    held = {"weights": sum(s.nbytes() for s in at_rest), "in use": between, "gradients": gradients, "moments": moments}
    return {name: number / count for name, number in held.items()}


class _WeightsInUse:
    """Copies of weights, gathered or in a narrower type, that a forward pass leaves for the backward pass."""

    def __init__(self, model: nn.Module, at_rest: list[torch.UntypedStorage]) -> None:
        self.model, self.known = model, {storage._cdata for storage in at_rest}
        self.shapes = {p.shape for p in model.parameters() if p.dim() == 2}
        self.found: dict[int, torch.UntypedStorage] = {}

    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.found.values())

    def __enter__(self) -> None:
        self._handles = [m.register_forward_pre_hook(self._note_parameters) for m in self.model.modules()]
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda tensor: tensor)
        self._saving.__enter__()

    def __exit__(self, *failure: object) -> None:
        self._saving.__exit__(*failure)
        for handle in self._handles:
            handle.remove()

    def _note_parameters(self, module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._note(parameter.to_local())

    def _note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2 and {tensor.shape, tensor.t().shape} & self.shapes:
            self._note(tensor)
        return tensor

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.found[storage._cdata] = storage


def table(pool: RankPool) -> str:
    """What rank 0 of four holds."""
    lines = [
        "| `layout` | `precision` | weights | of them for products | gradients | moments | together |",
        "|---|---|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        for precision in PRECISIONS:
            held = pool.run(4, bytes_held, layout, precision)[0]
            numbers = " | ".join(f"{number:.1f}" for number in (*held.values(), sum(held.values())))
            lines.append(f"| `{layout}` | {precision} | {numbers} |")
    return "\n".join(lines) + "\n"
