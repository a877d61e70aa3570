import pytest
import torch

from crosscut.config import ConfigError, Layout, ModelConfig
from crosscut.generation import Sampling, sample
from crosscut.model import GPT, initialize
from crosscut.parallel import RandomStreams, make_mesh, shard_model

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=100, max_sequence_length=10, dropout=0.5)


def make(layout: Layout) -> GPT:
    mesh = make_mesh(layout, torch.device("cpu"))
    model = GPT(MODEL, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=torch.float64)
    shard_model(model, mesh, units=model.blocks, always_used=True)
    initialize(model, 1)
    for parameter in model.parameters():
        parameter.data.to_local().mul_(8)  # far from uniform, so that choices differ
    return model


def write(layout: Layout, sampling: Sampling, stop: int | None = None) -> list[int]:
    return sample(make(layout), [5, 6, 7], sampling, stop=stop)


LAYOUTS = [Layout(), Layout(tensor=2), Layout(tensor=4), Layout(tensor=4, sequence_parallel=True)]
LAYOUTS += [Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_and_rank_writes_the_same(ranks, layout):
    sampling = Sampling(num_tokens=20, temperature=1.0, top_k=40, seed=3)  # longer than the model's positions
    expected = ranks.run(1, write, Layout(), sampling)[0]
    assert len(expected) == 20
    assert ranks.run(layout.world_size, write, layout, sampling) == [expected] * layout.world_size


def greedy_by_hand() -> list[int]:
    model = make(Layout()).eval()
    tokens = [5, 6, 7]
    with torch.no_grad():
        for _ in range(5):
            tokens.append(int(model.logits(torch.tensor([tokens])).argmax()))
    return tokens[3:]


def test_temperature_zero_takes_the_likeliest(ranks):
    assert ranks.run(1, write, Layout(), Sampling(num_tokens=5, temperature=0.0))[0] == ranks.run(1, greedy_by_hand)[0]


def test_another_seed_writes_another_text(ranks):
    texts = [ranks.run(1, write, Layout(), Sampling(num_tokens=20, temperature=1.5, seed=s))[0] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_text_ends_before_the_stop(ranks):
    sampling = Sampling(num_tokens=20, temperature=1.0, seed=3)
    whole = ranks.run(1, write, Layout(), sampling)[0]
    stop = whole[4]
    assert ranks.run(1, write, Layout(), sampling, stop)[0] == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("field", "value", "minimum"), [("num_tokens", -1, 0), ("temperature", -0.5, 0), ("top_k", 0, 1)]
)
def test_impossible_sampling_is_refused(field, value, minimum):
    with pytest.raises(ConfigError, match=rf"`{field}` must be at least {minimum}, but is {value}"):
        Sampling(**{field: value})
