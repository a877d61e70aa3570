"""Forward pass in which linear layers and embeddings do not compute, but return values that are given.

Between two linear layers, a module computes with values that no weight has touched. So the values may be any: each draw
takes random ones. A large module costs little, since nothing is multiplied by its matrices.
"""

import linecache
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from crosscut.cutting.looking.matrices import Matrix, may_be_matrix, recognise, stand_in
from crosscut.cutting.looking.states import State, copied, results_of
from crosscut.verification.foreign.wide import in_float64

_NOISE = 0.2


class Call(NamedTuple):
    """One call of a linear layer or an embedding."""

    name: str
    number: int
    """Number of earlier calls of the same module."""


class Failure(NamedTuple):
    """Error inside the module."""

    module: str
    """Class of the innermost module that ran."""
    text: str
    line: tuple[str, int] = ("", 0)
    """File and number of the line of this module's code that ran."""

    @property
    def place(self) -> str:
        """Words for the line: its file, its number and its code."""
        file, number = self.line
        return f"{Path(file).name}:{number} (`{linecache.getline(file, number).strip()}`)"


@dataclass
class Run:
    """Values that were seen in one forward pass."""

    calls: list[Call] = field(default_factory=list)
    inputs: dict[Call, Tensor] = field(default_factory=dict)
    """Inputs of the linear layers."""
    output: Any = None
    failure: Failure | None = None

    @property
    def results(self) -> list[Tensor]:
        """Tensors of floating point that the module returned."""
        return results_of(self.output)


Reply = Callable[[Call], Tensor]
"""Function that returns the output of a call."""


class _Stop(BaseException):
    """Ends a forward pass of which enough was seen."""


@dataclass
class Subject:
    """Module that is probed, on the CPU, in float64."""

    module: nn.Module
    inputs: Mapping[str, object]
    matrices: dict[str, Matrix] = field(default_factory=dict)
    shapes: dict[Call, torch.Size] = field(default_factory=dict)
    """Shapes of the outputs of all calls."""
    not_matrices: set[str] = field(default_factory=set)
    """Modules that hold a matrix, but do not multiply by it or look its rows up when they are called."""
    state: State = field(init=False)
    """State in which every run begins."""

    def play(self, reply: Reply, *, inputs: Mapping[str, object], stop: set[Call] | None = None) -> Run:
        """Run the module. Stops when all calls of `stop` have been seen. An error ends the run, and is told in it."""
        run, awaited, counts = Run(), set(stop or ()), Counter[str]()

        def forward(matrix: Matrix, *args: Tensor, **kwargs: Tensor) -> Tensor:
            call = Call(matrix.name, counts[matrix.name])
            counts[matrix.name] += 1
            run.calls.append(call)
            if not matrix.is_embedding:
                (x,) = (*args, *kwargs.values())
                run.inputs[call] = x.clone()
            awaited.discard(call)
            if stop and not awaited:
                raise _Stop
            return reply(call)

        try:
            forwards = {name: partial(forward, matrix) for name, matrix in self.matrices.items()}
            run.output = _run(self.module, inputs, forwards, self.state)
        except _Stop:
            pass
        except Exception as error:  # whatever the module raises on values that do not fit is an answer
            run.failure = _failure(error)
        return run


def _run(
    module: nn.Module, inputs: Mapping[str, object], forwards: Mapping[str, Callable[..., object]], state: State
) -> Any:
    """Run a module on copies of its inputs, some of its modules with other functions. Then bring its state back."""
    try:
        for name, function in forwards.items():
            vars(module.get_submodule(name))["forward"] = function
        with in_float64():
            return module(**copied(inputs))
    finally:
        state.restore()


def _failure(error: Exception) -> Failure:
    """Return the innermost module of an error's traceback."""
    inside, line = "", ("", 0)
    for frame, number in traceback.walk_tb(error.__traceback__):
        if isinstance(held := frame.f_locals.get("self"), nn.Module):
            inside, line = type(held).__name__, (frame.f_code.co_filename, number)
    text = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    return Failure(inside, text, line)


