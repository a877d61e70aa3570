"""Sampling parameters of a request, read from the fields of either protocol."""

import re
import secrets
from collections.abc import Mapping

from crosscut.config.checks import MOST
from crosscut.config.generation.sampling import LARGEST_PENALTY, Sampling
from crosscut.serving.protocol.fields import Fields, is_text
from crosscut.serving.protocol.refusals import Refusal

MOST_STOPS = 16
"""Maximum number of stop strings."""

MOST_STOP_CHARACTERS = 1000
"""Maximum number of characters of a stop string. The server may have to hold back that many characters of a text."""
MOST_BIASES = 1024
"""Maximum number of tokens in `logit_bias`. The limit exists because all texts wait while the biases are applied."""

_SEEDS = 1 << 63


def read_sampling(
    fields: Fields, *, num_tokens: int, alternatives: int | None, tell_prompt: bool, vocab_size: int
) -> Sampling:
    """Read the sampling parameters of a request. Raises `Refusal`.

    The caller has already read `num_tokens`, `alternatives` and `tell_prompt`, because the names of these fields differ
    between the two protocols. The token ids in `logit_bias` must be below `vocab_size`.
    """
    temperature = fields.number("temperature", 0, 2)
    seed = fields.integer("seed", -_SEEDS, _SEEDS - 1)
    return Sampling(
        num_tokens=num_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_k=fields.integer("top_k", 0, MOST) or 0,
        top_p=_share(fields, "top_p"),
        repetition_penalty=_repetition(fields),
        presence_penalty=fields.number("presence_penalty", -LARGEST_PENALTY, LARGEST_PENALTY) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -LARGEST_PENALTY, LARGEST_PENALTY) or 0.0,
        bias=_biases(fields, vocab_size),
        seed=secrets.randbits(32) if seed is None else seed,
        stop=_stops(fields),
        alternatives=alternatives,
        tell_prompt=tell_prompt,
    )


def _share(fields: Fields, name: str) -> float:
    share = fields.number(name, 0, 1)
    if share == 0:
        fields.refuse(name, "be above 0 and at most 1", "To get the likeliest token, set `temperature` to 0.")
    return 1.0 if share is None else share


def _repetition(fields: Fields) -> float:
    penalty = fields.number("repetition_penalty", 0, 100)
    if penalty == 0:
        fields.refuse("repetition_penalty", "be above 0")
    return 1.0 if penalty is None else penalty


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > MOST_STOPS or not all(is_text(stop) and stop for stop in stops):
        fields.refuse("stop", f"be a string or up to {MOST_STOPS} strings, none of them empty")
    if (longest := max(map(len, stops), default=0)) > MOST_STOP_CHARACTERS:
        raise Refusal(
            f"`stop` must hold strings of at most {MOST_STOP_CHARACTERS} characters, but one has {longest}. Shorten "
            "the string.",
            field="stop",
        )
    return tuple(stops)


def _biases(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    value = fields.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, Mapping) or len(value) > MOST_BIASES or not all(map(_is_bias, value.values())):
        fields.refuse(
            "logit_bias", f"be a JSON object that maps up to {MOST_BIASES} token ids to numbers from -100 to 100"
        )
    if not all(map(re.compile("[0-9]{1,9}").fullmatch, value)) or not all(int(token) < vocab_size for token in value):
        fields.refuse("logit_bias", f"have token ids from 0 to {vocab_size - 1}", "Use token ids, not texts.")
    return tuple((int(token), float(bias)) for token, bias in value.items())


def _is_bias(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100
