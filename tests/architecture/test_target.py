"""What a rank holds and sends on a layout."""

from dataclasses import replace

import pytest

from crosscut.architecture import Target
from crosscut.config import Layout
from crosscut.config.layout import ContextAttention


def test_a_target_cannot_be_made_without_its_ranks() -> None:
    with pytest.raises(TypeError, match="'tensor', 'split', 'context', and 'expert'"):
        Target()  # type: ignore[call-arg]


def test_a_rank_has_whole_heads_which_several_ranks_may_share() -> None:
    targets = [Target.of(Layout(tensor=tensor)) for tensor in (1, 2, 4, 8)]
    assert [target.own_heads(4) for target in targets] == [4, 2, 1, 1]
    assert [target.share_heads(4) for target in targets] == [False, False, False, True]
    assert [target.own(24) for target in targets] == [24, 12, 6, 3]


def test_ranks_that_share_sequences_have_a_way_to_attend() -> None:
    ring = {"context_attention": ContextAttention.RING, "length": 8, "sequences": 3}
    alone, shared = (replace(Target.of(Layout(tensor=2, context=context)), **ring) for context in (1, 4))
    assert (alone.way, shared.way) == (None, ContextAttention.RING)
    assert (alone.num_ranks, shared.num_ranks) == (2, 8)
    assert (alone.tokens, shared.tokens, shared.shared_tokens) == (24, 6, 24)


def test_exchanged_heads_are_repeated_until_every_rank_has_one() -> None:
    target = Target.of(Layout(tensor=2, context=4))
    assert target.repeats_of_heads(8, 2) == 2
    assert target.exchanged_heads(2 * target.repeats_of_heads(8, 2)) == 1


def test_parameters_do_not_depend_on_the_batch() -> None:
    small, large = (replace(Target.of(Layout(tensor=2)), sequences=sequences, length=8) for sequences in (1, 4))
    assert small != large
    assert small.of_parameters == large.of_parameters
