"""Functions that the tests of pipeline stages run on ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from crosscut.config import RunConfig
from crosscut.parallel import find_drift
from crosscut.parallel.state.parameters import whole
from tests.training.jobs import parts

EXACT = ("training.precision=float64", "training.batch_size=8", "training.micro_batch_size=1", "model.num_layers=4")
LLAMA = (
    "model.positions=rotary",
    "model.norm=rms",
    "model.layers=attention swiglu",
    "model.mlp_size=96",
    "model.biases=none",
    "model.num_kv_heads=2",
)


def whole_gradients(trainer: Any) -> dict[str, Tensor]:
    """The gradients of this rank's parameters, whole and without padding."""
    rows = trainer.model.padded_rows
    named = trainer.model.named_parameters()
    return {name: whole(p.grad)[: rows.get(name)].clone() for name, p in named if p.grad is not None}


def course(run: RunConfig, num_steps: int) -> dict[str, Any]:
    """Gradients of the first step, and the loss and gradient norm of each step."""
    trainer, batches = parts(run)
    trainer.accumulate(0, batches.micro_batches(0))
    gradients = whole_gradients(trainer)
    for parameter in trainer.parameters:
        parameter.grad = None
    results = [trainer.step(step, batches.micro_batches(step)).wait() for step in range(num_steps)]
    return {
        "gradients": gradients,
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
    }


def flops_of_step(run: RunConfig) -> int:
    """FLOPs of this rank's matrix products in one step."""
    trainer, batches = parts(run)
    micro_batches = batches.micro_batches(0)
    with FlopCounterMode(display=False) as counter:
        trainer.accumulate(0, micro_batches)
    return counter.get_total_flops()


def drift_after(run: RunConfig, name: str, rank: int) -> Any:
    """Change one element of a parameter on one rank, and return the difference that the replicas' comparison finds."""
    trainer, _ = parts(run)
    named = dict(trainer.model.named_parameters())
    assert find_drift(named, trainer.mesh) is None
    if torch.distributed.get_rank() == rank:
        named[name].data.to_local().view(-1)[3] += 0.5
    return find_drift(named, trainer.mesh)


def sent_by_stage(run: RunConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Messages that one rank sends to the neighbouring stages in a step: kind and shape of each tensor, in order."""
    trainer, batches = parts(run)
    channels, sent = trainer.mesh.channels, []
    send = channels.send

    def noted(message: Any, x: Tensor) -> None:
        sent.append((str(message.channel.kind), tuple(x.shape)))
        send(message, x)

    channels.send = noted
    trainer.step(0, batches.micro_batches(0))
    return sent


def most_leaving(run: RunConfig) -> int:
    """Largest number of sent tensors that one rank keeps during a step."""
    trainer, batches = parts(run)
    channels, numbers = trainer.mesh.channels, []
    send = channels.send

    def noted(message: Any, x: Tensor) -> None:
        send(message, x)
        numbers.append(len(channels._leaving))

    channels.send = noted
    trainer.step(0, batches.micro_batches(0))
    assert not channels._leaving
    return max(numbers)


def deferred_per_backward(run: RunConfig) -> list[int]:
    """Number of weight gradients that each backward pass of a rank puts off."""
    trainer, batches = parts(run)
    numbers, collecting = [], trainer.deferral.collecting

    class Counted:
        def __enter__(self) -> Any:
            self.inner = collecting()
            self.deferred = self.inner.__enter__()
            return self.deferred

        def __exit__(self, *failure: object) -> None:
            numbers.append(len(self.deferred))
            self.inner.__exit__(*failure)

    trainer.deferral.collecting = Counted
    trainer.accumulate(0, batches.micro_batches(0))
    return numbers


def accumulations(run: RunConfig) -> dict[str, tuple[int, int]]:
    """How often hooks after the accumulation of each parameter's gradient fire in a step, and how often the gradient
    had changed since the hook fired before.
    """
    trainer, batches = parts(run)
    found: dict[str, tuple[int, int]] = {}
    last: dict[str, Tensor] = {}

    def noted(name: str) -> Callable[[Tensor], None]:
        def count(parameter: Tensor) -> None:
            fired, changed = found.get(name, (0, 0))
            now = None if parameter.grad is None else parameter.grad.to_local().clone()
            is_new = now is not None and (name not in last or not torch.equal(now, last[name]))
            found[name] = fired + 1, changed + is_new
            if now is not None:
                last[name] = now

        return count

    for name, parameter in trainer.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(noted(name))
    trainer.accumulate(0, batches.micro_batches(0))
    return found
