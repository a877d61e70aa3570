"""AdamW as in the paper's section 4.1.1: decoupled weight decay, except on biases and layer norms. Muon may update the
matrices inside the layers instead (`optimizer.matrices`).

PyTorch's fused kernel does the arithmetic on the local parts of distributed tensors. A scalar on the device, which
PyTorch calls `found_inf`, decides whether a step changes the weights, so the host never waits. The same kernel clips
the gradients. With a kernel of its own, clipping would read and write 8 bytes of each float32 gradient; here, it writes
4 more bytes, because the kernel stores the gradient that it has divided.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from crosscut.architecture import Parameter, describe
from crosscut.architecture.optimizers.muon import takes_muon
from crosscut.config import ModelConfig, OptimizerConfig
from crosscut.config.optimizer import MatrixOptimizer
from crosscut.parallel.state.parameters import local_part
from crosscut.training.optimization.muon import Muon, gradient_of

MOMENTS = ("exp_avg", "exp_avg_sq")
"""PyTorch's names for the two moments: the moving averages of the gradient and of its square."""

MOMENTUM = "momentum_buffer"
"""PyTorch's name for the momentum. If Muon updates a parameter, the momentum is the only state of the parameter."""

STATE = (*MOMENTS, MOMENTUM)
"""Names of all tensors in the optimizer's state that have the shape of their parameter. A parameter has either both
moments or the momentum.
"""


ParameterGroup = dict[str, Any]
"""Group of parameters of a PyTorch optimizer, with its settings."""


class AdamCall(NamedTuple):
    """Arguments of one call of the fused kernel: lists of local tensors with the same element type. Entry i of every
    list belongs to the same parameter.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


class Home(Protocol):
    """Interface of the memory in which the moments of AdamW and the momentum of Muon are stored between steps."""

    def new(self, parameter: Tensor) -> Tensor:
        """Return zeros with the shape and placement of `parameter`."""

    def keep(self, moment: Tensor, parameter: Tensor) -> Tensor:
        """Move `moment` to the memory in which this object stores moments, and return the moved tensor. `moment`
        belongs to `parameter` and comes from a checkpoint.
        """

    def pieces(self, whole: AdamCall) -> Iterator[AdamCall]:
        """Split `whole`, the arguments of the fused kernel, into pieces. Yield the pieces, each with its moments on the
        device. The caller must update each piece before it asks for the next piece.
        """

    def borrowed(self, moment: Tensor, parameter: Tensor) -> AbstractContextManager[Tensor]:
        """Return a context in which this rank's part of a moment of `parameter` is on the device. Changes of the part
        are stored at the end of the context.
        """


class OnDevice:
    """Storage of the moments on the device, beside the parameters."""

    def new(self, parameter: Tensor) -> Tensor:
        """Return zeros with the shape and placement of `parameter`."""
        return torch.zeros_like(parameter)

    def keep(self, moment: Tensor, parameter: Tensor) -> Tensor:
        """Convert a moment loaded from a checkpoint to the parameter's element type and device."""
        return moment.to(dtype=parameter.dtype, device=parameter.device)

    def pieces(self, whole: AdamCall) -> Iterator[AdamCall]:
        """Yield `whole` as one piece."""
        yield whole

    def borrowed(self, moment: Tensor, parameter: Tensor) -> AbstractContextManager[Tensor]:
        """Return a context that gives this rank's part of the moment, without a copy."""
        del parameter
        return nullcontext(local_part(moment))


