"""Run the passes of micro-batches through the stages of a pipeline, on one rank.

In a training step, a rank performs the actions that the schedule (`architecture.pipeline.Schedule`) lists for this
rank. A forward pass receives the hidden states of a micro-batch from the previous stage, runs the layers of the stage,
and sends the result to the next stage. A backward pass receives the gradient of this result, and sends the gradient of
its input back. The first stage starts with the embedding, and the last stage ends with the loss. While the rank
computes, the tensor for its next action arrives.

Every rank of a pipeline has the tokens and the targets of all micro-batches. The number of targets is therefore known
on all stages before the first forward pass.

Shapes: B batch, S sequence, H hidden, T tensor ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from crosscut.architecture.pipeline import Action, Message, Pass, Schedule, interleaved
from crosscut.flight import RECORD, RunPhase
from crosscut.kernels.deferral import Deferral, Deferred
from crosscut.model.batch import Batch
from crosscut.model.gpt import GPT, StageInput
from crosscut.model.heads.head import Scales
from crosscut.model.sums import LayerSums
from crosscut.parallel import enter_tensor_parallel
from crosscut.parallel.owners.stages import Arriving


class Observer(Protocol):
    """Interface of an object that is notified when each action of a rank starts and ends."""

    def start(self, action: Action) -> None:
        """Called when the input of `action` has arrived and the rank starts to compute."""

    def end(self, action: Action, *, weight_gradients: int) -> None:
        """Called when the rank has computed the result of `action`, before the result is sent. `weight_gradients` is
        the number of deferred weight gradients that the action has computed.
        """


@dataclass(frozen=True, kw_only=True)
class StageStep:
    """One training step of the stages on one rank."""

    model: GPT
    schedule: Schedule
    micro_batches: Sequence[Batch]
    loss: Callable[[Tensor, Batch], Tensor]
    """Function that computes the loss of a micro-batch from its last hidden states [B, S, H]."""
    scales: Scales
    """Factors of the terms of the loss, also of those of the layers on every stage."""
    sums: LayerSums
    """Sums beside the residual stream, to which those of all micro-batches are added."""
    begin: Callable[[int], None]
    """Function that is called before each forward pass of a micro-batch, with the index of the micro-batch."""
    arm: Callable[[], None]
    """Function that is called before the last backward pass, if this pass completes all gradients of the rank."""
    deferral: Deferral | None = None
    """Object that defers the weight gradients of the model's linear layers. Only a schedule with separate weight
    gradients needs this object."""
    observer: Observer | None = None
    """Observer of each action; None if the actions are not observed."""

    def run(self) -> Tensor:
        """Perform all actions of the rank, and leave the gradients in `.grad`. Return the sum of the losses of all
        micro-batches, a scalar: on the last stage, those of the head, and on every stage, those of its layers.
        """
        return _Step(self).run()


class _Passed(NamedTuple):
    """Tensors of a micro-batch whose forward pass has run and whose backward pass has not."""

    hidden: Tensor | None
    """Input of the stage [B, S, H]; None for the first stage."""
    output: Tensor
    """Output of the stage [B, S, H], or the loss."""
    of_layers: Tensor | None
    """Terms of the loss of the stage's layers; None if there are none, or if `output` includes them."""


