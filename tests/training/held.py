"""Bytes that a rank holds per parameter, by sharding, precision and offloading: the table of `docs/sharding.md`."""

from dataclasses import replace
from itertools import groupby
from typing import Any
from unittest import mock

import torch
from torch import nn

from crosscut.config import RunConfig, load_run
from crosscut.model import Batch
from crosscut.parallel import make_mesh
from crosscut.parallel.state.parameters import local_part
from crosscut.training.optimization.optimizer import MOMENTS
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer
from tests.ranks import RankPool

LAYOUTS = ("data=4", "data=4, sharding=zero2", "data=4, sharding=zero3", "data=4, sharding=zero3, shard_group=2")
PRECISIONS = ("float32", "bfloat16", "float16", "float8")
OFFLOAD = 'training.offload=["optimizer"]'


def run_on(layout: str, precision: str, *options: str) -> RunConfig:
    """Run of a model with ten layers, so that the embeddings are a small part of its parameters."""
    sizes = {"num_layers": 10, "hidden_size": 128, "num_heads": 4, "vocab_size": 512, "max_sequence_length": 32}
    table = {
        "model": {**sizes, "dropout": 0.0},
        "training": {"batch_size": 4, "sequence_length": 24, "steps": 2, "precision": precision},
        "optimizer": {"warmup_steps": 0},
    }
    return load_run(table, [*(f"layout.{setting}" for setting in layout.split(", ")), *options])


@mock.patch.object(torch, "is_autocast_enabled", lambda *_: False)  # PyTorch raises an error for the meta device
def bytes_left_beside_the_host(layout: str, precision: str) -> dict[str, float]:
    """The result of `bytes_held`, with the moments offloaded. The meta device stands for a GPU, because offloading
    moves nothing on the CPU.
    """
    return bytes_held(layout, precision, OFFLOAD, device="meta")


def bytes_held(layout: str, precision: str, *options: str, device: str = "cpu") -> dict[str, float]:
    """Bytes on a rank's device, per parameter of the model, by category."""
    run = run_on(layout, precision, *options)
    mesh = replace(make_mesh(run.layout, torch.device("cpu")), device=torch.device(device))
    trainer = Trainer(resolve_on(run, mesh.device), mesh)
    count = sum(p.numel() for p in trainer.parameters)
    tokens = torch.arange(25, device=mesh.device).unsqueeze(0)
    at_rest = [p.to_local().untyped_storage() for p in trainer.parameters]
    for_products = _WeightsInUse(trainer.model, at_rest)
    with for_products:
        trainer.reducer.arm()
        loss = trainer.model.loss(Batch.from_ids(tokens), {"tokens": 1 / 96})
    between = for_products.nbytes()
    loss.backward()
    trainer.reducer.finish()
    gradients = sum(p.grad.to_local().nbytes for p in trainer.parameters)
    trainer.update(0, loss.detach())
    moments = [local_part(state[name]) for state in trainer.optimizer.state.values() for name in MOMENTS]
    held = {
        "weights": sum(s.nbytes() for s in at_rest),
        "in use": between,
        "gradients": gradients,
        "moments": sum(moment.nbytes for moment in moments if moment.device == mesh.device),
    }
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
    """Table of the bytes that rank 0 of four holds. Precisions with the same numbers share a line."""
    lines = [
        "| `layout` | `precision` | weights | of them for products | gradients | moments | together |",
        "|---|---|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        told = [(precision, _numbers(pool.run(4, bytes_held, layout, precision)[0])) for precision in PRECISIONS]
        for numbers, alike in groupby(told, key=lambda row: row[1]):
            lines.append(f"| `{layout}` | {', '.join(precision for precision, _ in alike)} | {numbers} |")
    left = _numbers(pool.run(4, bytes_left_beside_the_host, LAYOUTS[0], PRECISIONS[1])[0])
    lines.append(f"| `{LAYOUTS[0]}`, moments offloaded | {PRECISIONS[1]} | {left} |")
    return "\n".join(lines) + "\n"


def _numbers(held: dict[str, float]) -> str:
    return " | ".join(f"{number:.1f}" for number in (*held.values(), sum(held.values())))
