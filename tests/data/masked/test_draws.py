"""Random bits that are those of SplitMix64, whatever is drawn before them."""

import numpy as np

from crosscut.data.masked.draws import key_of, random_bits, to_uniform


def test_bits_are_those_of_the_published_generator() -> None:
    # The first numbers of SplitMix64 with the seed 0, which Java's `SplittableRandom` and others also give.
    assert [hex(number) for number in random_bits(np.uint64(0), [0], 3)[0].tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_bits_of_an_index_do_not_depend_on_the_other_indexes() -> None:
    key = key_of(3, 1)
    whole = random_bits(key, range(100), 8)
    assert np.array_equal(random_bits(key, [17, 99], 3), whole[[17, 99], :3])
    assert len(np.unique(whole)) == whole.size


def test_keys_differ_in_every_part() -> None:
    keys = {int(key_of(*parts)) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**64 - 1, 0)]}
    assert len(keys) == 6


def test_numbers_are_uniform() -> None:
    uniform = to_uniform(random_bits(key_of(1), range(1000), 100))
    assert 0 <= uniform.min() < 1e-4 < 1 - 1e-4 < uniform.max() < 1
    counts = np.histogram(uniform, bins=100, range=(0, 1))[0]
    squares = ((counts - 1000) ** 2 / 1000).sum()
    assert abs(squares - 99) < 3 * np.sqrt(2 * 99), "chi-square"
