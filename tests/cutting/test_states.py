"""Looking at a module changes nothing, and an error while it is cut changes nothing."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from crosscut.config import ConfigError, Layout
from crosscut.cutting import Plan, Rule, Style, costs_of, cut, plan_cuts
from crosscut.launch import process_group
from crosscut.parallel import ParallelMesh, make_lone_mesh, make_mesh
from crosscut.parallel.collectives import own_rank
from crosscut.parallel.state.parameters import is_distributed
from tests.cutting import modules, plain
from tests.ranks import RankPool
from tests.refusals import refusal
from tests.verification.runs import CPU


class Slots:
    __slots__ = ("calls", "last")

    def __init__(self) -> None:
        self.calls = [0]


class Drawing(random.Random):
    """A generator with an attribute."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.calls = [0]


class Remembers(modules.Mlp):
    """Counts its calls, keeps results, keeps statistics, draws, and writes into its input."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm1d(modules.INNER), nn.Dropout(0.5)))
        self.calls, self.seen, self.cache, self.last = 0, [0], {"lengths": {3}}, torch.zeros(2)
        self.register_buffer("total", torch.zeros(1))
        self.slots, self.array, self.random = Slots(), np.zeros(4), Drawing(0)
        self.resized, self.locked = np.zeros(2), np.zeros(2)
        self.generators = (np.random.default_rng(0), np.random.RandomState(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache["lengths"].add(len(x))
        self.last += 1
        self.array += self.random.random() + sum(each.normal() for each in self.generators)
        self.array.shape = (2, 2)
        self.resized.resize(3, refcheck=False)
        self.locked += 1
        self.locked.setflags(write=False)
        self.random.calls.append(self.calls)
        self.slots.calls, self.slots.last = [*self.slots.calls, self.calls], x
        self.total = self.total + 1
        np.random.rand(random.randint(1, 3))
        x.add_(1)
        return super().forward(x)


def state_of(module: Any, x: Tensor) -> list[Any]:
    tensors = [each.clone() for each in (x, module.last, *module.parameters(), *module.buffers())]
    classes = [(type(each), each.training, [*vars(each)], [*each._forward_hooks]) for each in module.modules()]
    other = (module.calls, [*module.seen], {*module.cache["lengths"]}, [each.dtype for each in tensors], classes)
    held = (module.slots.calls, hasattr(module.slots, "last"), module.array.tolist(), module.random.getstate())
    held += (module.resized.tolist(), module.locked.tolist(), module.locked.flags.writeable, [*module.random.calls])
    drawn = (module.generators[0].bit_generator.state, module.generators[1].get_state()[2])
    return [*tensors, torch.get_rng_state(), other, random.getstate(), np.random.get_state()[2], held, drawn]


def assert_equal(one: list[Any], other: list[Any]) -> None:
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))


RULES = {"up": Rule(style=Style.COLWISE), "down": Rule(style=Style.ROWWISE, columns=("up",))}
PLAN = Plan(tensor=(2,), rules=RULES)


def test_looking_at_a_module_changes_nothing() -> None:
    module, x = Remembers(), torch.randn(5, modules.WIDTH)
    module.down.weight.requires_grad_(False)
    before = state_of(module, x)

    costs_of(module, {"x": x}, PLAN)
    assert_equal(state_of(module, x), before)
    found = plan_cuts(lambda: (module, {"x": x}, modules.total), (2,), prove=False)
    assert_equal(state_of(module, x), before)
    assert not module.down.weight.requires_grad
    assert found.rules


@pytest.fixture
def mesh() -> Iterator[ParallelMesh]:
    with process_group(CPU):
        yield make_lone_mesh(CPU)


def _loaded() -> tuple[str, bool]:
    """Error of this rank if `load` fails on rank 1, and whether the module is uncut."""
    with torch.device("meta"):
        module = modules.Mlp()

    def load(name: str) -> Tensor:
        if own_rank() == 1:
            raise OSError("disk")
        return torch.zeros(module.get_parameter(name).shape)

    told = refusal(Exception, cut, module, make_mesh(Layout(tensor=2), CPU), PLAN, load=load)
    return told.partition(",")[0], type(module) is modules.Mlp and not is_distributed(module.up.weight)


def test_an_error_on_one_rank_leaves_the_module_uncut_on_all(ranks: RankPool) -> None:
    assert ranks.run(2, _loaded) == [("A module must be cut on all ranks", True), ("disk", True)]


class Frozen(nn.Linear):
    """Refuses its last change."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "cut_site":
            raise RuntimeError("no changes")
        super().__setattr__(name, value)


def test_an_error_leaves_a_module_uncut(mesh: ParallelMesh) -> None:
    with torch.device("meta"):
        without_values = plain.Net()
    without_values.blocks[0].attention.slopes = torch.arange(1.0, plain.HEADS + 1)
    last = [name for name, _ in without_values.named_parameters()][-1]
    with_values = plain.Net()
    with_values.mix = Frozen(plain.WIDTH, plain.WIDTH + 2)

    def load(name: str) -> Tensor:
        return torch.zeros(3) if name == last else torch.zeros(without_values.get_parameter(name).shape)

    for module, options, told in ((without_values, {"load": load}, "`load` must"), (with_values, {}, "no changes")):
        before = [(name, id(each)) for name, each in module.state_dict(keep_vars=True).items()]
        classes = [(type(each), {**vars(each)}.keys()) for each in module.modules()]
        with pytest.raises((ConfigError, RuntimeError), match=told):
            cut(module, mesh, plain.PLAN, **options)
        assert [(name, id(each)) for name, each in module.state_dict(keep_vars=True).items()] == before
        assert [(type(each), {**vars(each)}.keys()) for each in module.modules()] == classes
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
