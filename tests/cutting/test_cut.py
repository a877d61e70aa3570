"""Cut modules: equal to the uncut module in float64, in a proof and in a user's own loop."""

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from crosscut.config import CheckpointError, ConfigError, Layout
from crosscut.cutting import Plan, Rule, Style, costs_of, cut, gathered_state_dict, print_plan
from crosscut.cutting.probe import find_plan
from crosscut.cutting.shares import WHOLE
from crosscut.cutting.sources import Source
from crosscut.parallel import CollectiveRecorder, Sent, enter_tensor_parallel, make_mesh, vocab_parallel_cross_entropy
from crosscut.parallel.collectives import gather_from_all
from crosscut.verification.foreign.cuts import ForeignCut
from tests.cutting import plain
from tests.ranks import RankPool
from tests.verification.foreign.test_cuts import assert_same, prove
from tests.verification.runs import CPU

CUT = ForeignCut(plain.build, partial(cut, plan=plain.PLAN))
SMALL = ForeignCut(partial(plain.build, is_small=True), partial(cut, plan=plain.SMALL))


def test_a_block_equals_the_uncut_one(ranks: RankPool) -> None:
    (report,) = prove(ranks, [SMALL])
    assert_same(report)
    draws = {check.name: check.told for check in report.checks}["random numbers"]
    assert draws == "6 draws on each rank"


@pytest.mark.slow  # the quick test proves a block
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_style_equals_the_uncut_module(ranks: RankPool, num_ranks: int) -> None:
    (report,) = prove(ranks, [CUT], num_ranks)
    assert_same(report)


# --- a user's own loop -----------------------------------------------------------------------------------------------


def net() -> tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]:
    torch.manual_seed(0)
    module, inputs, loss = plain.build()
    return module.double().eval(), inputs, loss


def train(module: nn.Module, inputs: dict[str, Tensor], loss: Callable[[Any], Tensor]) -> list[float]:
    """Three steps with PyTorch's own norm and optimizer. Returns the norms."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    norms = []
    for _ in range(3):
        loss(module(**inputs)).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        norms.append(float(norm if type(norm) is Tensor else norm.full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def trained_as_uncut(layout: Layout, wrap: Callable[..., nn.Module]) -> tuple[float, float] | None:
    """On a rank: the largest differences from the uncut module's norms and weights after three steps."""
    mesh = make_mesh(layout, CPU)
    uncut, inputs, loss = net()
    before, norms = {name: tensor.clone() for name, tensor in uncut.state_dict().items()}, train(uncut, inputs, loss)
    module = cut(net()[0], mesh, plain.PLAN)
    wrapped = wrap(module, mesh)
    start = gathered_state_dict(module)
    found = train(wrapped, inputs, loss)
    end = gathered_state_dict(module)
    if not mesh.is_first_rank:
        assert not start
        return None
    assert list(start) == list(before) == list(end)
    assert all(torch.equal(start[name], tensor) for name, tensor in before.items())
    apart = [(end[name] - tensor).abs().max().item() for name, tensor in uncut.state_dict().items()]
    return max(abs(one - other) for one, other in zip(norms, found, strict=True)), max(apart)


def plainly(module: nn.Module, _mesh: Any) -> nn.Module:
    return module


