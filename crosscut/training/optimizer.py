"""AdamW as in the paper's section 4.1.1: decoupled weight decay, not on biases and layer norms.

The arithmetic is PyTorch's fused kernel, on the local parts of distributed tensors. Whether a step may change anything
is a number on the device (`found_inf`, as PyTorch calls it), so that no host has to wait for it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from crosscut.architecture import describe
from crosscut.config import ModelConfig, OptimizerConfig
from crosscut.parallel.state.parameters import local_part

MOMENTS = ("exp_avg", "exp_avg_sq")
"""PyTorch's names for the moving averages of a gradient and of its square."""


class Piece(NamedTuple):
    """Arguments of one call of the fused kernel: local tensors of one type, one of each kind per entry."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


class Home(Protocol):
    """Home of the moments between steps."""

    def new(self, parameter: Tensor) -> Tensor:
        """Zeros placed as a parameter."""

    def keep(self, moment: Tensor, parameter: Tensor) -> Tensor:
        """A moment that was loaded, in this place."""

    def pieces(self, whole: Piece) -> Iterator[Piece]:
        """All of `whole`, piece by piece, with the moments on the device; the user changes a piece before the next."""


class OnDevice:
    """Moments lie beside their parameters."""

    def new(self, parameter: Tensor) -> Tensor:
        """Zeros placed as a parameter."""
        return torch.zeros_like(parameter)

    def keep(self, moment: Tensor, parameter: Tensor) -> Tensor:
        """A moment that was loaded, in the parameter's type and on its device."""
        return moment.to(dtype=parameter.dtype, device=parameter.device)

    def pieces(self, whole: Piece) -> Iterator[Piece]:
        """All at once."""
        yield whole


class LocalAdamW(AdamW):
    """PyTorch's AdamW with its state, its settings and its checkpoints, and a step of its own.

    PyTorch's would send every argument through the dispatch of distributed tensors, and needs all moments on the
    device at once.
    """

    found_inf: Tensor | None = None
    """A float32 scalar on the device: where it is 1, a step changes neither parameters nor state."""

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, *, home: Home | None = None) -> None:
        betas = (config.beta1, config.beta2)
        super().__init__(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)
        self.home: Home = home or OnDevice()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change the parameters by their gradients; those without one are passed over. Takes no closure."""
        assert closure is None, "the loss is computed by the trainer"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for dtype in dict.fromkeys(p.dtype for p in parameters):
                self._update([p for p in parameters if p.dtype == dtype], group)

    def prepare(self) -> None:
        """Make now the state that the first step would make."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's, but the moments go to where they live: PyTorch would take all of them to the device."""
        saved = state_dict["state"]
        others = {key: {name: v for name, v in entry.items() if name not in MOMENTS} for key, entry in saved.items()}
        super().load_state_dict({**state_dict, "state": others})
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(keys, parameters, strict=True):
            for name in MOMENTS:
                if name in saved.get(key, {}):
                    self.state[parameter][name] = self.home.keep(saved[key][name], parameter)

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        whole = Piece(
            [local_part(parameter) for parameter in parameters],
            [local_part(_gradient(parameter)) for parameter in parameters],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            steps,
        )
        if self.found_inf is None:
            torch._foreach_add_(steps, 1)
        else:
            # A list, since a single scalar tensor would be read by the host.
            torch._foreach_add_(steps, [1 - self.found_inf] * len(steps))
        for piece in self.home.pieces(whole):
            torch._fused_adamw_(
                piece.parameters,
                piece.gradients,
                piece.averages,
                piece.squares,
                [],
                piece.steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=self.found_inf,
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update((name, self.home.new(parameter)) for name in MOMENTS)
        return state


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, *, undecayed: Collection[str] = (), home: Home | None = None
) -> LocalAdamW:
    """AdamW over a model's parameters. The learning rate is set at every step.

    Weight decay does not apply to the parameters named in `undecayed` (for a whole model: `undecayed_parameters`).
    `home` is the place of the moments, by default beside the parameters.
    """
    named = list(model.named_parameters())
    decayed = [parameter for name, parameter in named if name not in undecayed]
    others = [parameter for name, parameter in named if name in undecayed]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return LocalAdamW(groups, config, home=home)


def undecayed_parameters(model: ModelConfig) -> set[str]:
    """Names of a model's parameters to which weight decay does not apply: those of norms, and biases."""
    return {parameter.name for parameter in describe(model).parameters() if not parameter.role.decays}


def apply_settings(optimizer: AdamW, config: OptimizerConfig) -> None:
    """Put the run's settings in force again after a checkpoint has brought back those that it was written with."""
    for group, decay in zip(optimizer.param_groups, (config.weight_decay, 0.0), strict=True):
        group.update(weight_decay=decay, betas=(config.beta1, config.beta2), eps=config.epsilon)


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
