"""Exported models for tasks: `transformers` gives the scores of the run from texts alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import normalizers, pre_tokenizers, processors
from torch import Tensor

from crosscut.architecture import describe
from crosscut.config import ConfigError, Layout
from crosscut.config.published.tokenizer_classes import QWEN2_SPLIT
from crosscut.data import Tokenizer
from crosscut.data.tokenization.wordpiece import train_wordpiece
from crosscut.finetuning.encoding.rows import EncodedRow, EncodedRows
from crosscut.finetuning.encoding.tokens import Pair, TextEncoder
from crosscut.model import Batch
from crosscut.pretrained import ModelSource, export_model, find_model
from tests.pretrained import jobs
from tests.pretrained.models import InFloat64
from tests.pretrained.tasks import MODELS, as_qwen2, make_model

TEXTS: list[Pair] = [
    ("the quick brown fox", None),
    (" the  lazy dog, [SEP] <|endoftext|><s>[PAD]", None),
    ("a", None),
    ("jumps\nover 世界 1066!", None),
]
PAIRS: list[Pair] = [
    (text, other) for (text, _), other in zip(TEXTS, ("over the dog", "</s>", " fox ", "x"), strict=True)
]
PAIRS.append(("a", ""))  # in a list, `transformers` takes it for a pair
CORPUS = ["the quick brown fox jumps over the lazy dog 1066 " * 50]
CLASSES = ["GPT2ForSequenceClassification", "LlamaForSequenceClassification", "BertForSequenceClassification"]
SPANS = ["GPT2ForQuestionAnswering", "Qwen3ForQuestionAnswering", "BertForQuestionAnswering"]


def write_tokenizer(folder: Path, kind: str) -> None:
    """Write a tokenizer whose files say something that would change the rows."""
    path, settings = folder / "tokenizer.json", {"tokenizer_class": "PreTrainedTokenizerFast"}
    if kind == "wordpiece":
        inner = train_wordpiece(CORPUS, vocab_size=270)
        inner.enable_truncation(6)
        inner.save(str(path))
        settings |= {"tokenizer_class": "BertTokenizer", "never_split": ["fox"]}
    else:
        Tokenizer.train(CORPUS, vocab_size=290).save(path)
        inner = tokenizers.Tokenizer.from_file(str(path))
        settings["eos_token"] = "<|endoftext|>"
    if kind == "roberta":
        inner.add_special_tokens(["<s>", "</s>", "<pad>", "<mask>"])
        ends = [("</s>", inner.token_to_id("</s>")), ("<s>", inner.token_to_id("<s>"))]
        inner.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=True)
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        settings |= {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}
    elif kind == "padding":
        inner.add_special_tokens(["<pad>"])
        settings |= {"pad_token": "<|endoftext|>", "padding_side": "left"}
    elif kind == "high":
        inner.add_tokens([f"<{number}>" for number in range(300 - inner.get_vocab_size())])
        inner.add_special_tokens(["[PAD]"])
    elif kind == "begin":
        inner.add_special_tokens(["<s>", "<|pad_right|>"])
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", inner.token_to_id("<s>"))]
        )
        settings |= {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": False, "truncation_side": "left"}
    elif kind == "added":
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
        )
        inner.normalizer = normalizers.NFC()
        settings |= {
            "tokenizer_class": "GPT2Tokenizer",
            "added_tokens_decoder": {
                "291": {"content": "quick", "special": False},
                "0": {"content": "<|endoftext|>", "special": True},
            },
        }
    inner.save(str(path))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Callable[..., tuple[ModelSource, Path]]:
    """Export a random model with one of the tokenizers."""

    def of(architecture: str, kind: str, **changes: Any) -> tuple[ModelSource, Path]:
        root = tmp_path_factory.mktemp("task-files")
        size = "n_positions" if "GPT2" in architecture else "max_position_embeddings"
        folder = make_model(root / "model", architecture, **{"pad_token_id": None, size: 64, **changes})
        write_tokenizer(folder, kind)
        source = find_model(folder)
        ranks.run(1, export, source, root / "out")
        return source, root / "out"

    return of


def export(source: ModelSource, out: Path) -> None:
    model = jobs.load(source, Layout(), "float64")
    export_model(model, out, tokenizer=source.tokenizer, stops=source.stops, labels=source.labels)


def rows_of(source: ModelSource, pairs: list[Pair]) -> EncodedRows:
    """Rows as the fine-tuning makes them."""
    encoder = TextEncoder(source.tokenizer, source.model, source.special, length=source.model.max_sequence_length)
    found = [EncodedRow.of(each) for each in encoder.encode(pairs)]
    return EncodedRows.of(found, np.zeros(len(found)), range(len(found)))


@torch.no_grad()
def scores(source: ModelSource, rows: EncodedRows, num_choices: int) -> Tensor:
    """On a rank: the scores of the run, [rows, classes], [rows, S, 2] or [questions, options]."""
    model = jobs.load(source, Layout(), "float64")
    padded = rows.padded(np.arange(rows.num_examples), length=int(rows.lengths.max()), padding=0)
    batch = Batch.of(padded, describe(model.config).reads(document_mask=False))
    return model.task_logits(batch, num_choices=num_choices)


@torch.no_grad()
def theirs(out: Path, kind: str, pairs: list[Pair], *, is_batch: bool) -> list[Tensor]:
    """Scores by `transformers`, from texts alone."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(out, dtype=torch.float64).eval()
    found = []
    for part in [pairs] if is_batch else [[each] for each in pairs]:
        texts, others = (list(column) for column in zip(*part, strict=True))
        others = others if others[0] is not None else None
        given = tokenizer(texts, others, padding=is_batch, return_tensors="pt")
        if kind == "MultipleChoice":
            given = {name: tensor.unsqueeze(0) for name, tensor in given.items()}
        with InFloat64():
            told = model(**given)
        if kind == "QuestionAnswering":
            both = torch.stack([told.start_logits, told.end_logits], -1)
            found += [own[mask.bool()] for own, mask in zip(both, given["attention_mask"], strict=True)]
        else:
            found += list(told.logits)
    return found


