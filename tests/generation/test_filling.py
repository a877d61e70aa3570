"""Words in place of masks, beside `transformers`' logits and its fill-mask pipeline."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from crosscut.config import ConfigError, DataError, GenerationError, Layout
from crosscut.data import Tokenizer
from crosscut.generation.filling import Filled, Filler
from crosscut.parallel.state.parameters import local
from crosscut.pretrained import ModelSource, find_model
from tests.pretrained.encoders import V, make_encoder
from tests.pretrained.jobs import load
from tests.ranks import RankPool

PROMPTS = ["the [MASK] brown fox", "[MASK]", "[MASK] lazy [MASK] dog", "the quick brown fox jumps [MASK] the dog"]
LAYOUTS = [Layout(), Layout(tensor=2), Layout(tensor=4, sequence_parallel=True)]


@pytest.fixture(scope="module", params=["bert for masked tokens", "bert with heads"])
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_encoder(tmp_path_factory.mktemp("filling") / "bert", request.param, wordpiece=True)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@torch.no_grad()
def theirs(folder: Path) -> list[Tensor]:
    """Logits [masks, V] of each prompt, one prompt at a time."""
    from tokenizers import Tokenizer as Inner
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    inner.no_padding()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([inner.encode(prompt).ids])
        found.append(model(ids).logits[ids == inner.token_to_id("[MASK]")])
    return found


def _fill(source: ModelSource, layout: Layout, num_words: int = V) -> list[Filled]:
    """On a rank: all prompts in one batch."""
    return Filler(source, num_words=num_words).fill(load(source, layout, "float64"), PROMPTS)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_probabilities_are_those_of_transformers_logits(ranks: RankPool, folder, layout):
    expected = [logits.softmax(1) for logits in theirs(folder)]
    for filled in ranks.run(layout.world_size, _fill, find_model(folder), layout):
        for one, probabilities in zip(filled, expected, strict=True):
            found = torch.zeros_like(probabilities)
            for row, words in zip(found, one.masks, strict=True):
                row[[word.token for word in words]] = torch.tensor(
                    [word.probability for word in words], dtype=row.dtype
                )
                assert [word.probability for word in words] == sorted((w.probability for w in words), reverse=True)
            assert (found - probabilities).abs().max() < 1e-9


def test_words_and_texts_are_those_of_the_fill_mask_pipeline(ranks: RankPool, folder):
    from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64)
    expected = pipeline("fill-mask", model, tokenizer=AutoTokenizer.from_pretrained(folder))(PROMPTS[0])
    ((first, *_),) = ranks.run(1, _fill, find_model(folder), Layout(), 5)
    (words,) = first.masks
    assert [word.token for word in words] == [one["token"] for one in expected]
    assert [word.text for word in words] == [one["token_str"] for one in expected]
    assert [word.probability for word in words] == pytest.approx([one["score"] for one in expected], abs=1e-9)
    assert first.text == expected[0]["sequence"]
    assert first.to_json()["tokens"] == [expected[0]["token"]]


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A RoBERTa whose mask token takes the space before it, as the published one does."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Inner

    folder = tmp_path_factory.mktemp("filling") / "roberta"
    make_encoder(folder, "roberta with a head")
    inner = Inner(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=V, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 50], trainer)
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    inner.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": "<mask>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def _fill_one(source: ModelSource, layout: Layout, prompt: str) -> Filled:
    return Filler(source).fill(load(source, layout, "float64"), [prompt])[0]


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=str)
def test_roberta_fills_in_words_as_the_pipeline_does(ranks: RankPool, roberta, layout):
    from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

    model = AutoModelForMaskedLM.from_pretrained(roberta, dtype=torch.float64)
    prompt = "the <mask> fox"
    expected = pipeline("fill-mask", model, tokenizer=AutoTokenizer.from_pretrained(roberta))(prompt)
    for filled in ranks.run(layout.world_size, _fill_one, find_model(roberta), layout, prompt):
        (words,) = filled.masks
        assert [(word.token, word.text) for word in words] == [(one["token"], one["token_str"]) for one in expected]
        assert [word.probability for word in words] == pytest.approx([one["score"] for one in expected], abs=1e-9)
        assert filled.text == expected[0]["sequence"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            "the fox",
            "The prompt 'the fox' must have the mask token `[MASK]` in place of each word to predict, but ",
        ),
        ("", "The prompt '' must have the mask token"),
        ("[MASK] " * 15, "must fit into the model's sequence length (16 tokens), but has 17. Shorten the prompt."),
    ],
)
def test_prompt_that_cannot_be_filled_is_refused(folder, prompt, message):
    with pytest.raises(ConfigError) as caught:
        Filler(find_model(folder)).encode(prompt)
    assert message in str(caught.value)


def test_a_mask_that_is_plain_text_is_refused(folder, tmp_path):
    changed = shutil.copytree(folder, tmp_path / "model")
    (changed / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    with pytest.raises(ConfigError, match=r"`split_special_tokens` beside `.*` must be false to fill in masked words"):
        Filler(find_model(changed))


def test_tokenizer_of_another_model_is_refused(folder, tmp_path):
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["vocab"]["unheard"] = V
    source = find_model(folder)
    for path, content in ((tmp_path / "more.json", table), (tmp_path / "other.json", None)):
        if content is None:
            Tokenizer.train(["the fox " * 50], vocab_size=260).save(path)
        else:
            path.write_text(json.dumps(content))
    changed = dict(vars(source))
    with pytest.raises(
        DataError, match=rf"must be the model's tokenizer, with ids below {V}, but the prompt .* id {V}"
    ):
        Filler(ModelSource(**{**changed, "tokenizer": tmp_path / "more.json"})).encode("unheard [MASK]")
    with pytest.raises(DataError, match="must have a token that begins a sequence"):
        Filler(ModelSource(**{**changed, "tokenizer": tmp_path / "other.json"}))


def _damaged(source: ModelSource) -> str:
    model = load(source, Layout(), "float32")
    with torch.no_grad():
        local(model.prediction.bias, torch.float32)[7] = float("nan")
    with pytest.raises(GenerationError) as caught:
        Filler(source).fill(model, PROMPTS)
    return str(caught.value)


def test_logits_that_are_not_finite_are_told(ranks: RankPool, folder):
    (told,) = ranks.run(1, _damaged, find_model(folder))
    assert told.startswith("The model's logits must be finite, but are not: some are NaN at a mask.")