def find_matrices(module: nn.Module, inputs: Mapping[str, object]) -> Subject:
    """Find the linear layers and embeddings that a module calls. Raises what the module raises."""
    subject, drawn = Subject(module, inputs), torch.Generator().manual_seed(0)
    known: dict[tuple[type, tuple[int, ...]], tuple[bool, int] | None] = {}
    counts = Counter[str]()

    def forward(name: str, held: nn.Module, original: Callable[..., object], *args: object, **kwargs: object) -> Any:
        if name in subject.not_matrices:
            return original(*args, **kwargs)
        if name not in subject.matrices:
            key = (type(held), tuple(held.get_parameter("weight").shape))
            if key not in known or isinstance(held, nn.Embedding):
                found = recognise(name, held, original, args, kwargs)
                known[key] = None if found is None else (found.is_embedding, found.output_dim)
            if (traits := known[key]) is None:
                subject.not_matrices.add(name)
                materialize(held)
                return original(*args, **kwargs)
            subject.matrices[name] = Matrix(name, held, *traits)
        matrix = subject.matrices[name]
        if matrix.is_embedding:
            shape = _embedded_shape(matrix, original, args, kwargs)
        else:
            shape = torch.Size(matrix.output_shape(*args, *kwargs.values()))
        subject.shapes[Call(name, counts[name])] = shape
        counts[name] += 1
        return torch.randn(shape, dtype=torch.float64, generator=drawn)

    candidates = {name: each for name, each in module.named_modules() if may_be_matrix(each)}
    for name, each in module.named_modules():
        if name not in candidates:
            materialize(each)
    forwards = {name: partial(forward, name, each, each.forward) for name, each in candidates.items()}
    with torch.no_grad():
        _run(module, inputs, forwards, State(module))
    for name in subject.not_matrices:
        materialize(module.get_submodule(name))
    subject.state = State(module)
    return subject


def materialize(module: nn.Module) -> None:
    """Give a module's own parameters on `meta` zeros, to which every draw adds noise."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
            module._parameters[name] = nn.Parameter(zeros, parameter.requires_grad)


def _embedded_shape(
    matrix: Matrix, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> torch.Size:
    """Return the shape of an embedding's output: its own forward may take other things than ids."""
    with stand_in(matrix.module, torch.zeros(1, 1).double().expand(matrix.weight.shape)):
        return torch.Size(forward(*args, **kwargs).shape)


@dataclass
class Draw:
    """Random values of everything between the matrices, and what the whole module did with them."""

    subject: Subject
    inputs: Mapping[str, object]
    values: dict[nn.Parameter, Tensor]
    """Values of the parameters that belong to no matrix."""
    outputs: dict[Call, Tensor]
    run: Run

    def play(self, reply: Reply, *, stop: set[Call] | None = None) -> Run:
        """Run the module on the values of this draw."""
        with self._in_place():
            return self.subject.play(reply, inputs=self.inputs, stop=stop)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        kept = {parameter: parameter.data for parameter in self.values}
        for parameter, value in self.values.items():
            parameter.data = value
        try:
            yield
        finally:
            for parameter, value in kept.items():
                parameter.data = value


def draw(subject: Subject, seed: int) -> Draw:
    """Draw values, and run the whole module on them."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(value: Tensor) -> Tensor:
        return value.detach() + _NOISE * torch.randn(value.shape, dtype=value.dtype, generator=generator)

    owned = {id(each) for matrix in subject.matrices.values() for each in matrix.module.parameters()}
    values = {each: noisy(each) for each in subject.module.parameters() if id(each) not in owned}
    inputs = tree_map_only(Tensor, lambda x: noisy(x) if x.is_floating_point() else x, dict(subject.inputs))
    outputs: dict[Call, Tensor] = {}

    def reply(call: Call) -> Tensor:
        shape = subject.shapes.get(call, subject.shapes[Call(call.name, 0)])
        outputs[call] = torch.randn(shape, dtype=torch.float64, generator=generator)
        return outputs[call].clone()

    made = Draw(subject, inputs, values, outputs, Run())
    with torch.no_grad():
        made.run = made.play(reply)
    return made
