"""Tables of the keys of published files, against the classes of `transformers` and PEFT that write these files."""

import dataclasses
import json

import pytest

from crosscut.config.published.families import FAMILIES
from crosscut.config.published.folders import read_published
from crosscut.config.published.keys import ADAPTER, keys_of_model

PRIVATE = {"_from_model_config"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_key_of_a_config_of_transformers_is_in_the_table(model_type):
    from transformers import AutoConfig, PreTrainedConfig

    config = AutoConfig.for_model(model_type)
    fields = {field.name for kind in (PreTrainedConfig, type(config)) for field in dataclasses.fields(kind)}
    written = {*config.to_dict(), *PreTrainedConfig().to_dict(), *config.attribute_map, *fields}
    assert not {key for key in written if not key.startswith("_")} - set(keys_of_model(model_type).known())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_a_file_omits_has_the_default_of_transformers(model_type, tmp_path):
    from transformers import AutoConfig

    def read(table: dict[str, object]) -> object:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **table}))
        return read_published(tmp_path).model

    theirs = AutoConfig.for_model(model_type).to_dict()
    assert read({}) == read(theirs)
    heads = FAMILIES[model_type].keys["num_heads"]  # half as many heads would be fewer than the default of keys
    for key in {*FAMILIES[model_type].keys.values(), *FAMILIES[model_type].aliases} & set(theirs) - {heads}:
        if type(theirs[key]) is int:
            half = {key: theirs[key] // 2}
            assert read(half) == read(AutoConfig.for_model(model_type, **half).to_dict()), key


def test_each_key_of_an_adapter_is_in_the_table():
    from peft import LoraConfig

    written = set(LoraConfig().to_dict()) | {field.name for field in dataclasses.fields(LoraConfig)}
    assert not written - set(ADAPTER.known())


def test_no_key_has_two_meanings():
    for table in (ADAPTER, *map(keys_of_model, FAMILIES)):
        known = list(table.known())
        assert len(known) == len(set(known)), table.title
