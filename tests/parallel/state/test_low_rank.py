"""Gradients in low rank are those of the paper's algorithm and of PyTorch's own hook, on any number of ranks."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from crosscut.config import Layout
from crosscut.parallel import CollectiveRecorder, LowRankGradients, ParallelMesh, Sent, make_mesh, sharded_parameter
from crosscut.parallel.collectives import all_gather
from crosscut.parallel.state.parameters import local_part, stacked_parameter, with_local_part

CPU = torch.device("cpu")
ROWS, COLUMNS, RANK, STEPS, SEED = 24, 16, 3, 4, 5


def terms(step: int, num_ranks: int) -> Tensor:
    """Gradients of all data ranks, [ranks, rows, columns]. Their sum does not depend on the number of ranks."""
    made = torch.Generator().manual_seed(step)
    whole = torch.randn(4, ROWS, COLUMNS, generator=made, dtype=torch.float64)
    return whole.view(num_ranks, -1, ROWS, COLUMNS).sum(1)


def first_factor(name: str, mesh: ParallelMesh) -> Tensor:
    parameter = sharded_parameter((ROWS, COLUMNS), mesh.tensor, dim=0, dtype=torch.float64, device=CPU)
    state = LowRankGradients({name: parameter}, mesh, rank=RANK, seed=SEED).state()
    return local_part(state[f"{name}.basis"]).clone()


def gram_schmidt(columns: Tensor) -> Tensor:
    """The orthogonalization of the paper."""
    made: list[Tensor] = []
    for column in columns.unbind(1):
        rest = column - sum((other * (other @ column) for other in made), torch.zeros_like(column))
        made.append(rest / rest.norm())
    return torch.stack(made, 1)


def papers_algorithm(factor: Tensor, num_workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Algorithm 2 with Algorithm 1 as its compressor, for all workers in one process. Yields what all workers get,
    and the mean of their errors. The paper takes means over workers.
    """
    errors = torch.zeros(num_workers, ROWS, COLUMNS, dtype=torch.float64)
    for step in range(STEPS):
        moved = terms(step, num_workers) * num_workers + errors
        p = gram_schmidt((moved @ factor).mean(0))
        factor = (moved.mT @ p).mean(0)
        got = p @ factor.T
        errors = moved - got
        yield got, errors.mean(0)


def of_few_tokens(step: int, num: int) -> Tensor:
    """Terms of a gradient that has fewer directions than a factor has columns in the first step."""
    generator = torch.Generator().manual_seed(step)
    left, right = (
        torch.randn(4, *size, generator=generator, dtype=torch.float64) for size in ((ROWS, 1), (1, COLUMNS))
    )
    tokens = left @ right if step else left[[0] * 4] @ right[[0] * 4] * torch.tensor([0.2, 0.3, 0.4, 0.1]).view(4, 1, 1)
    return tokens.view(num, -1, ROWS, COLUMNS).sum(1)


def courses(layout: Layout, dim: int, terms: Callable[[int, int], Tensor] = terms) -> list[tuple[Tensor, Tensor]]:
    """Gradient and error memory of each step, put together over the tensor ranks, with the mean of the errors over the
    data ranks.
    """
    mesh = make_mesh(layout, CPU)
    parameter = sharded_parameter((ROWS, COLUMNS), mesh.tensor, dim=dim, dtype=torch.float64, device=CPU)
    sums = LowRankGradients({"w": parameter}, mesh, rank=RANK, seed=SEED)
    found = []
    for step in range(STEPS):
        own = terms(step, mesh.data.size)[mesh.data.rank].chunk(mesh.tensor.size, dim)[mesh.tensor.rank]
        parameter.grad = with_local_part(parameter.detach(), own.contiguous())
        sums.reduce()
        sums.commit(torch.zeros(()))
        error = local_part(sums.errors["w"])
        mean = all_gather(error.detach()[None], mesh.data, 0).mean(0)
        parts = (local_part(parameter.grad), mean)
        found.append(tuple(all_gather(part.contiguous(), mesh.tensor, dim) for part in parts))
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(data=4), Layout(tensor=2, data=2)])
def test_every_step_is_that_of_the_papers_algorithm(ranks, layout, dim):
    factor = ranks.run(1, _first_factor)[0]
    found = ranks.run(layout.world_size, courses, layout, dim)[0]
    expected = papers_algorithm(factor, layout.data)
    for (gradient, error), (of_paper, errors_of_paper) in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, of_paper, rtol=0, atol=1e-11)
        torch.testing.assert_close(error, errors_of_paper, rtol=0, atol=1e-11)


@pytest.mark.parametrize("layout", [Layout(data=4), Layout(tensor=2, data=2)])
def test_directions_that_a_gradient_does_not_have_depend_on_no_layout(ranks, layout):
    alone, found = (ranks.run(one.world_size, courses, one, 0, of_few_tokens)[0] for one in (Layout(), layout))
    for (gradient, error), (expected, expected_error) in zip(found, alone, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-11)
        torch.testing.assert_close(error, expected_error, rtol=0, atol=1e-11)


def _first_factor() -> Tensor:
    return first_factor("w", make_mesh(Layout(), CPU))


