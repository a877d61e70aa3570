"""Plans that do not fit their module: refused before anything changes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from crosscut.config import ConfigError, LayoutError
from crosscut.cutting import Plan, Rule, Style, Table, cut
from crosscut.cutting.resolution import resolve
from crosscut.launch import process_group
from crosscut.parallel import ParallelMesh, make_lone_mesh
from tests.cutting import plain
from tests.verification.runs import CPU

COLWISE, ROWWISE = Rule(style=Style.COLWISE), Rule(style=Style.ROWWISE)


def plan(**changes: Any) -> Plan:
    rules = changes.pop("rules", {})
    return replace(plain.PLAN, tensor=(2, 3, 4), integers={}, rules={**plain.RULES, **rules}, **changes)


WRONG = [
    (plan(rules={"blocks.*.attention.r": COLWISE}), 2, r"`blocks\.\*\.attention\.r` in a plan must name a module"),
    (plan(rules={"blocks.*.attention.q": COLWISE}), 2, r"`blocks\.0\.attention\.q` must have one rule in a plan"),
    (plan(rules={"norm": COLWISE}), 2, "matches none"),
    (plan(rules={"blocks.*.norm": COLWISE}), 2, r"`blocks\.0\.norm` must be a linear layer .* but is a LayerNorm"),
    (plan(rules={"sum": Rule(style=Style.EMBEDDING_ROWWISE)}), 2, "`sum` must be an `nn.Embedding` .* but is a Linear"),
    (plan(rules={"head": ROWWISE}), 2, "`head.weight` must be cut like `embed.weight`"),
    (
        plan(rules={"blocks.2.attention.qkv": Rule(style=Style.PACKED_COLWISE, parts=(8, 4))}),
        2,
        r"`parts` of `blocks\.2\.attention\.qkv` must add up to 16, the layer's output size, but add up to 12",
    ),
    (
        plan(rules={"blocks.3.attention.kv_a": Rule(style=Style.MLA_KV_A_PROJ, parts=(6, 4))}),
        2,
        r"`parts` of `blocks\.3\.attention\.kv_a` must add up to 8",
    ),
    (
        plan(rules={"sum": Rule(style=Style.ROWWISE, columns=("blocks.0.norm", "blocks.0.dropout"))}),
        2,
        r"`columns` of `sum` must name layers that have a rule, but `blocks\.0\.dropout` has none",
    ),
    (plan(tables={"slopes": Table(dimension=0)}), 2, "`slopes` in a plan must name a module"),
    (
        plan(tables={"head.weight": Table(dimension=0)}),
        2,
        "`head.weight` must be cut once, but has a rule and is a tab",
    ),
    (plan(tables={"blocks.0.attention.slopes": Table(dimension=1)}), 2, "must be a dimension of .* but is 1"),
]
TOO_MANY = [
    (plan(), 3, "must divide 8, the size of a part of `sum`, but is 3"),
    (
        plan(rules={"mix": Rule(style=Style.COLWISE, units=2)}),
        3,
        r"must divide 2, the number of pieces .* a multiple of 2",
    ),
    (
        plan(rules={"mix": COLWISE, "sum": Rule(style=Style.REPLICATE)}),
        4,
        "must divide 10, the size of a part of `mix`",
    ),
    (plan(rules={"sum": Rule(style=Style.ROWWISE, units=2)}), 4, "ranks cannot share the rows of a layer"),
    (plan(rules={"mix": Rule(style=Style.COLWISE, units=3)}), 2, "`units` of `mix` must divide the layer's size"),
    (plain.PLAN, 3, "must be one of the plan's"),
]


@pytest.mark.parametrize(("wrong", "num_ranks", "told"), WRONG)
def test_plans_that_do_not_fit_are_refused(wrong: Plan, num_ranks: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(plain.Net(), wrong, num_ranks)


@pytest.mark.parametrize(("wrong", "num_ranks", "told"), TOO_MANY)
def test_numbers_of_ranks_that_do_not_divide_are_refused(wrong: Plan, num_ranks: int, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        resolve(plain.Net(), wrong, num_ranks)


def test_rows_that_do_not_reach_all_ranks_are_refused() -> None:
    embedding = nn.Sequential(nn.Embedding(9, 8))
    with pytest.raises(LayoutError, match="must leave each rank a part of the 9 rows of `0`, but is 4"):
        resolve(embedding, Plan(tensor=(4,), rules={"0": Rule(style=Style.EMBEDDING_ROWWISE)}), 4)


def test_integers_that_are_none_are_refused() -> None:
    wrong = replace(plain.PLAN, integers={"blocks.0.attention": {"heads": (2, 1)}})
    with pytest.raises(ConfigError, match=r"`heads` of `blocks\.0\.attention` must be a whole number .* but is None"):
        resolve(plain.Net(), wrong, 2)


def test_embeddings_with_options_that_need_the_whole_are_refused() -> None:
    embedding = nn.Sequential(nn.Embedding(8, 8, max_norm=1.0))
    with pytest.raises(ConfigError, match="`0` must be an embedding without `max_norm`"):
        resolve(embedding, Plan(tensor=(2,), rules={"0": Rule(style=Style.EMBEDDING_ROWWISE)}), 2)


@pytest.fixture
def mesh() -> Iterator[ParallelMesh]:
    with process_group(CPU):
        yield make_lone_mesh(CPU)


NOTHING = Plan(tensor=(2,), rules={})


def test_a_module_that_keeps_its_parameters_twice_is_refused(mesh: ParallelMesh) -> None:
    with pytest.raises(
        ConfigError, match="`LSTM` must hold its parameters only as parameters, but its attribute `_fla"
    ):
        cut(nn.LSTM(4, 4), mesh, NOTHING)


def test_a_module_with_another_forward_is_refused(mesh: ParallelMesh) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].forward = torch.relu  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="`0` must have the `forward` of its class, but other code has replaced it"):
        cut(module, mesh, NOTHING)


def test_a_module_without_values_needs_a_loader(mesh: ParallelMesh) -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"`weight` must have values, but is on the device meta. Give `load`"):
        cut(module, mesh, NOTHING)
    assert type(module) is nn.Linear


class Properties(nn.Module):
    """Integers that are computed, with a config that refuses changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(4, 8), NamedTuple("Config", [("heads", int)])(4)

    @property
    def heads(self) -> int:
        return 4


