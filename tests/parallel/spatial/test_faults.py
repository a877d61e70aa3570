"""Faults that others have made are planted, and the comparison with one rank finds each of them."""

from tests.parallel.spatial.faults import FAULTS, LAYERS, OF_OVERLAP, find
from tests.ranks import RankPool


def test_planted_faults_are_found(ranks: RankPool) -> None:
    of_ranks = ranks.run(4, find)
    for name in LAYERS:
        assert max(sound[name] for sound, _ in of_ranks) < 1e-12, name
    found = {fault: max(found[fault] for _, found in of_ranks) for fault in FAULTS | OF_OVERLAP}
    assert [fault for fault, difference in found.items() if not difference > 1e-3] == []