def assert_same(ranks: Any, source: ModelSource, out: Path, pairs: list[Pair], *, is_batch: bool) -> None:
    rows, head = rows_of(source, pairs), source.model.head
    (ours,) = ranks.run(1, scores, source, rows, len(pairs) if head == "choice" else 1)
    kind = {"classes": "SequenceClassification", "spans": "QuestionAnswering", "choice": "MultipleChoice"}[head]
    found = theirs(out, kind, pairs, is_batch=is_batch)
    wanted = [own[:size] for own, size in zip(ours, rows.lengths, strict=True)] if head == "spans" else list(ours)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["plain", "padding", "begin", "added"])
@pytest.mark.parametrize("architecture", [*CLASSES[:2], *SPANS[:2]])
def test_a_decoder_gets_the_scores_of_the_run_from_texts_alone(exported, ranks, architecture, kind):
    source, out = exported(architecture, kind)
    told = json.loads((out / "config.json").read_text())
    has_padding = kind in ("padding", "begin")
    assert (told["pad_token_id"] is not None) == has_padding
    for pairs in (TEXTS, PAIRS):
        for is_batch in (False, True) if has_padding else (False,):
            assert_same(ranks, source, out, pairs, is_batch=is_batch)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("architecture", "kind", "padding"),
    [
        ("BertForSequenceClassification", "wordpiece", 0),
        ("BertForQuestionAnswering", "wordpiece", 0),
        ("BertForMultipleChoice", "wordpiece", 0),
        ("RobertaForSequenceClassification", "roberta", 1),
        ("RobertaForMultipleChoice", "roberta", 1),
    ],
)
def test_an_encoder_gets_the_scores_of_the_run_from_texts_alone(exported, ranks, architecture, kind, padding):
    source, out = exported(architecture, kind, pad_token_id=padding)
    for pairs in (PAIRS,) if source.model.head == "choice" else (TEXTS, PAIRS):
        assert_same(ranks, source, out, pairs, is_batch=True)


@pytest.mark.parametrize("kind", ["plain", "high"])
def test_without_padding_texts_are_not_batched(exported, kind):
    """`transformers` refuses a batch; it does not give wrong scores. A token that the model lacks is no padding."""
    _, out = exported("GPT2ForSequenceClassification", kind)
    with pytest.raises(ValueError, match="does not have a padding token"):
        theirs(out, "SequenceClassification", TEXTS, is_batch=True)


def test_long_texts_are_cut_as_in_the_run(exported, ranks):
    from transformers import AutoTokenizer

    source, out = exported("GPT2ForSequenceClassification", "begin")
    pairs: list[Pair] = [("fox " * 40, None), ("fox " * 30, "dog " * 40)]
    rows, tokenizer = rows_of(source, pairs), AutoTokenizer.from_pretrained(out)
    for number, (text, other) in enumerate(pairs):
        assert tokenizer(text, other, truncation=True).input_ids == rows.ids[rows.row(number)].tolist()


def test_a_tokenizer_of_a_qwen2_must_be_qwen2s(exported, ranks, tmp_path):
    from transformers.models.qwen2 import tokenization_qwen2

    assert tokenization_qwen2.PRETOKENIZE_REGEX == QWEN2_SPLIT
    sizes = MODELS["LlamaForSequenceClassification"][1]
    folder = make_model(
        tmp_path / "model",
        "Qwen2ForSequenceClassification",
        **{**sizes, "pad_token_id": None, "max_position_embeddings": 64},
    )
    write_tokenizer(folder, "plain")
    with pytest.raises(
        ConfigError, match=r"must split texts as Qwen2 does .* Use the run with `crosscut finetune pred"
    ):
        ranks.run(1, export, find_model(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    as_qwen2(folder)
    source = find_model(folder)
    ranks.run(1, export, source, tmp_path / "out")
    for pairs in (TEXTS, PAIRS):
        assert_same(ranks, source, tmp_path / "out", pairs, is_batch=False)
