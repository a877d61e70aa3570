"""Texts of several clients in the passes of one encoder."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from crosscut.config import ConfigError, GenerationError, Layout
from crosscut.config.published.sentences import SentenceSteps
from crosscut.evaluation.embeddings import embeddings
from crosscut.evaluation.embeddings.embedder import _PASSES, Embedded, Embedder
from crosscut.evaluation.embeddings.pooling import SentencePooling
from crosscut.model import GPT, Batch
from crosscut.pretrained import ModelSource, find_model
from tests.pretrained.encoders import V, make_encoder
from tests.pretrained.jobs import load
from tests.ranks import RankPool

TEXTS = [[2, 7, 3], [2, 9, 8, 250, 3], [2, 3], [2, *range(40, 52), 3], [2, 11, 3]]
ROWS = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("embedder") / "bert"
    make_encoder(folder, "bert")
    return find_model(folder)


@pytest.fixture(scope="module")
def broken(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """The encoder with a last position that is too large for float32."""
    folder = shutil.copytree(Path(str(source.folder)), tmp_path_factory.mktemp("embedder") / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.position_embeddings.weight"][15] = 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return find_model(folder)


def made(source: ModelSource, precision: str = "float64") -> GPT:
    return load(source, Layout(tensor=dist.get_world_size()), precision)


def lengths_of_passes(model: GPT) -> list[int]:
    """List that receives the number of texts of each pass."""
    passes: list[int] = []
    read = model.hidden_states

    def counted(batch: Batch) -> torch.Tensor:
        passes.append(len(batch.tokens))
        return read(batch)

    model.hidden_states = counted
    return passes


def all_of(embedder: Embedder) -> dict[int, Embedded]:
    found: dict[int, Embedded] = {}
    while not embedder.is_idle:
        found |= {one.number: one for one in embedder.step()}
    return found


def _shared(source: ModelSource) -> tuple[list[int], float]:
    """On a rank: texts per pass, and the largest difference from the embeddings of `crosscut embed`."""
    model = made(source)
    expected = embeddings(model, TEXTS)
    passes = lengths_of_passes(model)
    embedder = Embedder(model, num_rows=ROWS)
    numbers = [embedder.add(ids) for ids in TEXTS]  # each is a request of its own
    found = all_of(embedder)
    return passes, float((torch.stack([found[one].embedding for one in numbers]) - expected).abs().max())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_texts_of_several_requests_share_passes(ranks: RankPool, source, num_ranks):
    for passes, difference in ranks.run(num_ranks, _shared, source):
        assert passes == [2, 3]
        assert difference < 1e-12


def _order(source: ModelSource) -> tuple[list[list[int]], int]:
    """On a rank: the texts of each pass while two large requests wait, and the passes until a small one is answered."""
    embedder = Embedder(made(source), num_rows=2)
    for request in range(2):
        for index in range(100):
            embedder.add([2, 50 * request + index % 50, 3], index=index)
    passes = [sorted(one.number for one in embedder.step()) for _ in range(_PASSES)]
    late = embedder.add([2, 5, 3])
    waited = 1
    while late not in [one.number for one in embedder.step()]:
        waited += 1
    return passes, waited


def test_large_requests_share_the_passes_and_a_small_one_does_not_wait_for_them(ranks: RankPool, source):
    ((passes, waited),) = ranks.run(1, _order, source)
    assert sorted(number for one in passes for number in one) == [*range(_PASSES), *range(100, 100 + _PASSES)]
    assert waited <= _PASSES


def _cancelled(source: ModelSource) -> tuple[list[int], list[int], bool]:
    model = made(source)
    passes = lengths_of_passes(model)
    embedder = Embedder(model, num_rows=1)
    numbers = [embedder.add(ids) for ids in TEXTS]
    (first,) = embedder.step()  # the second text is in the next pass, and the others are in none
    for number in numbers[1:4]:
        embedder.cancel(number)
    return passes, [first.number, *all_of(embedder)], embedder.is_idle


def test_cancelled_texts_are_not_computed(ranks: RankPool, source):
    ((passes, numbers, is_idle),) = ranks.run(1, _cancelled, source)
    assert (passes, numbers, is_idle) == ([1, 1], [0, 4], True)


def _not_finite(source: ModelSource) -> tuple[list[str], float]:
    """On a rank: the end of each text, and the largest difference from the embeddings of the finite texts alone."""
    model = made(source, "float32")
    embedder = Embedder(model, num_rows=4)
    texts = [[2, 7, 3], [2, *range(40, 54), 3], [2, 9, 8, 250, 3]]
    numbers = [embedder.add(ids) for ids in texts]
    found = all_of(embedder)
    alone = torch.cat([embeddings(model, [texts[0]]), embeddings(model, [texts[2]])])
    ours = torch.stack([found[number].embedding for number in (numbers[0], numbers[2])])
    assert isinstance(found[numbers[1]].error, GenerationError)
    return [found[number].finish for number in numbers], float((ours - alone).abs().max())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_text_without_a_finite_embedding_does_not_damage_those_beside_it(ranks: RankPool, broken, num_ranks):
    for finishes, difference in ranks.run(num_ranks, _not_finite, broken):
        assert finishes == ["stop", "error", "stop"]
        assert difference < 1e-6


def _skipped(source: ModelSource) -> tuple[str, float]:
    """On a rank, with a prompt of three tokens that is left out: the error for a text that is not longer, and the
    largest difference from the command's embeddings.
    """
    model, pooling = made(source), SentencePooling(SentenceSteps(poolings=("max", "cls"), after=()), num_skipped=3)
    embedder = Embedder(model, num_rows=ROWS, pooling=pooling)
    with pytest.raises(ConfigError) as caught:
        embedder.add([2, 7, 3])
    texts = [ids for ids in TEXTS if len(ids) > 3]
    numbers = [embedder.add(ids) for ids in texts]
    found = all_of(embedder)
    expected = embeddings(model, texts, pooling=pooling)
    return str(caught.value), float((torch.stack([found[one].embedding for one in numbers]) - expected).abs().max())


def test_steps_of_the_model_are_taken(ranks: RankPool, source):
    ((told, difference),) = ranks.run(1, _skipped, source)
    assert told.startswith("A text must have from 4 to 16 tokens")
    assert difference < 1e-12


def _refused(source: ModelSource, ids: list[int]) -> str:
    with pytest.raises(ConfigError) as caught:
        Embedder(made(source), num_rows=1).add(ids)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "A text must have from 1 to 16 tokens (the model's maximum sequence length), but has 0. "),
        (
            [5] * 17,
            "A text must have from 1 to 16 tokens (the model's maximum sequence length), but has 17. Split the text.",
        ),
        ([5, V], f"A text's token ids must be from 0 to {V - 1}, the model's last vocabulary entry, but are from 5 to"),
        ([-1], f"A text's token ids must be from 0 to {V - 1}, the model's last vocabulary entry, but are from -1 to"),
    ],
)
def test_text_that_the_model_cannot_read_is_refused(ranks: RankPool, source, ids, message):
    (told,) = ranks.run(1, _refused, source, ids)
    assert told.startswith(message)
