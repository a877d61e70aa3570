"""Code between the layers of a network whose images are cut: gradients of what it combines, and functions that it may
call.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from crosscut.config import Layout, LayoutError
from crosscut.cutting import Plan, costs_of, cut, gathered_state_dict
from crosscut.parallel import CollectiveRecorder, Sent, make_mesh, make_reducer
from crosscut.parallel.state.parameters import whole
from tests.cutting.images import nets
from tests.cutting.images.nets import GATHER, SPATIAL, SPLIT
from tests.ranks import RankPool
from tests.refusals import refusal
from tests.verification.runs import CPU

PLAN = Plan(grid=(1, 2), rules={"conv": SPLIT, "norm": SPATIAL, "masked": SPATIAL, "pool": GATHER})


class Between(nn.Module):
    """Network that reads weights of its layers outside of them, and calls a function between two layers."""

    def __init__(self, function: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.conv, self.norm, self.masked = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)
        self.pool, self.head, self.function = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 2), function
        self.scale = nn.Parameter(torch.rand(4, 1, 1) + 0.5)
        nn.init.uniform_(self.norm.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.norm(self.conv(x)).sigmoid()
        y = y * self.scale.to(y) + y * self.scale.type_as(y) * self.scale
        y = y * self.norm.weight.view(1, -1, 1, 1) * self.norm.weight.to(y)[:, None, None]
        z = self.pool(self.masked(input=self.function(y)))
        return self.head(z.flatten(1)), self.conv.weight.square().sum()


def _loss(net: Any, x: Tensor) -> Tensor:
    scores, regulariser = net(x)
    total: Tensor = scores.square().mean() + regulariser + net.norm.weight.square().sum() + net.scale.square().sum()
    return total


def _compared(plan: Plan) -> None:
    torch.manual_seed(0)
    net: nn.Module = Between().double()
    x, uncut = torch.randn(2, 3, 6, 7).double(), copy.deepcopy(net)
    net = cut(net, make_mesh(Layout(context=2), CPU), plan)
    for each in (net, uncut):
        _loss(each, x).backward()
    copy.deepcopy(net)
    grads = {name: whole(each.grad) for name, each in net.named_parameters() if each.grad is not None}
    torch.testing.assert_close(grads, {name: each.grad for name, each in uncut.named_parameters()})


def test_gradients_of_weights_that_other_code_reads_are_those_of_the_uncut_net(ranks: RankPool) -> None:
    ranks.run(2, _compared, PLAN)


def _of_batch_norm(is_frozen: bool) -> list[Sent]:
    """Messages over the grid in a backward pass of a batch norm, whose gradients must be those of the uncut net."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)).double()
    net.requires_grad_(False)[1].train(not is_frozen).requires_grad_()
    x, uncut, mesh = torch.randn(2, 3, 6, 7).double(), copy.deepcopy(net), make_mesh(Layout(context=2), CPU)
    net = cut(net, mesh, Plan(grid=(1, 2), rules={"0": SPLIT, "1": SPATIAL, "2": GATHER}))
    found, expected = net(x), uncut(x)
    with CollectiveRecorder(mesh) as recorder:
        found.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    for each in ("weight", "bias"):
        torch.testing.assert_close(whole(net[1]._parameters[each].grad), getattr(uncut[1], each).grad)
    return [sent for sent in recorder.sent if sent.axis == "context"]


@pytest.mark.parametrize(("is_frozen", "elements"), [(False, [8]), (True, [4, 4])])
def test_the_message_of_a_batch_norm_also_sums_the_gradients_of_its_weights(
    ranks: RankPool, is_frozen: bool, elements: list[int]
) -> None:
    expected = [Sent("all_reduce", "context", num) for num in elements]
    assert ranks.run(2, _of_batch_norm, is_frozen) == [expected] * 2


KNOWN: list[Callable[[Any], Any]] = [
    lambda x: F.normalize(x, dim=1),
    lambda x: torch.clamp_(input=x * 1, min=0.5),
    lambda x: x * x.max(1, keepdim=True).values + x.argmax(1, keepdim=True),
    lambda x: x.cumsum(1).unbind(1)[2].unsqueeze(1) + x,
    lambda x: x.index_select(1, torch.arange(3, -1, -1, device=x.device)),
]


@pytest.mark.parametrize("function", KNOWN)
def test_functions_of_single_positions_are_known(function: Callable[[Any], Any]) -> None:
    assert costs_of(Between(function), {"x": torch.randn(2, 3, 6, 8)}, PLAN)


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: x.cumsum(-1), "`cumsum` of an image .* mixes positions"),
    (lambda x: x.unsqueeze(-1).squeeze(-1), "`unsqueeze` of an image .* mixes positions"),
    (lambda x: x - x.max(), "`max` of an image .* mixes positions"),
    (lambda x: x[:, [1, 0, 2, 3]], "`__getitem__` of an image .* but `index` is not known to do so"),
    (lambda x: x * torch.equal(x, x), "`equal` must not pass parts"),
    (lambda x: x * x.untyped_storage()[0], "`untyped_storage` must not pass parts"),
    (lambda x: torch.clamp(x, 0, 1, out=x), "`clamp` must not pass parts"),
    (lambda x: x * x.as_subclass(Tensor).mean(), "`as_subclass` must not pass parts .*`Between`"),
    (lambda x: x * torch.vmap(torch.sigmoid)(x), "`sigmoid` must be called by Python code .* is called by a scripted"),
    (
        lambda x: x * torch.tensor(x.detach()),
        "`tensor` must be called by Python code .*`Between`",
    ),
]


