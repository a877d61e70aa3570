"""Functions that the tests of this folder run on ranks."""

import errno
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import CrosscutError, Layout, ModelConfig
from crosscut.kernels.soft_cap import soft_cap
from crosscut.model import GPT, Batch
from crosscut.parallel import (
    GradientReducer,
    ParallelMesh,
    RandomStreams,
    enter_tensor_parallel,
    gather_from_tensor_parallel,
    make_mesh,
    reshard,
)
from crosscut.parallel.collectives import all_gather_objects
from crosscut.parallel.state.parameters import local, local_offsets, local_part
from crosscut.pretrained import ModelSource, export_model, loading, tensors, writing
from tests.pretrained.models import TOKENS

CPU = torch.device("cpu")

Gradients = tuple[float, dict[str, Tensor]]
"""A loss, and the gradients of the parameters by name."""


def load(source: ModelSource, layout: Layout | ParallelMesh, precision: str) -> GPT:
    mesh = make_mesh(layout, CPU) if isinstance(layout, Layout) else layout
    return source.load(mesh, precision=precision)


@torch.no_grad()
def logits_at_all_positions(model: GPT, tokens: Tensor) -> Tensor:
    hidden = enter_tensor_parallel(model(Batch(tokens=tokens)), model.mesh)
    columns = hidden @ local(model.head.projection.weight, hidden.dtype).t()
    logits = gather_from_tensor_parallel(columns, model.mesh.tensor)[..., : model.config.vocab_size]
    reshard(model)
    return soft_cap(logits, model.config.logit_softcap)


def logits(
    source: ModelSource, layout: Layout | ParallelMesh, precisions: list[str], tokens: Tensor = TOKENS
) -> list[Tensor]:
    """Logits [B, S, V] in each precision."""
    return [logits_at_all_positions(load(source, layout, precision), tokens) for precision in precisions]


def logits_of_all(sources: dict[str, ModelSource], layout: Layout, precision: str) -> dict[str, Tensor]:
    """Logits [B, S, V] of each model, by the name of the model."""
    mesh = make_mesh(layout, CPU)
    return {name: logits(source, mesh, [precision])[0] for name, source in sources.items()}


@torch.no_grad()
def hidden_states_of_all(
    cases: dict[str, tuple[ModelSource, Batch]], layout: Layout, precision: str
) -> dict[str, Tensor]:
    """Last hidden states [B, S, H], by the name of the case."""
    mesh = make_mesh(layout, CPU)
    found: dict[str, Tensor] = {}
    for name, (source, batch) in cases.items():
        model = load(source, mesh, precision)
        found[name] = model.hidden_states(batch)
        reshard(model)
    return found


def weights(source: ModelSource, layout: Layout) -> dict[str, Tensor]:
    """All parameters, whole and without padding. The padding must be zero."""
    model = load(source, layout, "float32")
    whole = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    padding = sum(float(whole[name][rows:].abs().sum()) for name, rows in model.padded_rows.items())
    assert padding == 0.0, "padded rows are zero"
    return {name: tensor[: model.padded_rows.get(name)].clone() for name, tensor in whole.items()}


def elements_read(source: ModelSource, layout: Layout) -> tuple[int, int, set[str]]:
    """Number of elements that this rank reads from the files, number of elements that it holds, without padding, and
    names of the tensors from which it reads.
    """
    read, names = 0, set()
    original = loading.blocks

    def counted(stored: tensors.StoredTensor, region: tensors.Region) -> Any:
        nonlocal read
        names.add(stored.name)
        for first, block in original(stored, region):
            read += block.numel()
            yield first, block

    loading.blocks = counted
    try:
        model = load(source, layout, "float32")
    finally:
        loading.blocks = original
    held = 0
    for name, parameter in model.named_parameters():
        rows = model.padded_rows.get(name, parameter.shape[0]) - local_offsets(parameter)[0]
        held += local_part(parameter.detach())[: max(rows, 0)].numel()
    return read, held, names