class LocalAdamW(AdamW):
    """PyTorch's AdamW (same state, settings and checkpoints) with a different `step`. `Muon` may update some of the
    parameters; their state is the momentum alone.

    PyTorch's own step would send every argument through the dispatch of distributed tensors, and needs all moments on
    the device at once. The learning rate of a parameter is the rate of PyTorch's parameter group times a constant
    factor. The factors are not stored in the group, so a checkpoint can be loaded with other factors.
    """

    found_inf: Tensor | None = None
    """Float32 scalar on the device. If the scalar is 1, a step changes neither the parameters nor the state. If this
    attribute is None, every step is applied.
    """
    clip: Tensor | None = None
    """Scalar on the device, by which a step multiplies all gradients, and which it leaves multiplied. If `found_inf` is
    1, the gradients may then have any value. None means 1.
    """

    def __init__(
        self,
        groups: Iterable[ParameterGroup],
        config: OptimizerConfig,
        *,
        home: Home | None = None,
        factors: Mapping[Tensor, float] = MappingProxyType({}),
        muon: Muon | None = None,
    ) -> None:
        """Create the optimizer. `factors` maps a parameter to the factor of its learning rate; a parameter without an
        entry has the factor 1. `muon` updates the parameters that it describes. None means that AdamW updates all
        parameters.
        """
        betas = (config.beta1, config.beta2)
        super().__init__(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)
        self.home: Home = home or OnDevice()
        self.factors = dict(factors)
        self.muon = muon or Muon({})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients. Parameters without a gradient are skipped. `closure` must be
        None.
        """
        assert closure is None, "the loss is computed by the trainer"
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            for turn in self.muon.turns(used):
                self._update_matrices(turn, group)
            parameters = [p for p in used if p not in self.muon.matrices]
            for kind in dict.fromkeys(map(self._kind, parameters)):
                self._update([p for p in parameters if self._kind(p) == kind], group, factor=kind[1])

    def rates(self) -> dict[Tensor, float]:
        """Return the learning rate of each parameter in the next step."""
        return {p: group["lr"] * self._kind(p)[1] for group in self.param_groups for p in group["params"]}

    def prepare(self) -> None:
        """Create the optimizer state now. Without this call, the first step creates the state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict. The moments go directly to the memory in which `home` stores moments. PyTorch's own method
        would first copy all moments to the device.
        """
        saved = state_dict["state"]
        others = {key: {name: v for name, v in entry.items() if name not in STATE} for key, entry in saved.items()}
        super().load_state_dict({**state_dict, "state": others})
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(keys, parameters, strict=True):
            for name in STATE:
                if name in saved.get(key, {}):
                    self.state[parameter][name] = self.home.keep(saved[key][name], parameter)

    def _kind(self, parameter: Tensor) -> tuple[torch.dtype, float]:
        """Return the element type of a parameter and the factor of its learning rate. One call of the kernel updates
        all parameters for which these two values are equal.
        """
        return parameter.dtype, self.factors.get(parameter, 1.0)

    def _update_matrices(self, turn: Sequence[Tensor], group: ParameterGroup) -> None:
        rate = group["lr"] * self._kind(turn[0])[1]
        self._multiply([local_part(gradient_of(parameter)) for parameter in turn])
        with ExitStack() as borrowed:
            momenta = [
                borrowed.enter_context(self.home.borrowed(self._state_of(parameter)[MOMENTUM], parameter))
                for parameter in turn
            ]
            self.muon.update(turn, momenta, rate=rate, decay=group["weight_decay"], found_inf=self.found_inf)

    def _update(self, parameters: Sequence[Tensor], group: ParameterGroup, *, factor: float) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        whole = AdamCall(
            [local_part(parameter) for parameter in parameters],
            [local_part(gradient_of(parameter)) for parameter in parameters],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            steps,
        )
        divisor = None if self.clip is None else self.clip.reciprocal().float()
        if whole.parameters[0].dtype == torch.float64:  # the kernel takes no divisor wider than float32
            self._multiply(whole.gradients)
            divisor = None
        if self.found_inf is None:
            torch._foreach_add_(steps, 1)
        else:
            # A list of scalars: with one scalar tensor, PyTorch would read the value on the host and wait for it.
            torch._foreach_add_(steps, [1 - self.found_inf] * len(steps))
        for piece in self.home.pieces(whole):
            torch._fused_adamw_(
                piece.parameters,
                piece.gradients,
                piece.averages,
                piece.squares,
                [],
                piece.steps,
                lr=group["lr"] * factor,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=self.found_inf,
            )

    def _multiply(self, gradients: list[Tensor]) -> None:
        if self.clip is not None:
            torch._foreach_mul_(gradients, self.clip.to(gradients[0].dtype))

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state and parameter in self.muon.matrices:
            state[MOMENTUM] = self.home.new(parameter)
        elif not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update((name, self.home.new(parameter)) for name in MOMENTS)
        return state


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules by which the optimizer updates individual parameters. Parameters are identified by their names."""

    undecayed: Collection[str] = ()
    """Names of the parameters without weight decay."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factors of the learning rate. The learning rate of a parameter is `optimizer.learning_rate` times the parameter's
    factor."""
    matrices: Mapping[str, Parameter] = field(default_factory=dict)
    """Descriptions of the parameters that Muon updates. AdamW updates all other parameters."""


NO_RULES = Rules()
"""Rules by which AdamW updates all parameters in the same way."""


def rules_of(model: ModelConfig, config: OptimizerConfig) -> Rules:
    """Return the rules for the parameters of a model. Weight decay does not apply to norms and biases."""
    described = list(describe(model).parameters())
    has_muon = config.matrices is MatrixOptimizer.MUON
    return Rules(
        undecayed={parameter.name for parameter in described if not parameter.role.decays},
        factors={parameter.name: config.rate_factor(parameter.role.group) for parameter in described},
        matrices={parameter.name: parameter for parameter in described if has_muon and takes_muon(parameter)},
    )


def make_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    rules: Rules = NO_RULES,
    muon_dtype: torch.dtype | None = None,
    home: Home | None = None,
) -> LocalAdamW:
    """Create the optimizer for the trainable parameters of a model. The caller sets the learning rate before every step
    with `set_learning_rate`.

    `muon_dtype` is the element type in which Muon orthogonalizes; None means the parameters' own type. `home` stores
    the moments. By default, the moments are on the device.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [parameter for name, parameter in named if name not in rules.undecayed]
    others = [parameter for name, parameter in named if name in rules.undecayed]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    factors: dict[Tensor, float] = {
        parameter: rules.factors[name] for name, parameter in named if name in rules.factors
    }
    matrices: dict[Tensor, Parameter] = {
        parameter: rules.matrices[name] for name, parameter in named if name in rules.matrices
    }
    return LocalAdamW(groups, config, home=home, factors=factors, muon=Muon(matrices, dtype=muon_dtype))


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """Set the learning rate for the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = rate
