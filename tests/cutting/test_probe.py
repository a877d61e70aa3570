"""Plans that are found, for modules of one difficulty each. The proof of what is found is slow."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from crosscut.config import ConfigError, TrainingError
from crosscut.cutting import Plan, Style, plan_cuts
from crosscut.cutting.finding.small import SMALL, build_lean, small_copies
from crosscut.cutting.plan import expand
from crosscut.cutting.probe import find_plan
from tests.cutting import modules, plain


def styles_of(module: nn.Module, tensor: tuple[int, ...] = (2, 4)) -> dict[str, str]:
    """Styles of the rules that are found, by names."""
    return {name: str(rule.style) for name, rule in find_plan(module, modules.inputs(), tensor).rules.items()}


def by_module(module: nn.Module, plan: Plan) -> dict[str, tuple[object, ...]]:
    """Rules by the names of modules, without words."""
    names = [name for name, _ in module.named_modules()]
    return {
        name: (rule.style, rule.parts)
        for pattern, rule in plan.rules.items()
        for name in expand(pattern, names)
        if rule.style is not Style.REPLICATE
    }


def test_the_plan_that_is_found_is_the_one_that_a_person_wrote() -> None:
    torch.manual_seed(0)
    module, inputs, _ = plain.build()

    found = find_plan(module, inputs)

    expected = by_module(module, plain.PLAN)
    # a row layer that gets whole values is never found, because gathering its output is right, too
    expected["sum"] = (Style.COLWISE_GATHER_OUTPUT, ())
    assert by_module(module, found) == expected
    assert {name: dict(values) for name, values in found.integers.items()} == {
        name: dict(values) for name, values in plain.PLAN.integers.items()
    }
    assert {name.rpartition(".")[2]: table.dimension for name, table in found.tables.items()} == {
        "sinks": 0,
        "slopes": 0,
    }
    assert found.rules["blocks.*.attention.k"].units == plain.KEY_HEADS
    assert all(rule.reason for rule in found.rules.values())


@pytest.mark.slow  # starts six ranks
def test_what_is_found_is_proven() -> None:
    plan_cuts(plain.build)


def test_a_norm_over_a_cut_width_stops_a_pair() -> None:
    plan = find_plan(modules.Mlp(nn.LayerNorm(modules.INNER)), modules.inputs())

    assert {name: rule.style for name, rule in plan.rules.items()} == {
        "up": Style.COLWISE_GATHER_OUTPUT,
        "down": Style.COLWISE_GATHER_OUTPUT,
    }
    assert "a slice of its output reaches all of the input of `down`" in plan.rules["up"].reason


def test_of_a_chain_the_first_two_layers_are_a_pair() -> None:
    assert styles_of(modules.Chain()) == {
        "layers.0": "colwise",
        "layers.1": "rowwise",
        "layers.2": "colwise_gather_output",
    }


def test_a_parameter_between_the_layers_is_whole_and_its_gradient_is_summed() -> None:
    assert styles_of(modules.Temperature(after=False))["scale"] == "replicated_with_grad_allreduce"


def test_a_parameter_that_is_used_on_whole_values_too_stops_the_pair() -> None:
    plan = find_plan(modules.Temperature(after=True), modules.inputs())

    assert plan.rules["up"].style is Style.COLWISE_GATHER_OUTPUT
    assert plan.rules["up"].reason == "`scale.factor` is used on whole values, too"


def test_a_weight_that_is_used_without_its_layer_stays_whole() -> None:
    plan = find_plan(modules.Direct(), modules.inputs())

    assert plan.rules["embed"].style is Style.REPLICATE
    assert "`embed.weight` is used without a call of its layer" in plan.rules["embed"].reason
    assert plan.rules["mlp.up"].style is Style.COLWISE


def test_layers_that_are_not_called_stay_whole() -> None:
    plan = find_plan(modules.Attends(), modules.inputs())

    assert plan.rules["attention"].reason == "`in_proj_weight` is used directly, and not by a call of its layer"
    assert plan.rules["attention.out_proj"].reason == "`weight` is used directly, and not by a call of its layer"


@pytest.mark.parametrize("change", ["hook", "parametrization"])
def test_layers_whose_output_others_change_stay_whole(change: str) -> None:
    module = modules.Mlp()
    if change == "hook":
        module.up.register_forward_hook(lambda layer, x, y: y + y.mean())
    else:
        parametrizations.weight_norm(module.up)

    assert "up" not in styles_of(module) or styles_of(module)["up"] == "replicate"
    assert styles_of(module)["down"] == "colwise_gather_output"


def test_reasons_name_modules_whose_names_are_numbers() -> None:
    """The reason was once that the input comes from `*`."""
    layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
    inputs = {"input": torch.randn(4, 8, dtype=torch.float64)}

    assert find_plan(layers[0], inputs).rules["2"].reason == "its input comes in slices from `0`"
    assert find_plan(nn.Sequential(*layers), inputs).rules["*.2"].reason == "its input comes in slices from `*.0`"


def test_a_size_that_ranks_cannot_divide_is_gathered_unevenly_or_stays_whole() -> None:
    module = nn.Sequential()
    module.forward = lambda x: module[1](module[0](x).tanh())  # type: ignore[method-assign]
    module.append(nn.Linear(modules.WIDTH, 7)).append(nn.Linear(7, 3))

    plan = find_plan(module, modules.inputs())

    assert plan.rules["0"].style is Style.COLWISE_GATHER_OUTPUT
    assert plan.rules["1"].reason == "its size 3 is too small for all ranks"


def test_the_module_is_left_as_it_was() -> None:
    module = modules.Mlp(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(modules.INNER))).double().train()
    module.down.weight.requires_grad_(False)
    before, attributes = (
        copy.deepcopy(module.state_dict()),
        {name: {*vars(each)} for name, each in module.named_modules()},
    )
    state, kinds = torch.get_rng_state(), [type(each) for each in module.modules()]

    find_plan(module, modules.inputs())

    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert {name: {*vars(each)} for name, each in module.named_modules()} == attributes
    assert [type(each) for each in module.modules()] == kinds
    assert all(each.training for each in module.modules())
    assert not module.down.weight.requires_grad
    assert all(each.grad is None for each in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("module", "inputs", "told"),
    [
        (modules.Skips, modules.inputs, "calls its layers in an order that depends on no values, but calls `"),
        (nn.Tanh, lambda: {"input": torch.ones(2)}, "must call linear layers or embeddings to be cut, but calls none"),
        (modules.Mlp, lambda: {"x": torch.ones(2, 3)}, "inputs that the module accepts in float64 on the CPU, but"),
    ],
)
def test_modules_that_cannot_be_probed(module: Any, inputs: Callable[[], dict[str, Tensor]], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("calls its", "call its")):
        find_plan(module(), inputs())


def test_numbers_of_ranks_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"`tensor` must be numbers of ranks, each at least 2, but is \(1, 2\)"):
        plan_cuts(plain.build, (1, 2))


def test_dropout_of_whole_values_between_layers_and_embeddings_that_are_measured_are_named() -> None:
    plan = find_plan(modules.Positions(), modules.inputs())

    assert {name: str(rule.style) for name, rule in plan.rules.items()} == {
        "up": "colwise",
        "key": "colwise",
        "down": "rowwise",
        "positions": "embedding_rowwise",
        "measured": "replicate",
        "drop": "replicate",
    }
    assert plan.rules["measured"].reason == "other modules read the shape of its weight"
    assert plan.rules["drop"].reason.startswith("it gets whole values between layers that are cut")


@pytest.mark.slow  # starts ranks
def test_dropout_of_whole_values_between_layers_is_proven() -> None:
    plan_cuts(modules.with_positions, (2,))


@pytest.mark.slow  # starts ranks
def test_a_plan_that_is_not_proven_is_an_error() -> None:
    with pytest.raises(TrainingError, match="The plan that was found is wrong at 2 tensor ranks"):
        plan_cuts(hides_a_path, (2,))


class Hides(modules.Mlp):
    """Computes something else if gradients are needed for its weights, which the search cannot see."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        rows = getattr(self.up.weight, "shape", (0,))[0]
        out: Tensor = self.down(y.tanh())
        return out if rows == modules.INNER else 2 * out