@pytest.mark.parametrize(("function", "says"), REFUSED)
def test_other_functions_are_refused(function: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        costs_of(Between(function), {"x": torch.randn(2, 3, 6, 8)}, PLAN)


def _gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class _Ends(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv, self.functions = nn.Conv2d(3, 4, 3), lambda: function

    def forward(self, x: Tensor) -> Any:
        return self.functions()(self.conv(x))


class _Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_code_is_watched() -> None:
    inputs = {"x": torch.randn(2, 3, 6, 8)}
    function, module = torch.jit.script(_gate), torch.jit.script(_Softmax())
    with pytest.raises(LayoutError, match=r"`sigmoid` must be called by Python code .* by a scripted function"):
        costs_of(Between(lambda x: x * function(x)), inputs, PLAN)
    with pytest.raises(RuntimeError, match="TorchScript interpreter"):
        costs_of(Between(lambda x: module(x)), inputs, PLAN)
    with pytest.raises(LayoutError, match="must be called by Python code"):  # at the end of the forward pass
        costs_of(_Ends(function), inputs, Plan(grid=(1, 2), rules={"conv": SPLIT}))


def _reduced() -> str:
    mesh = make_mesh(Layout(context=2), CPU)
    return refusal(LayoutError, make_reducer, cut(Between(), mesh, PLAN).double(), mesh)  # after a conversion, too


def test_no_reducer_sums_whole_gradients_again(ranks: RankPool) -> None:
    assert all("`Between`, whose images are cut, has summed them" in told for told in ranks.run(2, _reduced))


def _beside_data_ranks() -> None:
    mesh = make_mesh(Layout(data=2, context=2), CPU)
    torch.manual_seed(0)
    net, x, _ = nets.build()
    net.double().get_submodule("drop").p = 0.0  # type: ignore[assignment]
    x, uncut = torch.cat([x["x"], x["x"].flip(2) + 1]).double(), copy.deepcopy(net)
    net = cut(net, mesh, nets.PLAN)
    fully_shard(net, mesh=mesh.data.device_mesh)
    for each, images in ((net, x.chunk(2)[mesh.data.rank]), (uncut, x)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            each(images).pow(3).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = gathered_state_dict(net)
    if mesh.is_first_rank:
        torch.testing.assert_close(found, dict(uncut.state_dict()))


def test_data_ranks_train_one_net_whose_norms_see_the_images_of_all(ranks: RankPool) -> None:
    ranks.run(4, _beside_data_ranks)


def _twice() -> list[str]:
    """Errors of a net whose function escapes, in two forward passes."""
    net, errors = cut(Between(lambda x: x * torch.vmap(torch.sigmoid)(x)), make_mesh(Layout(context=2), CPU), PLAN), []
    for _ in range(2):
        with pytest.raises(LayoutError) as error:
            net(torch.randn(2, 3, 6, 8))
        errors.append(str(error.value).partition(" must")[0])
    return [*errors, str(len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))]


def _interrupted() -> list[object]:
    """Numbers of modes that an interrupted pass leaves, and the refusal of the pass after it."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    net: Any = cut(Between(interrupt), make_mesh(Layout(context=2), CPU), PLAN)
    x = torch.randn(2, 3, 6, 8)
    with pytest.raises(KeyboardInterrupt):
        net(x)
    modes = [
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        torch.overrides._get_current_function_mode_stack(),
    ]
    net.function = lambda x: x * torch.vmap(torch.sigmoid)(x)
    return [*map(len, modes), refusal(LayoutError, net, x).partition(" must")[0]]


def _changed_settings() -> None:
    """A program changes the settings of a batch norm after the cut, as `torch.optim.swa_utils.update_bn` does."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).double()
    uncut, x = copy.deepcopy(net), torch.randn(2, 3, 6, 8).double()
    plan = Plan(grid=(1, 2), rules={"0": SPLIT, "1": GATHER})
    net = cut(net, make_mesh(Layout(context=2), CPU), plan)
    for settings in ({"momentum": 0.5}, {"momentum": None}, {"eps": 0.5}, {"track_running_stats": False}):
        for each in (net, uncut):
            vars(each[1]).update(settings)
        torch.testing.assert_close(net(x), uncut(x))
        for name, buffer in uncut[1].named_buffers():
            torch.testing.assert_close(net[1].get_buffer(name), buffer)


def test_settings_that_change_after_the_cut_are_followed(ranks: RankPool) -> None:
    ranks.run(2, _changed_settings)


class _CallsItself(Between):
    def forward(self, x: Tensor, *, is_twice: bool = False) -> Tensor:
        y: Tensor = self(x) + self(x.flip(-1)) if is_twice else super().forward(x)
        return y


def _nested() -> int:
    """Modes that are left after the first pass of a net that calls itself."""
    net = cut(_CallsItself(torch.sigmoid), make_mesh(Layout(context=2), CPU), PLAN)
    net(torch.randn(2, 3, 6, 8), is_twice=True)
    return len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


def test_a_net_may_call_itself_in_its_first_pass(ranks: RankPool) -> None:
    assert ranks.run(2, _nested) == [0, 0]


def test_an_interrupted_pass_leaves_no_mode_and_does_not_end_the_watch(ranks: RankPool) -> None:
    assert ranks.run(2, _interrupted) == [[0, 0, "`sigmoid`"]] * 2


def test_a_refused_pass_does_not_end_the_watch(ranks: RankPool) -> None:
    assert ranks.run(2, _twice) == [["`sigmoid`", "`sigmoid`", "0"]] * 2