def sharded(module: Any, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in module.blocks:
        fully_shard(block, mesh=mesh.data.device_mesh)
    fully_shard(module, mesh=mesh.data.device_mesh)
    return module  # type: ignore[no-any-return]


def compiled(module: nn.Module, _mesh: Any) -> nn.Module:
    return torch.compile(module, fullgraph=True, backend="aot_eager")  # type: ignore[return-value]


LOOPS = [
    (Layout(tensor=2), plainly),
    pytest.param(Layout(tensor=4), plainly, marks=pytest.mark.slow),  # the quick test uses two ranks
    pytest.param(Layout(tensor=2, data=2), sharded, marks=pytest.mark.slow),
    pytest.param(Layout(tensor=2), compiled, marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("layout", "wrap"), LOOPS)
def test_torchs_own_norm_and_optimizer_train_the_uncut_module(
    ranks: RankPool, layout: Layout, wrap: Callable[..., nn.Module]
) -> None:
    apart = ranks.run(layout.world_size, trained_as_uncut, layout, wrap, time_limit=300.0)[0]
    assert max(apart) < 1e-9


# --- weights from elsewhere, messages, logits that stay cut -----------------------------------------------------------


def loaded_alike(folder: Path) -> None:
    """On a rank: a module without values gets those of a function, or of files, and each rank its parts."""
    mesh = make_mesh(Layout(tensor=2), CPU)
    uncut = net()[0]
    want = dict(uncut.state_dict())
    if mesh.is_first_rank:
        save_file({name: each for name, each in want.items() if name != "head.weight"}, folder / "model.safetensors")
    gather_from_all(None)  # the file is complete
    for load in (want.__getitem__, folder):
        with torch.device("meta"):
            module = plain.Net().double()
        module.blocks[0].attention.slopes = torch.arange(1.0, plain.HEADS + 1).double()
        found = gathered_state_dict(cut(module, mesh, plain.PLAN, load=load))
        assert all(torch.equal(tensor, want[name]) for name, tensor in found.items())
        assert module.head.weight is not module.embed.weight  # both are views of one parameter
        assert module.head._parameters["weight"] is module.embed._parameters["weight"]


@pytest.mark.slow  # the quick test gathers the weights of a module with values
def test_modules_without_values_are_loaded_part_by_part(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, loaded_alike, tmp_path)


def test_a_folder_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    source, like = Source(tmp_path), torch.empty(4, 4, device="meta")
    with pytest.raises(CheckpointError, match=r"must hold a tensor `weight` of shape \(4, 4\), but has one of shape"):
        source.require(["weight"], like)
    with pytest.raises(
        CheckpointError, match=r"must hold a tensor `bias` of shape \(4, 4\), but has none of this name"
    ):
        source.require(["bias"], like)
    with pytest.raises(ConfigError, match=r"`load` must return a tensor of shape \(4, 4\) for `weight`, but"):
        Source(lambda _: torch.zeros(3)).part(["weight"], like, WHOLE, 0)


def sent_as_planned() -> None:
    """On a rank: a forward and a backward pass send what the plan's cost says."""
    mesh = make_mesh(Layout(tensor=2), CPU)
    module, inputs, loss = net()
    cost = costs_of(module, inputs, plain.PLAN)[0]
    cut(module, mesh, plain.PLAN)
    with CollectiveRecorder(mesh) as forward:
        found = loss(module(**inputs))
    with CollectiveRecorder(mesh) as backward:
        found.backward()
    assert (Counter(forward.sent), Counter(backward.sent)) == (cost.forward, cost.backward)
    held = {id(parameter): parameter._local_tensor.numel() for parameter in module.parameters()}
    assert sum(held.values()) <= cost.parameters_per_rank < 0.6 * cost.num_parameters


def logits_stay_cut() -> None:
    """On a rank: a head that is not gathered, and the loss without any logits."""
    mesh = make_mesh(Layout(tensor=2), CPU)
    rules = {name: rule for name, rule in plain.RULES.items() if name not in ("mix", "sum")}
    plan = replace(plain.PLAN, rules=rules)
    (uncut, inputs, loss), module = net(), net()[0]
    cut(module, mesh, plan, gather_logits=False)
    hidden: list[Tensor] = []
    module.head.register_forward_pre_hook(lambda _, x: hidden.append(x[0]))
    want = uncut(**inputs)
    first = 7 * mesh.tensor.rank
    torch.testing.assert_close(module(**inputs)["logits"], want["logits"][..., first : first + 7])
    weight = F.pad(module.head.weight, (0, 0, 0, 7 - module.head.weight.shape[0]))
    entered, targets = enter_tensor_parallel(hidden[0], mesh).flatten(0, 1), inputs["tokens"].flatten()
    found = vocab_parallel_cross_entropy(entered, weight, targets, vocab_size=plain.VOCAB, axis=mesh.tensor)
    torch.testing.assert_close(found / len(targets), loss(want))


def drawn_alike() -> None:
    """On a rank: dropout in a recomputation of a block drops as in the first pass."""
    mesh = make_mesh(Layout(tensor=2), CPU)
    gradients = []
    for recomputes in (False, True):
        module, inputs, loss = net()
        cut(module.train(), mesh, plain.PLAN)
        if recomputes:
            for block in module.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        torch.manual_seed(5)
        loss(module(**inputs)).backward()
        gradients.append(module.blocks[1].mlp.gate_up._parameters["weight"].grad.full_tensor())
    torch.testing.assert_close(*gradients)


def used_in_other_ways() -> None:
    """On a rank: an input that gets a gradient later, a copy, a parameter that is replaced, and second derivatives."""
    mesh = make_mesh(Layout(tensor=2), CPU)
    rules = {"0": Rule(style=Style.COLWISE), "2": Rule(style=Style.ROWWISE, columns=("0",))}
    torch.manual_seed(0)
    uncut = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
    module = cut(copy.deepcopy(uncut), mesh, Plan(tensor=(2,), rules=rules))
    x, y = (torch.ones(3, 4, dtype=torch.float64) for _ in range(2))
    module[0](x)  # before the input needs a gradient
    copied = copy.deepcopy(module)
    for each in (module, copied):
        x.grad = None
        each(x.requires_grad_()).square().sum().backward()
        uncut(y.requires_grad_()).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        y.grad = None
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(module(x).square().sum(), x, create_graph=True)[0].sum().backward()
    module[0]._parameters["weight"] = nn.Parameter(uncut[0].weight.detach())
    with pytest.raises(ConfigError, match="`weight` of a cut Linear must be a distributed parameter"):
        module(x)


class Pair(nn.Module):
    """Two layers with dropout between, which are called by keyword, and a table whose weight other code may use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(6, 4), nn.Dropout(0.5), nn.Linear(4, 6, bias=False)
        self.up, self.norm, self.down = nn.Linear(4, 64), nn.LayerNorm(1), nn.Linear(64, 4)
        self.recomputes, self.foreign = False, ""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(input=ids)
        y = checkpoint(self.half, x, use_reentrant=False) if self.recomputes else self.half(x)
        x = self.drop(x + self.down(input=y))
        match self.foreign:
            case "embed.weight":
                return x @ self.embed.weight.T
            case "head.weight":
                return self.head.multiplied(x)  # type: ignore[operator]
        assert self.down.weight.dtype is x.dtype
        assert self.down.weight.device == x.device
        return x

    def half(self, x: Tensor) -> Tensor:
        y = self.up(input=x).unsqueeze(-1)
        if self.foreign == "norm.weight":
            y = F.layer_norm(y, (1,), self.norm.weight, self.norm.bias)
        return self.drop(y.squeeze(-1) + 0 * self.norm(y).squeeze(-1))


class Keeps(nn.Module):
    """Head that multiplies by the weight of another module."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def multiplied(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


PAIR = Plan(
    tensor=(2,),
    rules={
        "embed": Rule(style=Style.EMBEDDING_ROWWISE),
        "up": Rule(style=Style.COLWISE),
        "norm": Rule(style=Style.REPLICATED_WITH_GRAD_ALLREDUCE),
        "down": Rule(style=Style.ROWWISE, columns=("up",)),
    },
)
IDS = {"ids": torch.tensor([[0, 5, 2]])}


def pair(**attributes: Any) -> Any:
    torch.manual_seed(0)
    module: Any = Pair().double()
    for name, value in attributes.items():
        setattr(module, name, value)
    if module.foreign == "head.weight":
        module.head = Keeps(module.embed.weight)
    return module


def layers_are_called_by_keyword() -> None:
    """On a rank: layers get their input by its name, and are cut, counted and found."""
    mesh, uncut = make_mesh(Layout(tensor=2), CPU), pair().eval()
    cost = costs_of(uncut, IDS, PAIR)[0]
    module = cut(pair().eval(), mesh, PAIR)
    with CollectiveRecorder(mesh) as recorder:
        torch.testing.assert_close(module(**IDS), uncut(**IDS))
    assert Counter(recorder.sent) == cost.forward
    assert find_plan(uncut, IDS, (2,)).rules["down"].style is Style.ROWWISE


def reads_of_others_are_counted() -> None:
    """On a rank: a parameter that a parent reads has its gradient summed, too."""
    mesh, module = make_mesh(Layout(tensor=2), CPU), pair(foreign="norm.weight").eval()
    cost = costs_of(module, IDS, PAIR)[0]
    found = cut(module, mesh, PAIR)(**IDS)
    with CollectiveRecorder(mesh) as recorder:
        found.sum().backward()
    assert Counter(recorder.sent) == cost.backward
    assert cost.backward[Sent("all_reduce", "tensor", 1)] == 4


def others_cannot_compute_with_parts() -> None:
    """On a rank: code that is not the layer's own gets an error instead of a part of its weight."""
    mesh = make_mesh(Layout(tensor=2), CPU)
    for name in ("embed.weight", "head.weight"):
        module = cut(pair(foreign=name), mesh, PAIR)
        with pytest.raises(ConfigError, match=f"`{name}` must be used only by the layer whose rule cuts it"):
            module(**IDS)
    assert type(module.embed.weight) is Tensor  # outside of the module's forward pass


def streams_follow_what_drops() -> None:
    """On a rank: dropout that begins after the cut, or drops alone, draws in two streams. So does a recomputation of
    the first half of a region, and the passes after it.
    """
    mesh = make_mesh(Layout(tensor=2), CPU)
    seen: list[Tensor] = []

    def passes(module: Any) -> list[Tensor]:
        seen.clear()
        torch.manual_seed(3)
        for _ in range(2):
            module(**IDS).square().sum().backward()
        return [each.ne(0).to(torch.uint8) for each in seen]

    usual, alone, recomputed = (cut(pair(recomputes=n == 2), mesh, PAIR) for n in range(3))
    without = pair()
    without.drop.p = 0
    raised = cut(without, mesh, PAIR)
    raised.drop.p = 0.5
    alone.eval().drop.train()
    for module in (usual, raised, alone, recomputed):
        module.drop.register_forward_hook(lambda _, __, y: seen.append(y.detach()))
    drawn = passes(usual)
    for mine, is_inside in zip(drawn, (True, False, True, False), strict=True):
        one, other = gather_from_all(mine)
        assert torch.equal(one, other) is not is_inside
    assert not torch.equal(drawn[0], drawn[2])
    assert all(map(torch.equal, passes(raised), drawn))
    assert all(map(torch.equal, passes(alone), drawn))
    assert all(map(torch.equal, passes(recomputed), drawn))
    one, other = (module.up._parameters["weight"].grad.full_tensor() for module in (usual, recomputed))
    torch.testing.assert_close(one, other)


def wrapped_modules_have_plain_names() -> None:
    """On a rank: modules that were wrapped after the cut are gathered under the names that they had before."""
    mesh = make_mesh(Layout(tensor=2), CPU)
    want, module = net()[0].state_dict(), cut(net()[0], mesh, plain.PLAN)
    module.blocks[0].mlp = checkpoint_wrapper(module.blocks[0].mlp)
    module.blocks[1] = torch.compile(module.blocks[1], backend="eager")
    for each in (module, torch.compile(module, backend="eager"), checkpoint_wrapper(module)):
        found = gathered_state_dict(each)
        assert [*found] == ([*want] if mesh.is_first_rank else [])
        assert all(torch.equal(tensor, want[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    "job",
    [
        sent_as_planned,
        logits_stay_cut,
        drawn_alike,
        used_in_other_ways,
        layers_are_called_by_keyword,
        reads_of_others_are_counted,
        others_cannot_compute_with_parts,
        streams_follow_what_drops,
        wrapped_modules_have_plain_names,
    ],
)
def test_on_two_ranks(ranks: RankPool, job: Callable[[], None]) -> None:
    ranks.run(2, job)


def test_a_plan_is_shown_with_its_reasons_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    rules = {**plain.RULES, "head": Rule(style=Style.COLWISE_GATHER_OUTPUT, reason="tied to embed")}
    print_plan(replace(plain.PLAN, rules=rules), costs_of(*plain.build()[:2], plain.PLAN))
    told = capsys.readouterr().out
    assert re.search(r"^blocks.0.attention.o +rowwise +after q, k, v", told, re.MULTILINE)
    assert re.search(r"^head +colwise_gather_output +tied to embed", told, re.MULTILINE)
    assert re.search(r"^blocks.1.attention +num_heads +2 +1$", told, re.MULTILINE)
    assert re.search(r"^ +2 +1,\d{3} +5\d.\d% +2 x all_gather \(240 elements\), 13 x all_reduce", told, re.MULTILINE)


# --- faults ----------------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    fault: str
    cut: Callable[..., None]
    module: str
    says: str
    """Part of the cause."""
    num_ranks: int = 2


def changed(fault: str, module: str, says: str, **changes: Any) -> Fault:
    return Fault(fault, partial(plain.cut_with, **changes), module, says)


def broken(fault: Callable[..., None], module: str, says: str, num_ranks: int = 2) -> Fault:
    return Fault(fault.__name__, partial(plain.cut_and_break, fault=fault), module, says, num_ranks)


INTEGERS = plain.PLAN.integers
FAULTS = [
    broken(plain.bias_of_every_rank, "blocks.3.attention.o", "the same vector at every token"),
    broken(plain.no_entrance, "blocks.1.mlp.gate_up", "is missing"),
    broken(plain.one_entrance_for_two_inputs, "blocks.0.mlp.gate_up", ""),
    broken(plain.shared_heads_not_summed, "blocks.0.attention.k", "", 4),
    broken(plain.table_of_another_rank, "blocks.0.attention", ""),
    broken(plain.no_offset, "positions", "raises"),
    broken(plain.regions_never_left, "blocks.0.dropout", "from the same tensor but draw different numbers"),
    broken(plain.parts_of_other_ranks, "blocks.2.attention.qkv", ""),
    changed(
        "packed parts cut as one",
        "blocks.0.mlp",
        "",
        rules={"blocks.*.mlp.gate_up": Rule(style=Style.COLWISE)},
    ),
    changed(
        "an integer not divided",
        "blocks.1.attention",
        "raises",
        integers={**INTEGERS, "blocks.1.attention": {"split_size": (8, 8), "num_heads": (2, 1)}},
    ),
    changed(
        "a region without its columns",
        "blocks.0.mlp.dropout",
        "from different tensors but draw the same numbers",
        rules={"blocks.*.mlp.down": Rule(style=Style.ROWWISE)},
    ),
    changed(
        "a norm of heads whose gradient is not summed",
        "blocks.0.attention.q_norm",
        "is missing",
        rules={"blocks.0.attention.q_norm": Rule(style=Style.REPLICATE)},
    ),
    changed(
        "the shared part of the keys not summed",
        "blocks.3.attention.kv_a",
        "is missing",
        rules={"blocks.3.attention.kv_a": Rule(style=Style.REPLICATE)},
    ),
    changed(
        "two names swapped",
        "blocks.3.attention.q",
        "raises",
        rules={
            "blocks.3.attention.q": Rule(style=Style.ROWWISE),
            "blocks.3.attention.o": Rule(style=Style.COLWISE),
        },
    ),
]


@pytest.mark.slow  # the proof of foreign cuts has quick tests of its faults
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_faults_are_found_and_their_modules_named(ranks: RankPool, num_ranks: int) -> None:
    faults = [fault for fault in FAULTS if fault.num_ranks == num_ranks]
    reports = prove(ranks, [ForeignCut(plain.build, fault.cut) for fault in faults], num_ranks)
    found = [(fault.fault, report.first and report.first.module) for fault, report in zip(faults, reports, strict=True)]
    assert found == [(fault.fault, fault.module) for fault in faults]
    for fault, report in zip(faults, reports, strict=True):
        assert not report.same
        assert report.first is not None
        assert fault.says in report.first.cause