def hides_a_path() -> Any:
    return Hides(), modules.inputs(), modules.total


def test_a_large_module_is_probed_without_its_memory() -> None:
    start = time.perf_counter()
    module, inputs, _ = build_lean(modules.large)

    plan = find_plan(module, inputs)

    assert {name: str(rule.style) for name, rule in plan.rules.items()} == {
        "layers.*.0": "colwise",
        "layers.*.2": "rowwise",
        "embed": "embedding_rowwise",
    }
    assert time.perf_counter() - start < 60


def test_a_smaller_copy_keeps_the_kinds_of_layers() -> None:
    module = build_lean(modules.large)[0]

    small, inputs, _ = next(small_copies(modules.large, module))()

    assert isinstance(small, modules.Stack)
    assert sum(each.numel() for each in small.parameters()) < SMALL
    assert vars(small.config) == {"words": 1024, "width": 64, "inner": 256, "depth": 2, "end": 99_999 % 1024}
    assert small(**inputs).isfinite().all()


class FixedWidth(nn.Module):
    """Attention whose last line has a size of the uncut module."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o, self.heads = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), 4

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, v = (part(x).view(batch, length, self.heads, 2).transpose(1, 2) for part in (self.q, self.v))
        y = (q @ v.transpose(2, 3)).softmax(-1) @ v
        found: Tensor = self.o(y.transpose(1, 2).reshape(batch, length, width))
        return found


def test_a_line_that_keeps_heads_from_being_cut_is_named() -> None:
    """The reason is what is left after the heads have been divided."""
    plan = find_plan(FixedWidth(), {"x": torch.randn(2, 3, 8)})
    rule = plan.rules["q"]
    assert rule.style is Style.COLWISE_GATHER_OUTPUT
    assert "fails on a slice at test_probe.py:" in rule.reason
    assert "reshape(batch, length, width)" in rule.reason
    assert "write -1" in rule.reason
