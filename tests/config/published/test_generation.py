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
        return check_generation([tmp_path], sampling, "Give --temperature.")

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


def test_sampling_without_an_option_is_named(check, tmp_path):
    path = tmp_path / "generation_config.json"
    asked = {
        "min_p": 0.1,
        "typical_p": 0.9,
        "eta_cutoff": 1e-3,
        "epsilon_cutoff": None,
        "encoder_repetition_penalty": 1,
    }
    assert check(Sampling(), **asked) == [
        f"`{path}` suggests min_p = 0.1, typical_p = 0.9, eta_cutoff = 0.001. Give --temperature."
    ]


def test_the_keys_of_a_config_apply_without_a_generation_config(tmp_path):
    """`transformers` reads them from there."""
    from transformers import GenerationConfig

    def told(**keys):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 300, "unknown": 1, **keys}))
        theirs = GenerationConfig.from_pretrained(tmp_path, config_file_name=path.name, _from_model_config=True)
        assert all(getattr(theirs, key) == value for key, value in keys.items())
        return check_generation([tmp_path], Sampling(), "")

    assert told(repetition_penalty=1.7, top_k=None, no_repeat_ngram_size=0) == [
        f"`{tmp_path / 'config.json'}` suggests repetition_penalty = 1.7. "
    ]
    assert told() == []
    for key, value in (("no_repeat_ngram_size", 2), ("suppress_tokens", [5])):
        with pytest.raises(ConfigError, match=f"`{key}` in `.*/config.json` must be"):
            told(**{key: value})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert check_generation([tmp_path], None, "") == []


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
    assert check_generation([tmp_path / "elsewhere"], None, "") == []
