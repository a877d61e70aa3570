"""`generation_config.json` of published models: what it suggests, and what Crosscut refuses to generate without."""

import json

import pytest

from crosscut.config import ConfigError
from crosscut.config.generation.sampling import Sampling
from crosscut.config.published.generation import check_generation


@pytest.fixture
def check(tmp_path):
    def checked(sampling=None, **table):
        (tmp_path / "generation_config.json").write_text(json.dumps(table))
        return check_generation(tmp_path, sampling, "Give --temperature.")

    return checked


def test_a_suggestion_is_named_unless_it_is_followed(check, tmp_path):
    table = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1, "eos_token_id": [3]}
    path = tmp_path / "generation_config.json"
    assert check(Sampling(top_p=0.95), **table) == [
        f"`{path}` suggests repetition_penalty = 1.1, temperature = 0.6. Give --temperature."
    ]
    assert check(Sampling(temperature=0.6, top_p=0.95, repetition_penalty=1.1), **table) == []
    assert check(**{**table, "do_sample": False}) == [
        f"`{path}` suggests repetition_penalty = 1.1, temperature = 0.0. Give --temperature."
    ]
    assert check(stop_strings="###") == [f"`{path}` suggests stop = ['###']. Give --temperature."]
    assert check(Sampling(stop=("###",)), stop_strings=["###"]) == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"suppress_tokens": [1]},
            "`suppress_tokens` in `.*` must be null, but is .1.*Remove the key from the file",
        ),
        ({"forced_eos_token_id": 2}, "`forced_eos_token_id` in `.*` must be null, but is 2"),
        ({"forced_bos_token_id": 2}, "`forced_bos_token_id` in `.*` must be null, but is 2"),
        ({"num_beams": 4}, "`num_beams` in `.*` must be 1, but is 4"),
        ({"no_repeat_ngram_size": 3}, "`no_repeat_ngram_size` in `.*` must be 0, but is 3"),
        ({"min_new_tokens": 3}, "`min_new_tokens` in `.*` must be 0, but is 3"),
        ({"sequence_bias": {"1": 3}}, "`sequence_bias` in `.*` must be null"),
        ({"min_p": 0.1}, "`min_p` in `.*` must be 0, but is 0.1"),
        ({"temperature": "hot"}, "`temperature` in `.*` must be a number, but is 'hot'"),
        ({"top_p": 3}, "`top_p` must be above 0 and at most 1, but is 3. The value is in `.*`"),
        ({"top_k": 1.5}, "`top_k` in `.*` must be a whole number, but is 1.5"),
        ({"stop_strings": [3]}, "`stop_strings` in `.*` must be a list of texts, but is .3"),
    ],
    ids=str,
)
def test_a_value_that_changes_texts_and_has_no_option_is_refused(check, table, message):
    with pytest.raises(ConfigError, match=message):
        check(**table)


def test_values_that_change_nothing_are_accepted_and_unknown_keys_named(check, tmp_path):
    nothing = {"num_beams": 1, "suppress_tokens": [], "min_length": 0, "typical_p": 1.0, "use_cache": False}
    assert check(**nothing, forced_eos_token_id=None, transformers_version="5.24.0", max_length=20) == []
    assert check(chat_format="chatml") == [
        f"Crosscut does not know these keys in `{tmp_path / 'generation_config.json'}` and ignores them: `chat_format`."
    ]
    assert check_generation(tmp_path / "elsewhere", None, "") == []
