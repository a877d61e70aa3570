"""Every family with every head: from `transformers` into Crosscut, and from there into `transformers` again."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.config.generation.sampling import Sampling
from crosscut.config.published.families import FAMILIES
from crosscut.generation.decoder import Decoder
from crosscut.model import Batch
from crosscut.parallel import enter_tensor_parallel
from crosscut.pretrained import ModelSource, export_model, find_model
from tests.pretrained import jobs
from tests.pretrained.models import (
    DELTA_SHAPES,
    IN_FLOAT64,
    LLAMA_SHAPE,
    MIXTURES,
    STATE_SPACE_SHAPES,
    InFloat64,
    V,
    in_one_type,
    write_random,
)
from tests.pretrained.tasks import as_qwen2

B, S, NEW = 3, 10, 24
TOKENS = torch.arange(B * S).view(B, S) * 37 % (V - 2) + 2
LABELS = {"id2label": {0: "no", 1: "perhaps", 2: "yes"}, "label2id": {"no": 0, "perhaps": 1, "yes": 2}}
OF_BERT = {
    name: LLAMA_SHAPE[name] for name in LLAMA_SHAPE if name not in ("num_key_value_heads", "tie_word_embeddings")
}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64},
    "gpt_bigcode": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64},
    "arcee": {**LLAMA_SHAPE, "hidden_act": "relu2"},
    "nanochat": {**LLAMA_SHAPE, "final_logit_softcapping": 2.0},
    **STATE_SPACE_SHAPES,
    **DELTA_SHAPES,
    **dict(MIXTURES.values()),
    "bert": OF_BERT,
    "roberta": {**OF_BERT, "type_vocab_size": 1, "pad_token_id": 1},
}


def cases() -> Iterator[Any]:
    """Yield the type and the architecture of each model, and the number of labels of a classifier."""
    for family in FAMILIES.values():
        yield pytest.param(family.model_type, family.architecture, 0, id=family.architecture)
        for architecture, fields in family.heads.items():
            numbers = (3, 1) if fields["head"] == "classes" else (0,)
            for number in numbers:
                yield pytest.param(family.model_type, architecture, number, id=f"{architecture}-{number}")


@pytest.fixture
def published(tmp_path: Path) -> Callable[..., Path]:
    def made(model_type: str, architecture: str, num_labels: int) -> Path:
        import transformers

        sizes = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, **SIZES.get(model_type, LLAMA_SHAPE)}
        labels = LABELS if num_labels == 3 else {"num_labels": num_labels or 2}
        config = transformers.AutoConfig.for_model(model_type, vocab_size=V, **sizes, **labels)
        options = {"add_pooling_layer": False} if architecture in ("BertModel", "RobertaModel") else {}
        torch.manual_seed(3)
        write_random(getattr(transformers, architecture)(config, **options), tmp_path / "model")
        if model_type == "qwen2":
            as_qwen2(tmp_path / "model")
        return tmp_path / "model"

    return made


def their_model(folder: Path) -> Any:
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture).from_pretrained(folder, **IN_FLOAT64).eval()
    return in_one_type(model, torch.float64)


@torch.no_grad()
def theirs(folder: Path) -> list[Tensor]:
    """All logits of a model by `transformers`, or the hidden states of a model without a head. A classifier reads one
    text at a time, because there is no padding.
    """
    model, found = their_model(folder), []
    parts = [TOKENS[None]] if type(model).__name__.endswith("MultipleChoice") else TOKENS.split(1)
    for part in parts:
        with InFloat64():
            told = model(part)
        names = ("prediction_logits", "logits", "start_logits", "last_hidden_state", "seq_relationship_logits")
        found.append([told[name] for name in names if told.get(name) is not None])
        if "start_logits" in told:
            found[-1] = [torch.stack([told.start_logits, told.end_logits], -1)]
    return [torch.cat(column) for column in zip(*found, strict=True)]


@torch.no_grad()
def ours(source: ModelSource, out: Path | None) -> list[Tensor]:
    """On a rank: the same by Crosscut. The model is exported to `out`, if given."""
    model = jobs.load(source, Layout(), "float64")
    if out is not None:
        export_model(model, out, tokenizer=source.tokenizer, stops=source.stops, labels=source.labels)
    if source.model.solves_task:
        return [model.task_logits(Batch(tokens=TOKENS), num_choices=B if source.model.head == "choice" else 1)]
    hidden = model.hidden_states(Batch(tokens=TOKENS))
    if not source.model.is_causal and not source.model.predicts_masked:
        return [hidden]
    order = [] if not source.model.sentence_order else [model.order(enter_tensor_parallel(hidden, model.mesh)[:, 0])]
    return [model.logits_of(hidden.flatten(0, 1)).view(B, S, V), *order]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("model_type", "architecture", "num_labels"), list(cases()))
def test_a_model_computes_the_same_in_transformers_here_and_there_again(
    ranks, published, tmp_path, model_type, architecture, num_labels
):
    folder, out = published(model_type, architecture, num_labels), tmp_path / "out"
    source, wanted = find_model(folder), theirs(folder)
    assert source.left_out == ()
    (found,) = ranks.run(1, ours, source, out)
    again = find_model(out)
    assert (again.model, again.labels, again.stops) == (source.model, source.labels, source.stops)
    (found_again,) = ranks.run(1, ours, again, None)
    # NanoChat's norm of heads follows the rotation, whose sines `transformers` rounds to float32. Those of DeepSeek-V2
    # come from another function.
    close = 1e-6 if model_type in ("nanochat", "deepseek_v2") else 1e-9
    for logits in (found, theirs(out), found_again):
        assert len(logits) == len(wanted)
        for one, other in zip(logits, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=close, atol=close)
            assert torch.equal(one.argmax(-1), other.argmax(-1))
    if num_labels == 3:
        assert their_model(out).config.id2label == LABELS["id2label"]


def decoded(source: ModelSource) -> list[list[int]]:
    """On a rank: the likeliest continuation of each sequence up to a stop."""
    model = jobs.load(source, Layout(), "float64")
    decoder = Decoder(model, None, num_rows=B, stops=(source.end_of_text, *source.stops))
    for row in TOKENS.tolist():
        decoder.add(row, Sampling(num_tokens=NEW, temperature=0.0))
    found: list[list[int]] = [[] for _ in range(B)]
    for piece in decoder.run():
        found[piece.number].append(piece.token)
    return found


@torch.no_grad()
def their_continuations(folder: Path, **settings: Any) -> list[list[int]]:
    model, found = their_model(folder), []
    for row in TOKENS:
        with InFloat64():
            told = model.generate(row[None], max_new_tokens=NEW, do_sample=False, **settings)
        found.append(told[0, S:].tolist())
    return found


@pytest.mark.one_in(13)
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in ("bert", "roberta")])
def test_generation_stops_at_the_same_tokens(ranks, published, tmp_path, model_type):
    """A second end of text stands only in `generation_config.json`."""
    folder, out = published(model_type, FAMILIES[model_type].architecture, 0), tmp_path / "out"
    endless = their_continuations(folder, eos_token_id=None)
    stop = endless[0][min(4, [*endless[0], 0].index(0) - 1)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, stop]}))
    wanted = their_continuations(folder)
    assert wanted[0] == endless[0][: endless[0].index(stop) + 1] and wanted != endless
    source = find_model(folder)
    ranks.run(1, ours, source, out)
    for continuations in (ranks.run(1, decoded, source)[0], ranks.run(1, decoded, find_model(out))[0]):
        assert continuations == wanted
    assert their_continuations(out) == wanted
