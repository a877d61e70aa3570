"""Experts without tokens are named, once, and not because a batch is small."""

import torch

from crosscut.training.loads.idle import Collapse, IdleExperts, describe_collapses
from crosscut.training.loads.step_loads import StepLoads

NAMES = ("blocks.1.mlp", "blocks.3.mlp_2")


def loads(*of_layers: list[int]) -> StepLoads:
    entropy = torch.zeros(len(of_layers), 1).double()
    return StepLoads(NAMES[: len(of_layers)], torch.cat([torch.tensor(of_layers).double(), entropy], 1))


def named(idle: IdleExperts, steps: list[StepLoads]) -> list[list[Collapse]]:
    return [idle.step(each) for each in steps]


EVEN, LOPSIDED = loads([500, 500], [500, 500]), loads([1000, 0], [500, 500])


def test_a_collapse_is_named_once_until_the_expert_has_tokens_again() -> None:
    found = named(IdleExperts(3), [LOPSIDED] * 6 + [EVEN] + [LOPSIDED] * 4)
    assert [step for step, of in enumerate(found, 1) if of] == [3, 10]
    assert found[2] == [Collapse("blocks.1.mlp", 1, 3)]
    assert found[2][0].row == {"idle_layer": 1, "idle_expert": 1, "idle_steps": 3}


def test_a_single_token_ends_the_count() -> None:
    almost = loads([999, 1], [500, 500])
    assert not any(named(IdleExperts(3), [LOPSIDED, LOPSIDED, almost] * 5))


def test_small_batches_take_longer() -> None:
    """Ten rows for each expert in a step: 1,000 rows are 100 steps. Loads of a step vary by chance."""
    small = loads([20, 0])
    found = named(IdleExperts(5), [small] * 120)
    assert [step for step, of in enumerate(found, 1) if of] == [100]


def test_uneven_loads_by_chance_are_no_collapse() -> None:
    """Experts with a tenth of the mean load, and two rows in a step for the mean one."""
    drawn = torch.Generator().manual_seed(1)
    shares = torch.tensor([0.5, 0.3, 0.175, 0.025])
    for _ in range(5):
        idle = IdleExperts(5)
        counts = torch.multinomial(shares.expand(600, 4), 8, replacement=True, generator=drawn)
        steps = [torch.bincount(row, minlength=4).tolist() for row in counts]
        assert not any(named(idle, [loads(step) for step in steps]))


def test_0_steps_name_nothing_and_a_rollback_begins_anew() -> None:
    assert not any(named(IdleExperts(0), [LOPSIDED] * 20))
    idle = IdleExperts(3)
    named(idle, [LOPSIDED] * 2)
    idle.forget()
    assert [bool(of) for of in named(idle, [LOPSIDED] * 3)] == [False, False, True]


def test_the_message_groups_experts_by_layer() -> None:
    found = [Collapse("blocks.1.mlp", expert, 100) for expert in range(11)] + [Collapse("blocks.3.mlp_2", 4, 120)]
    assert describe_collapses(340, found) == (
        "step    340  collapse: experts 0, 1, 2, 3, 4, 5, 6, 7 and 3 more of layer 1; expert 4 of layer 3 (mlp_2): no "
        "token for 100 steps. In a new run, raise `model.experts.balance_loss`, or set model.experts.balance_bias=true."
    )