@pytest.mark.parametrize("attribute", ["heads", "config.heads"])
def test_integers_that_cannot_be_set_are_refused(attribute: str) -> None:
    wrong = Plan(tensor=(2,), rules={"layer": COLWISE}, integers={"": {attribute: (2,)}})
    with pytest.raises(ConfigError, match=f"`{attribute}` of `` must be a whole number .* is a property that computes"):
        resolve(Properties(), wrong, 2)


class Two(nn.Module):
    """Two modules of one class, which may share things."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.parts, self.heads = nn.ModuleList([one, other]), 4


def test_two_patterns_for_one_table_or_integer_are_refused() -> None:
    module = Two(plain.Grouped(), plain.Grouped())
    tables = {f"parts.{at}.slopes": Table(dimension=0) for at in ("*", "0")}
    with pytest.raises(ConfigError, match=r"`parts\.0\.slopes` must have one table in a plan, but matches `parts\.\*"):
        resolve(module, Plan(tensor=(2,), rules={}, tables=tables), 2)
    integers = {f"parts.{at}": {"num_heads": (2,)} for at in ("1", "*")}
    with pytest.raises(ConfigError, match=r"`parts\.1` must have one value of `num_heads` in a plan, but matches"):
        resolve(Two(plain.Fused(), plain.Fused()), Plan(tensor=(2,), rules={}, integers=integers), 2)
    different = {"parts.*": {"num_heads": (2,)}, "parts.0": {"split_size": (4,)}}
    resolved = resolve(Two(plain.Fused(), plain.Fused()), Plan(tensor=(2,), rules={}, integers=different), 2)
    assert resolved.integers == {"parts.0": {"num_heads": 2, "split_size": 4}, "parts.1": {"num_heads": 2}}


def test_a_buffer_that_two_modules_share_is_cut_in_both_or_in_none() -> None:
    module = Two(plain.Grouped(), plain.Grouped())
    module.parts[1].slopes = module.parts[0].slopes
    with pytest.raises(ConfigError, match=r"`parts\.1\.slopes` must be cut like .* the same buffer"):
        resolve(module, Plan(tensor=(2,), rules={}, tables={"parts.0.slopes": Table(dimension=0)}), 2)
    both = Plan(tensor=(2,), rules={}, tables={"parts.*.slopes": Table(dimension=0)})
    assert not resolve(module, both, 2).shares["parts.1.slopes"].is_whole


def test_a_module_with_two_names_has_one_rule() -> None:
    layer = nn.Linear(4, 4)
    module = nn.Sequential(layer, layer)
    with pytest.raises(ConfigError, match="`1` must have one rule in a plan, but matches `0` and `1`"):
        resolve(module, Plan(tensor=(2,), rules={"0": COLWISE, "1": Rule(style=Style.REPLICATE)}), 2)
    assert [*resolve(module, Plan(tensor=(2,), rules={"1": COLWISE}), 2).layers] == ["0"]


def test_uncut_logits_need_one_head(mesh: ParallelMesh) -> None:
    with pytest.raises(ConfigError, match=r"`gather_logits=False` needs a plan with one layer .* but the plan has 2"):
        cut(plain.Net(), mesh, plain.PLAN, gather_logits=False)


class OfTransposed(nn.Linear):
    """Linear layer written in another way."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 3 * self.weight, self.bias)


class TripledAfter(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * nn.Linear.forward(self, x)


class TripledRows(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, 3 * self.weight)


def test_a_layer_that_computes_the_same_in_other_words_is_cut() -> None:
    assert resolve(nn.Sequential(OfTransposed(4, 4)), Plan(tensor=(2,), rules={"0": COLWISE}), 2).shares


@pytest.mark.parametrize("layer", [Tripled(4, 4), TripledAfter(4, 4), TripledRows(4, 4)])
def test_a_layer_that_computes_something_else_is_refused(layer: nn.Module) -> None:
    rule = Rule(style=Style.EMBEDDING_ROWWISE) if isinstance(layer, nn.Embedding) else COLWISE
    with pytest.raises(ConfigError, match="`0` must compute what its base class computes to be cut, but Tripled"):
        resolve(nn.Sequential(layer), Plan(tensor=(2,), rules={"0": rule}), 2)


def test_a_layer_whose_weight_is_computed_is_refused() -> None:
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="`0` must have a parameter `weight` to be cut, but computes it from others"):
        resolve(nn.Sequential(layer), Plan(tensor=(2,), rules={"0": COLWISE}), 2)
