from crosscut.architecture.pipeline import Stage, stages_of_rank


def test_ranks_take_turns_with_the_stages():
    sizes = (2, 1, 3, 2)
    assert stages_of_rank(sizes, rank=0, num_ranks=4) == (Stage(range(2), True, False),)
    assert stages_of_rank(sizes, rank=3, num_ranks=4) == (Stage(range(6, 8), False, True),)
    assert stages_of_rank(sizes, rank=0, num_ranks=2) == (
        Stage(range(2), True, False),
        Stage(range(3, 6), False, False),
    )
    assert stages_of_rank(sizes, rank=1, num_ranks=2) == (
        Stage(range(2, 3), False, False),
        Stage(range(6, 8), False, True),
    )
    assert stages_of_rank((5,), rank=0, num_ranks=1) == (Stage(range(5), True, True),)