def weights_in_blocks(source: ModelSource, layout: Layout, block_bytes: int) -> dict[str, Tensor]:
    """The result of `weights`, with files that are read in blocks of `block_bytes`."""
    original = tensors._BLOCK_BYTES
    tensors._BLOCK_BYTES = block_bytes
    try:
        return weights(source, layout)
    finally:
        tensors._BLOCK_BYTES = original


def dtypes(source: ModelSource, precision: str) -> set[str]:
    return {str(p.dtype) for p in load(source, Layout(), precision).parameters()}


def shapes_of_all(configs: list[ModelConfig]) -> list[tuple[dict[str, tuple[int, ...]], dict[str, int]]]:
    """For each model: shapes of all parameters on one rank, and the numbers of rows of the padded parameters."""
    mesh = make_mesh(Layout(), CPU)
    told = []
    for config in configs:
        model = GPT(config, mesh=mesh, streams=RandomStreams(mesh, seed=0))
        found = {name: tuple(p.shape) for name, p in model.named_parameters()}
        told.append((found, {name: found[name][0] for name in model.padded_rows}))
    return told


def export(source: ModelSource, layout: Layout, out: Path, max_file_bytes: int) -> None:
    model = load(source, layout, "float32")
    export_model(model, out, tokenizer=source.tokenizer, stops=source.stops, max_file_bytes=max_file_bytes)


def export_in_bfloat16(source: ModelSource, layout: Layout, out: Path) -> Tensor:
    """Export a model that is held in bfloat16. Return the decay rates of this rank's heads in the first layer."""
    model = load(source, layout, "bfloat16")
    export_model(model, out, tokenizer=source.tokenizer)
    return local_part(model.blocks[0].attention.log_rate.detach()).clone()


def export_raises(source: ModelSource, layout: Layout, out: Path, fails_after: int | None = None) -> list[str]:
    """Error of the export on every rank, as text; empty if there is none. With `fails_after`, the disk is full after
    this number of tensors.
    """
    model = load(source, layout, "float32")
    original = writing.tensor_bytes
    written = 0

    def full(tensor: Tensor) -> Any:
        nonlocal written
        written += 1
        if written > fails_after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(tensor)

    if fails_after is not None:
        writing.tensor_bytes = full
    try:
        export_model(model, out, tokenizer=source.tokenizer)
    except CrosscutError as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = ""
    finally:
        writing.tensor_bytes = original
    return all_gather_objects(message, model.mesh.tensor)


def greedy(source: ModelSource, layout: Layout, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation."""
    return _continued(load(source, layout, "float32"), prompt, count)


@torch.no_grad()
def _continued(model: GPT, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.logits(torch.tensor([tokens]))[0].argmax()))
    return tokens[len(prompt) :]


def golden(source: ModelSource, layout: Layout, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    """Figures of each prompt: the mean loss, the five likeliest next tokens with their logits, and the likeliest
    continuation.
    """
    model = load(source, layout, "float32")
    found = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        scores = logits_at_all_positions(model, tokens)[0]
        values, ids = scores[-1].topk(5)
        found.append(
            {
                "loss": F.cross_entropy(scores[:-1], tokens[0, 1:]).item(),
                "top5": list(zip(ids.tolist(), values.tolist(), strict=True)),
                "greedy": _continued(model, prompt, count),
            }
        )
    return found


def gradients(source: ModelSource, layout: Layout, batch: Batch) -> Gradients:
    """Sum of the mean losses of the masked tokens and of the order of the segments, and the whole gradient of each
    parameter, without padding.
    """
    model = load(source, layout, "float64")
    reducer = GradientReducer(model.parameters(), model.mesh)
    reducer.arm()
    loss = model.loss(batch, {term.name: 1 / int(batch.count(term.field)) for term in model.loss_terms})
    loss.backward()
    reducer.finish()
    whole = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), {name: one[: model.padded_rows.get(name)] for name, one in whole.items()}
