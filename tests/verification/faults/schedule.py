"""Faults of pipeline stages: tensors of the wrong micro-batch, and passes that run too often. `mutations` says how a
fault is planted.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crosscut.architecture.pipeline import Pass
from crosscut.kernels import deferral
from crosscut.model import gpt, stages
from crosscut.parallel import normal_
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.owners.stages import Channels
from crosscut.parallel.state.gradients import _local
from crosscut.training import step as training_step
from tests.verification.mutations import (
    DELAYED,
    INTERLEAVED,
    PACKED,
    STAGED_DATA,
    STAGES,
    Patch,
    _is_last_stage,
    fault,
    instead_of,
)
from tests.verification.runs import LLAMA

FOUR_LAYERS = {"num_layers": 4}


def _batches(patch: Patch, changed: Any, *, last: bool) -> None:
    """Change the batch of each forward pass, on the last stage or on the first one."""
    forward = stages._Step._forward

    def other(self: Any, action: Any, hidden: Tensor | None) -> Tensor:
        if _is_last_stage(self) != last:
            return forward(self, action, hidden)
        plain = self.step
        batches = [changed(batch, plain.micro_batches) for batch in plain.micro_batches]
        self.step = replace(plain, micro_batches=batches)
        try:
            return forward(self, action, hidden)
        finally:
            self.step = plain

    patch.setattr(stages._Step, "_forward", other)


@fault(
    "a stage has the first micro-batch's documents in all micro-batches", "blocks.1.attention", STAGES, training=PACKED
)
def documents_of_the_first(patch: Patch) -> None:
    _batches(patch, lambda batch, every: replace(batch, documents=every[0].documents), last=True)


@fault(
    "a stage has the first micro-batch's positions in all micro-batches",
    "blocks.1.attention",
    STAGES,
    training=PACKED,
    **LLAMA,
)
def positions_of_the_first(patch: Patch) -> None:
    _batches(patch, lambda batch, every: replace(batch, positions=every[0].positions), last=True)


@fault("the first stage reads the first micro-batch's tokens in all micro-batches", "tokens", STAGES)
def tokens_of_the_first(patch: Patch) -> None:
    _batches(patch, lambda batch, every: replace(batch, tokens=every[0].tokens), last=False)


@fault("the last stage has the first micro-batch's targets in all micro-batches", "loss", STAGES)
def targets_of_the_first(patch: Patch) -> None:
    _batches(patch, lambda batch, every: replace(batch, targets=every[0].targets), last=True)


def _arrivals(patch: Patch, kind: Pass) -> None:
    """Give each pass of this kind the tensor that arrived for the pass before."""
    received = stages._Step._received

    def stale(self: Any, action: Any) -> Tensor | None:
        arrived = received(self, action)
        if arrived is None or action.kind is not kind:
            return arrived
        kept = getattr(self, "kept", arrived)
        self.kept = arrived.detach().clone()
        return kept

    patch.setattr(stages._Step, "_received", stale)


@fault("a stage takes the hidden states of the micro-batch before", "blocks.1", STAGES)
def stale_hidden_states(patch: Patch) -> None:
    _arrivals(patch, Pass.FORWARD)


@fault("a stage takes the gradient of the micro-batch before", "blocks.0", STAGES)
def stale_gradients(patch: Patch) -> None:
    _arrivals(patch, Pass.BACKWARD)


@fault("a stage sends the hidden states of the micro-batch before", "blocks.1", STAGES)
def stale_sends(patch: Patch) -> None:
    send, before = Channels.send, []

    def late(self: Channels, message: Any, x: Tensor) -> None:
        before.append(x)
        send(self, message, before[-2:][0] if message.channel.kind is Pass.FORWARD else x)

    patch.setattr(Channels, "send", late)


@fault("the final norm is also applied to the output of an earlier stage", "final_norm", INTERLEAVED, **FOUR_LAYERS)
@instead_of(gpt.GPT, "forward")
def final_norm_of_each_stage(forward: Any, self: gpt.GPT, *inputs: Any, stage_input: Any = None, **how: Any) -> Any:
    y = forward(self, *inputs, stage_input=stage_input, **how)
    is_early = stage_input is not None and not stage_input.stage.is_last and self.final_norm is not None
    return self.final_norm(y) if is_early else y


@fault("the final norm is applied twice", "final_norm")
@instead_of(gpt.GPT, "forward")
def final_norm_twice(forward: Any, self: gpt.GPT, *inputs: Any, with_weight: bool = False, **how: Any) -> Any:
    y = forward(self, *inputs, with_weight=with_weight, **how)
    if self.mesh.tensor.size == 1:
        return y
    return (self.final_norm(y[0]), y[1]) if with_weight else self.final_norm(y)


@fault("the final norm is left out in a pipeline", "final_norm", STAGES)
def final_norm_left_out(patch: Patch) -> None:
    forward = gpt.GPT.forward

    def unnormed(self: gpt.GPT, *inputs: Any, **how: Any) -> Any:
        with patch.context() as inside:
            if self.mesh.is_staged and self.final_norm is not None:
                inside.setitem(self._modules, "final_norm", None)
            return forward(self, *inputs, **how)

    patch.setattr(gpt.GPT, "forward", unnormed)


@fault("a stage runs its layer twice", "blocks.1", STAGES)
def layer_twice(patch: Patch) -> None:
    own = gpt.GPT._blocks_of

    def twice(self: gpt.GPT, stage: Any) -> Any:
        blocks = own(self, stage)
        return [torch.nn.Sequential(*blocks, *blocks)] if self.mesh.is_staged and stage.is_last else blocks

    def call(self: Any, x: Tensor, *others: Any) -> Any:
        for block in self:
            x, sums = block(x, *others)
        return x, sums

    patch.setattr(torch.nn.Sequential, "forward", call)
    patch.setattr(gpt.GPT, "_blocks_of", twice)


@fault("gradients are summed over the data ranks before the last backward pass", "gradient reduction", STAGED_DATA)
@instead_of(stages._Step, "_forward")
def summed_too_early(forward: Any, self: Any, action: Any, hidden: Tensor | None) -> Tensor:
    if action.micro_batch == len(self.step.micro_batches) - 1:
        for parameter in self.step.model.parameters():
            if parameter.grad is not None:
                _local(parameter.grad).copy_(all_reduce(_local(parameter.grad), self.step.model.mesh.data))
    return forward(self, action, hidden)


@fault("the copy of the tied embedding starts from other weights", "loss", STAGES)
@instead_of(training_step, "initialize")
def copy_starts_apart(initialize: Any, model: gpt.GPT, seed: int, **how: Any) -> None:
    initialize(model, seed, **how)
    for copy in model.embedding.copies:
        normal_(copy, std=0.02, seed=seed, name="another")


@fault("delayed weight gradients take the input of the micro-batch before", "blocks.1.mlp.contract", DELAYED)
def delayed_gradients_of_the_one_before(patch: Patch) -> None:
    add = deferral.Deferred.add
    before: dict[int, Any] = {}

    def stale(self: deferral.Deferred, compute: Any, edge: Any) -> None:
        place = len(self)
        add(self, before.get(place, compute), edge)
        before[place] = compute

    patch.setattr(deferral.Deferred, "add", stale)


@fault("a stage counts only the targets of its first micro-batch", "loss", STAGES)
@instead_of(training_step.Trainer, "_scales")
def targets_of_one_micro_batch(scales: Any, self: Any, micro_batches: Any) -> Any:
    return scales(self, micro_batches[:1] if self.mesh.is_staged else micro_batches)


@fault("a stage sends the gradients of its sequences back in another order", "blocks.0", STAGES)
@instead_of(stages._Step, "_backward")
def gradients_in_another_order(backward: Any, self: Any, action: Any, gradient: Tensor | None) -> Tensor | None:
    own = backward(self, action, gradient)
    return None if own is None else own.roll(1, 0)
