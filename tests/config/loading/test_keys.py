"""The key that a user meant by another name."""

import pytest

from crosscut.config import CorpusConfig, Layout, RunConfig
from crosscut.config.loading.keys import SYNONYMS, keys_of, meant_keys

RUN = keys_of(RunConfig)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("steps", "training.steps"),
        ("train.steps", "training.steps"),
        ("training.learning_rate", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("training.lr", "optimizer.learning_rate"),
        ("optim.lr", "optimizer.learning_rate"),
        ("bs", "training.batch_size"),
        ("batch-size", "training.batch_size"),
        ("seq_len", "training.sequence_length"),
        ("TP", "layout.tensor"),
        ("n_layer", "model.num_layers"),
        ("model", "model.preset"),
        ("learing_rate", "optimizer.learning_rate"),
        ("training.step", "training.steps"),
        ("training.warmup_step", "optimizer.warmup_steps"),
        ("checkpoint.keep_evry", "checkpoint.keep_every"),
        ("outputfolder", "output.folder"),
        ("training_batchsize", "training.batch_size"),
    ],
)
def test_one_key_is_meant(name: str, key: str) -> None:
    assert meant_keys(name, RUN) == [key]


def test_a_name_that_two_sections_have_means_both() -> None:
    assert meant_keys("vocab_size", RUN) == ["model.vocab_size", "data.vocab_size"]


@pytest.mark.parametrize("name", ["zzz", "layout.zzz", "x" * 100_000, ""])
def test_a_name_that_resembles_nothing_means_nothing(name: str) -> None:
    assert meant_keys(name, RUN) == []


def test_a_corpus_has_its_own_keys() -> None:
    keys = keys_of(CorpusConfig)
    assert meant_keys("jacard", keys) == ["duplicates.jaccard"]
    assert meant_keys("sources.wieght", keys) == ["sources.weight"]
    assert meant_keys("lr", keys) == []


def test_keys_of_a_section_have_its_prefix() -> None:
    assert keys_of(Layout, "layout.")[0] == "layout.tensor"
    assert {"model.preset", "training.steps"} <= set(RUN)


def test_every_synonym_means_one_key_and_is_none_itself() -> None:
    names = [name for text in SYNONYMS.values() for name in text.split()]
    assert set(SYNONYMS) <= set(RUN)
    assert len(set(names)) == len(names)
    assert not set(names) & set(RUN)