class _Step:
    """State of one step on one rank."""

    def __init__(self, step: StageStep) -> None:
        pipeline, channels = step.model.mesh.pipeline, step.model.mesh.channels
        assert channels is not None, "the pipeline has one rank"
        self.step, self.rank, self.channels = step, pipeline.rank, channels
        self.passed: dict[tuple[int, int], _Passed] = {}
        self.deferred: dict[tuple[int, int], Deferred] = {}
        self.arriving: dict[Message, Arriving] = {}
        self.acknowledged = step.schedule.acknowledged(self.rank)
        dtype = torch.promote_types(
            torch.float32, step.model.compute_dtype
        )  # the type of the loss, which only one stage has
        self.loss = torch.zeros((), dtype=dtype, device=step.model.mesh.device)

    def run(self) -> Tensor:
        actions = self.step.schedule.actions[self.rank]
        last = None if self.step.schedule.separates_weights else actions[-1]
        self._start_receiving(actions[0])
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            received = self._received(action)
            if following is not None:
                self._start_receiving(following)
            if action == last:
                self.step.arm()
            self._perform(action, received)
        self.channels.finish()
        return self.loss

    def _perform(self, action: Action, received: Tensor | None) -> None:
        """Compute the result of an action, and start to send the result to the stage that needs it."""
        result, weight_gradients, observer = None, 0, self.step.observer
        RECORD.phase(RunPhase.FORWARD if action.kind is Pass.FORWARD else RunPhase.BACKWARD)
        if observer is not None:
            observer.start(action)
        if action.kind is Pass.FORWARD:
            result = self._forward(action, received)
        elif action.kind is Pass.BACKWARD:
            result = self._backward(action, received)
        else:
            weight_gradients = self.deferred.pop((action.micro_batch, action.chunk)).compute()
        if observer is not None:
            observer.end(action, weight_gradients=weight_gradients)
        if (message := self.step.schedule.sent(self.rank, action)) is not None:
            assert result is not None
            self.channels.send(message, result)

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        batch, stage = self.step.micro_batches[action.micro_batch], self.step.model.stages[action.chunk]
        self.step.begin(action.micro_batch)
        if hidden is not None:
            hidden.requires_grad_()
        output: Tensor = self.step.model(batch, stage_input=StageInput(stage, hidden), sums=self.step.sums)
        of_layers = self.step.sums.taken(self.step.model.layer_terms, self.step.scales)
        if stage.is_last:
            output = self.step.loss(output, batch)
            output, of_layers = output if of_layers is None else output + of_layers.to(output.dtype), None
        for part in (output if stage.is_last else None, of_layers):
            self.loss = self.loss if part is None else self.loss + part.detach().to(self.loss.dtype)
        self.passed[action.micro_batch, action.chunk] = _Passed(hidden, output, of_layers)
        return output.detach()

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        place = (action.micro_batch, action.chunk)
        hidden, output, of_layers = self.passed.pop(place)
        outputs = [output] if of_layers is None else [output, of_layers]
        gradients = [gradient, None][: len(outputs)]
        if self.step.schedule.separates_weights:
            assert self.step.deferral is not None, "the layers cannot defer the gradients of weights"
            with self.step.deferral.collecting() as self.deferred[place]:
                torch.autograd.backward(outputs, gradients)
        else:
            torch.autograd.backward(outputs, gradients)
        return None if hidden is None else hidden.grad

    def _start_receiving(self, action: Action) -> None:
        message = self.step.schedule.received(self.rank, action)
        if message is not None:
            batch = self.step.micro_batches[action.micro_batch]
            shape, dtype = self.step.model.hidden_form(batch.tokens)
            self.arriving[message] = self.channels.start_receiving(message, shape, dtype)

    def _received(self, action: Action) -> Tensor | None:
        message = self.step.schedule.received(self.rank, action)
        if message is None:
            return None
        received = self.arriving.pop(message).wait()
        self.channels.release(self.acknowledged[message])
        return received


@torch.no_grad()
def forward_loss(model: GPT, batch: Batch) -> Tensor:
    """Return the sum of the cross entropies of a batch, a scalar, without a backward pass. In a pipeline, the batch
    passes through all stages, and the result is zero on all stages except the last. Every rank of a pipeline must call
    this function with the same batches, in the same order.
    """
    mesh = model.mesh
    if not mesh.is_staged:
        return model.loss(batch)
    hidden = _through_stages(model, batch)
    if hidden is None:
        return torch.zeros((), dtype=torch.float32, device=mesh.device)
    return model.loss_of_hidden(hidden, batch)


@torch.no_grad()
def last_hidden_states(model: GPT, batch: Batch) -> Tensor | None:
    """Return the last hidden states [B, S, H] of the tokens [B, S] of a batch, as `GPT.hidden_states` does.

    In a pipeline, the tokens pass through all stages, and the result is None on all stages except the last. Every rank
    of a pipeline must call this function with the same tokens, in the same order, and then `Channels.finish` once.
    """
    if not model.mesh.is_staged:
        return model.hidden_states(batch)
    filled, num_filled = model.sharing.filled(batch)
    hidden = _through_stages(model, filled, num_filled=num_filled)
    return None if hidden is None else enter_tensor_parallel(hidden, model.mesh)[:, : batch.tokens.shape[1]]


def _through_stages(model: GPT, batch: Batch, *, num_filled: int = 0) -> Tensor | None:
    """Run this rank's stages in a forward pass. Return the output of the last stage on the rank that holds this stage,
    and None on all other ranks.
    """
    pipeline, channels = model.mesh.pipeline, model.mesh.channels
    assert channels is not None, "the pipeline has one rank"
    schedule = interleaved(pipeline.size, pipeline.size, len(model.stages))
    for chunk, stage in enumerate(model.stages):
        action = Action(Pass.FORWARD, 0, chunk)
        hidden: Tensor | None = None
        if (message := schedule.received(pipeline.rank, action)) is not None:
            hidden = channels.start_receiving(message, *model.hidden_form(batch.tokens)).wait()
        output: Tensor = model(batch, num_filled=num_filled, stage_input=StageInput(stage, hidden))
        if stage.is_last:
            return output
        if (message := schedule.sent(pipeline.rank, action)) is not None:
            channels.send(message, output)
    return None
