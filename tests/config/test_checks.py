import pytest

from crosscut.config.checks import divisors


@pytest.mark.parametrize("number", [1, 2, 7, 12, 36, 49, 97, 512, 5040])
def test_divisors_are_all_and_ascend(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
