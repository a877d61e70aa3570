import math
from typing import Any

import pytest
import torch

from crosscut.config import ConfigError
from crosscut.generation import Sampling
from crosscut.generation.sampling import History, Numbers, choose, likelihoods_of

CHANCES = (0.1, 0.4, 0.2, 0.25, 0.05)
SCORES = torch.tensor(CHANCES).log()


def chosen(
    scores: torch.Tensor = SCORES, prompt: tuple[int, ...] = (), written: tuple[int, ...] = (), **how: Any
) -> list[tuple[int, float]]:
    """Which tokens numbers from 0 to 1 choose, in that order, and the share of the numbers that each takes."""
    sampling = Sampling(**{"temperature": 1.0, "top_k": 0, **how})
    history = History(sampling, prompt, written)
    tokens = [choose(scores, sampling, history=history, number=(i + 0.5) / 1000) for i in range(1000)]
    return [(token, tokens.count(token) / 1000) for token in dict.fromkeys(tokens)]


def about(expected: list[tuple[int, float]]) -> list[tuple[int, object]]:
    return [(token, pytest.approx(share, abs=0.002)) for token, share in expected]


def test_tokens_are_as_wide_as_their_probability_and_in_the_order_of_their_ids():
    assert chosen() == about(list(enumerate(CHANCES)))


def test_temperature_spreads_and_narrows():
    for temperature in (0.5, 2.0):
        powers = [p ** (1 / temperature) for p in CHANCES]
        assert chosen(temperature=temperature) == about([(i, p / sum(powers)) for i, p in enumerate(powers)])


def test_temperature_zero_takes_the_likeliest():
    assert chosen(temperature=0.0, top_k=3, top_p=0.5) == [(1, 1.0)]
    assert chosen(temperature=1e-30) == [(1, 1.0)]


def test_top_k_keeps_the_likeliest():
    assert chosen(top_k=2) == about([(1, 0.4 / 0.65), (3, 0.25 / 0.65)])
    assert chosen(top_k=99) == chosen()


def test_top_p_keeps_the_fewest_that_come_to_it():
    assert chosen(top_p=0.39) == [(1, 1.0)]
    assert chosen(top_p=0.41) == about([(1, 0.4 / 0.65), (3, 0.25 / 0.65)])
    assert chosen(top_p=0.66) == about([(1, 0.4 / 0.85), (2, 0.2 / 0.85), (3, 0.25 / 0.85)])


def test_top_p_counts_what_top_k_has_left():
    assert chosen(top_k=2, top_p=0.6) == [(1, 1.0)]  # 0.4 of 0.65 is more than 0.6
    assert chosen(top_k=2, top_p=0.62) == about([(1, 0.4 / 0.65), (3, 0.25 / 0.65)])


@pytest.mark.parametrize("top_p", [0.05, 0.9])
def test_top_p_of_a_large_vocabulary_is_that_of_sorting_all(top_p):
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(0)) / 10  # flat: 0.9 is more than 1,024 tokens
    chances, order = scores.double().softmax(0).sort(descending=True)
    kept = order[: 1 + int((chances.cumsum(0) < top_p).sum())].sort().values
    assert (len(kept) > 1024) == (top_p == 0.9)
    ends = scores.double().softmax(0)[kept].cumsum(0)
    for number in (0.0, 0.123, 0.5, 0.777, 0.9999):
        expected = int(kept[int((ends <= ends[-1] * number).sum())])
        sampling = Sampling(temperature=1.0, top_k=0, top_p=top_p)
        assert choose(scores, sampling, history=History(sampling), number=number) == expected


def test_repetition_penalty_divides_positive_scores_and_multiplies_negative_ones():
    scores = torch.tensor([2.0, 1.5, -1.0, -3.0])
    penalized = torch.tensor([2.0 / 1.5, 1.5, -1.0 * 1.5, -3.0])
    expected = about(list(enumerate(penalized.softmax(0).tolist())))
    for prompt, written in (((0, 2, 2), ()), ((), (2, 0)), ((0,), (2,))):
        assert chosen(scores, prompt, written, repetition_penalty=1.5) == expected
    assert chosen(scores, (0,), temperature=0.0, repetition_penalty=1.5) == [(1, 1.0)]
    assert scores[0] == 2.0, "the scores are somebody else's"