def beside_the_hook() -> list[tuple[Tensor, Tensor]]:
    """Gradients of PyTorch's hook and of ours on two data ranks, in each step."""
    mesh = make_mesh(Layout(data=2), CPU)
    parameter = sharded_parameter((ROWS, COLUMNS), mesh.tensor, dim=0, dtype=torch.float64, device=CPU)
    sums = LowRankGradients({"w": parameter}, mesh, rank=RANK, seed=SEED)
    state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=1)
    model = DistributedDataParallel(nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float64))
    model.register_comm_hook(state, powerSGD_hook)
    found = []
    for step in range(-2, STEPS):  # the hook sums the first two gradients whole
        own = terms(step + 2, 2)[mesh.data.rank]
        if step == 0:  # the hook's first factor would be random
            state.q_memory_dict[0] = local_part(sums.state()["w.basis"]).clone().view(-1)
            state.p_memory_dict[0] = torch.zeros(ROWS * RANK, dtype=torch.float64)
        model.zero_grad()
        (model(torch.eye(COLUMNS, dtype=torch.float64)) * own.T).sum().backward()
        if step >= 0:
            parameter.grad = with_local_part(parameter.detach(), own.clone())
            sums.reduce()
            sums.commit(torch.zeros(()))
            theirs = model.module.weight.grad
            found.append((local_part(parameter.grad).clone(), theirs.clone() * 2))  # the hook takes means
    return found


def test_gradients_of_two_ranks_are_those_of_pytorchs_own_hook(ranks):
    for ours, theirs in ranks.run(2, beside_the_hook)[0]:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def of_full_rank() -> tuple[Tensor, Tensor]:
    mesh = make_mesh(Layout(data=2), CPU)
    parameter = sharded_parameter((ROWS, COLUMNS), mesh.tensor, dim=0, dtype=torch.float64, device=CPU)
    sums = LowRankGradients({"w": parameter}, mesh, rank=COLUMNS, seed=SEED)
    parameter.grad = with_local_part(parameter.detach(), terms(0, 2)[mesh.data.rank].clone())
    sums.reduce()
    sums.commit(torch.zeros(()))
    sums.share_errors()
    return local_part(parameter.grad), local_part(sums.errors["w"]).detach()


def test_factors_of_full_rank_give_the_whole_sum_and_leave_no_error(ranks):
    gradient, error = ranks.run(2, of_full_rank)[0]
    torch.testing.assert_close(gradient, terms(0, 2).sum(0), rtol=0, atol=1e-12)
    assert error.abs().max() < 1e-12


def held_step(value: float) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """State before and after a step with a gradient that is not finite on one rank, and whether all ranks see it."""
    mesh = make_mesh(Layout(data=2), CPU)
    parameter = sharded_parameter((ROWS, COLUMNS), mesh.tensor, dim=0, dtype=torch.float32, device=CPU)
    sums = LowRankGradients({"w": parameter}, mesh, rank=RANK, seed=SEED)
    for step, held in enumerate((0.0, 1.0)):
        before = {name: local_part(tensor).clone() for name, tensor in sums.state().items()}
        own = terms(step, 2)[mesh.data.rank].float()
        if held and mesh.data.rank == 1:
            own[3, 2] = value
        parameter.grad = with_local_part(parameter.detach(), own)
        sums.reduce()
        is_seen = not bool(local_part(parameter.grad).isfinite().all())
        sums.commit(torch.tensor(held))
    return before, {name: local_part(tensor).clone() for name, tensor in sums.state().items()}, is_seen


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_that_overflows_on_one_rank_is_seen_on_all_and_changes_no_memory(ranks, value):
    for before, after, is_seen in ranks.run(2, held_step, value):
        assert is_seen
        assert before["w.error"].abs().max() > 0
        assert all(torch.equal(before[name], after[name]) for name in before)


def sent_for_experts() -> tuple[list[Sent], list[Sent]]:
    """Messages of a step with a matrix and with stacked experts, and those of sharing errors twice."""
    mesh = make_mesh(Layout(data=4, expert=2), CPU)
    matrix = sharded_parameter((ROWS, COLUMNS), mesh.tensor, dim=0, dtype=torch.float32, device=CPU)
    experts = stacked_parameter((6, ROWS, COLUMNS), mesh, dim=1, dtype=torch.float32, device=CPU)
    sums = LowRankGradients({"w": matrix, "experts": experts}, mesh, rank=RANK, seed=SEED)
    for parameter in (matrix, experts):
        parameter.grad = with_local_part(parameter.detach(), torch.randn_like(local_part(parameter.detach())))
    with CollectiveRecorder(mesh) as step:
        sums.reduce()
        sums.commit(torch.zeros(()))
    with CollectiveRecorder(mesh) as shared:
        sums.share_errors()
        sums.share_errors()
    return step.sent, shared.sent


def test_each_plan_of_ranks_sends_two_factors(ranks):
    step, shared = ranks.run(4, sent_for_experts)[0]
    assert step == [
        Sent("all_reduce", "data", ROWS * RANK),
        Sent("all_reduce", "data", COLUMNS * RANK),
        Sent("all_reduce", "expert_data", 3 * ROWS * RANK),
        Sent("all_reduce", "expert_data", 3 * COLUMNS * RANK),
    ]
    assert shared == [
        Sent("all_reduce", "data", ROWS * COLUMNS),
        Sent("all_reduce", "expert_data", 3 * ROWS * COLUMNS),
    ]
