"""Runners call the layers that they are given to, and leave no trace in the model's names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.kernels import FLOAT8, ORDINARY
from crosscut.model import GPT
from crosscut.model.running import PLAIN, Runner, Runners
from crosscut.parallel import ColumnParallelLinear, RandomStreams, RowParallelLinear, make_mesh
from tests.model.twins import CONFIG, CPU, FAMILIES, batch
from tests.ranks import RankPool


def _model(runner_of: Callable[[int], Runner], family: str = "GPT-2") -> GPT:
    mesh = make_mesh(Layout(), CPU)
    streams = RandomStreams(mesh, seed=1)
    streams.restart(step=0)
    return GPT(FAMILIES[family], mesh=mesh, streams=streams, runners=Runners(layer=runner_of))


def _calls(family: str) -> list[tuple[int, str]]:
    """Layer and kind of each call that the runners of two layers make in a forward pass, in order."""
    seen: list[tuple[int, str]] = []

    def noting(index: int, kind: str) -> Any:
        def call(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
            seen.append((index, kind))
            return function(*inputs)

        return call

    kinds = ("layer", "core", "cheap")
    model = _model(lambda index: replace(PLAIN, **{kind: noting(index, kind) for kind in kinds}), family)
    model.loss(batch(0))
    return seen


def test_each_layer_calls_its_own_runner_for_all_that_the_runner_may_change(ranks: RankPool) -> None:
    of_layer = ["layer", "cheap", "core", "cheap", "cheap"]  # norm, attention core, norm, activation
    for family in ("GPT-2", "Llama"):
        found = ranks.run(1, _calls, family)[0]
        assert found == [(index, kind) for index in range(CONFIG.num_layers) for kind in of_layer]


def _multiplications() -> list[dict[str, tuple[bool, bool]]]:
    """For each linear layer of two blocks: whether its products are in 8 bits, and whether it skips the repeated
    product.
    """
    runners = [Runner(products=FLOAT8, skips_last_product=True), PLAIN]
    model = _model(lambda index: runners[min(index, 1)])
    return [
        {
            name: (module.products is FLOAT8, getattr(module, "_skips_repetition", False))
            for name, module in block.named_modules()
            if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        }
        for block in model.blocks[:2]
    ]


def test_linear_layers_have_the_products_of_their_runner_and_only_the_last_skips_a_repetition(ranks: RankPool) -> None:
    first, second = ranks.run(1, _multiplications)[0]
    assert {name for name, (is_float8, _) in first.items() if is_float8} == set(first)
    assert [name for name, (_, skips) in first.items() if skips] == ["mlp.contract"]
    assert set(second.values()) == {(False, False)}
    assert PLAIN.products is ORDINARY


def _names() -> list[list[str]]:
    runners = [PLAIN, replace(PLAIN, layer=torch.nn.Identity())]  # even a module would be no part of the layer
    models = [_model(lambda _, runner=runner: runner) for runner in runners]
    return [[name for name, _ in model.named_modules()] for model in models]


def test_a_runner_is_no_module_of_its_layer(ranks: RankPool) -> None:
    plain, other = ranks.run(1, _names)[0]
    assert plain == other
    assert not any("runner" in name for name in plain)