def test_presence_and_frequency_count_what_was_written_after_the_prompt():
    scores = torch.tensor([2.0, 1.5, -1.0, -3.0])
    prompt, written = (3, 3, 1), (0, 2, 0, 0)
    for how, penalized in (
        ({"presence_penalty": 0.5}, [1.5, 1.5, -1.5, -3.0]),
        ({"frequency_penalty": 0.5}, [0.5, 1.5, -1.5, -3.0]),
        ({"frequency_penalty": -0.5, "presence_penalty": 2.0}, [1.5, 1.5, -2.5, -3.0]),
    ):
        shares = torch.tensor(penalized).softmax(0).tolist()
        assert chosen(scores, prompt, written, **how) == about(list(enumerate(shares)))
    assert chosen(scores, (), (0,), temperature=0.0, presence_penalty=0.6) == [(1, 1.0)]
    assert scores[0] == 2.0, "the scores are somebody else's"


def test_a_bias_is_added_before_penalties():
    scores = torch.tensor([2.0, 1.5, -1.0, -3.0])
    shares = torch.tensor([2.0, 1.5, (-1.0 + 2.0) / 1.5, -3.0]).softmax(0).tolist()  # above 0, so it is divided
    assert chosen(scores, (2,), bias=((2, 2.0),), repetition_penalty=1.5) == about(list(enumerate(shares)))
    assert chosen(scores, bias=((3, 100.0),)) == [(3, 1.0)]
    assert chosen(scores, temperature=0.0, bias=((0, -100.0), (1, -100.0))) == [(2, 1.0)]
    assert scores[0] == 2.0, "the scores are somebody else's"


def test_likelihood_is_the_models_own():
    found, other = likelihoods_of(torch.stack((SCORES, SCORES.flip(0))), [2, 4], 3)
    assert found.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert found.alternatives == tuple((i, pytest.approx(math.log(CHANCES[i]), abs=1e-6)) for i in (1, 3, 2))
    assert other.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token for token, _ in other.alternatives] == [3, 1, 2]
    assert found.alternatives[2][1] == found.logprob, "clients look for a token among the likeliest by its number"


def test_numbers_differ_with_seed_sample_and_text_and_are_even():
    places = [(0, 0, []), (1, 0, []), (0, 1, []), (0, 0, [1]), (0, 0, [11]), (0, 0, [1, 1])]
    assert len({Numbers(*place).next() for place in places}) == len(places)
    numbers, found = Numbers(0, 0), []
    for _ in range(2000):
        numbers.add(7)
        found.append(numbers.next())
    assert found[3] == Numbers(0, 0, [7] * 4).next()
    assert 0 <= min(found) < max(found) < 1
    assert max(abs(x - (i + 0.5) / 2000) for i, x in enumerate(sorted(found))) < 0.04  # Kolmogorov's distance


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("num_tokens", -1, "at least 0"), ("temperature", -0.5, "at least 0"), ("temperature", math.nan, "at least 0"),
        ("top_k", -1, "at least 0"), ("top_p", 0.0, "above 0 and at most 1"), ("top_p", 1.5, "above 0 and at most 1"),
        ("repetition_penalty", 0.0, "above 0 and finite"), ("alternatives", -1, "at least 0"),
        ("presence_penalty", 2.1, "from -2 to 2"), ("frequency_penalty", -2.1, "from -2 to 2"),
        ("frequency_penalty", math.nan, "from -2 to 2"),
    ],
)  # fmt: skip
def test_impossible_sampling_is_refused(field, value, limit):
    with pytest.raises(ConfigError, match=rf"`{field}` must be {limit}, but is {value}"):
        Sampling(**{field: value})
    with pytest.raises(ConfigError, match=r"`bias` must hold finite numbers, but is \{3: -inf\}"):
        Sampling(bias=((3, -math.inf),))


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="`stop` must hold non-empty strings, but one is empty"):
        Sampling(stop=("a", ""))
