"""Valid inputs of encoders and fine-tunings, made by Crosscut itself: an encoder, tables, conversations, tuned runs."""

import json
import shutil
from pathlib import Path

import tomli_w

from benchmarks.commands import run_crosscut

ENCODER = "bert"
"""Folder of the encoder that is damaged, and served. The server takes the folder's name for the model's name."""

MASKED = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "max_sequence_length": 64,
              "attention": "bidirectional", "norm_place": "after", "token_types": 2,
              "layers": ("attention gelu_exact",),
              "head": "masked_tokens", "sentence_order": True},
    "data": {"text": ["speech.txt"], "tokenizer": "vocab.txt", "objective": "masked", "num_shards": 1,
             "mask_fraction": 0.2, "mask_words": 2},
    "training": {"steps": 1, "batch_size": 2, "sequence_length": 32, "validate_every": 0, "validation_sequences": 2,
                 "device": "cpu", "precision": "float32", "compile": "off"},
    "output": {"folder": "masked"},
}  # fmt: skip
"""Settings of a run on masked tokens."""

SETTINGS = {
    "finetuning": {"epochs": 1.0, "warmup": 0.1},
    "training": {"batch_size": 4, "sequence_length": 24, "seed": 7},
    "optimizer": {"learning_rate": 1e-3},
    "model": {"dropout": 0.0},
}
"""Settings of a fine-tuning, with its own section."""

STEP = ("training.steps=1", "training.device=cpu", "training.batch_size=4", "training.sequence_length=24",
        "training.precision=float32")  # fmt: skip
"""Settings of a fine-tuning of one step."""
TABLE = ("--train", "train.tsv", "--dev", "dev.tsv", "--text", "text", "--pair", "other", "--label", "kind")
QUESTIONS = ("--train", "squad.json", "--dev", "squad.json", "--stride", "4")
CHAT = (*STEP[:3], "training.sequence_length=48", "training.precision=float32")

EMBEDDING_REQUESTS = {
    "text": ("/v1/embeddings", {"input": "the state of the union", "encoding_format": "float"}),
    "texts": ("/v1/embeddings", {"input": ["the state", " of the union ", ""], "dimensions": 32, "user": "u"}),
    "ids": ("/v1/embeddings", {"input": [[5, 6, 7], [8]], "encoding_format": "base64"}),
    "one-row": ("/v1/embeddings", {"input": [9, 10, 11, 12]}),
}  # fmt: skip
"""Path and body of valid requests for embeddings, by name; the model's name is added."""


def make_tunings(folder: Path) -> None:
    """Write the valid inputs of encoders and fine-tunings beside those of `valid.make_valid`."""
    _make_encoder(folder)
    _write_tables(folder / "tables")
    _write_questions(folder / "tables")
    _write_conversations(folder / "chats.jsonl")
    _make_tuned(folder)


def _make_encoder(folder: Path) -> None:
    """Train a BERT for a step, and write it as a Hugging Face folder with the files of sentence-transformers."""
    (folder / "speech.txt").write_text((folder / "text.txt").read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    (folder / "masked.toml").write_text(tomli_w.dumps(MASKED))
    run_crosscut("train", "masked.toml", "data.tokenizer=", "data.vocab_size=300", folder=folder)
    run_crosscut("checkpoint", "export", "masked", ENCODER, folder=folder)
    shutil.copytree(folder / "masked" / "tokens", folder / "masked-tokens")
    vocabulary = json.loads((folder / ENCODER / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(vocabulary, key=vocabulary.__getitem__)))
    model = folder / ENCODER
    (model / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, "model_max_length": 64}, indent=1))
    (model / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))]  # fmt: skip
    (model / "modules.json").write_text(json.dumps(modules, indent=1))
    (model / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=1))
    lines = ["the state of the union", "my fellow citizens", "we the people [MASK]", "a budget of 12 dollars"]
    (folder / "lines.txt").write_text("\n".join(lines) + "\n")
    masks = [{"prompt": "the state of the [MASK]"}, {"prompt": "we [MASK] [MASK] people"}]
    (folder / "masks.jsonl").write_text("".join(json.dumps(mask) + "\n" for mask in masks))


def _write_tables(folder: Path) -> None:
    """Write files of GLUE, and tables with the same content."""
    folder.mkdir()
    texts = [(f"the state of year {i}", f"my fellow citizens {i}", ("war", "peace")[i % 2]) for i in range(8)]
    for part, content in (("train", texts), ("dev", texts[:4])):
        lines: dict[str, list[str]] = {
            "table": ["text\tother\tkind"],
            "sst-2": ["sentence\tlabel"],
            "cola": [],
            "mnli": ["index\tsentence1\tsentence2\tgold_label"],
            "qqp": ["id\tquestion1\tquestion2\tis_duplicate"],
        }
        for i, (one, other, kind) in enumerate(content):
            lines["table"].append(f"{one}\t{other}\t{kind}")
            lines["sst-2"].append(f"{one}\t{i % 2}")
            lines["cola"].append(f"x1\t{i % 2}\t\t{one}")
            lines["mnli"].append(f"{i}\t{one}\t{other}\t{('entailment', 'neutral', 'contradiction')[i % 3]}")
            lines["qqp"].append(f"{i}\t{one}\t{other}\t{i % 2}")
        for task, rows in lines.items():
            (folder / f"{task}-{part}.tsv").write_text("".join(f"{line}\n" for line in rows))
        objects = ({"text": one, "other": other, "kind": kind} for one, other, kind in content)
        (folder / f"table-{part}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in objects))
    (folder / "settings.toml").write_text(tomli_w.dumps(SETTINGS))


def _write_questions(folder: Path) -> None:
    """Write a file of SQuAD 2.0 and a folder of RACE."""
    text = "the state of the union is strong. my fellow citizens, we the people gather here, and the war is over."
    answers = [{"text": "strong", "answer_start": text.index("strong")}]
    questions = [
        {"id": "a", "question": "how is the union?", "is_impossible": False, "answers": answers},
        {"id": "b", "question": "who came?", "is_impossible": True, "answers": [], "plausible_answers": answers},
        {"id": "c", "question": "what is over?", "is_impossible": False,
         "answers": [{"text": "the war", "answer_start": text.index("the war")}] * 2},
    ]  # fmt: skip
    table = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": text, "qas": questions}]}]}
    (folder / "squad.json").write_text(json.dumps(table, indent=1))
    for part in ("train", "dev"):
        (folder / "race" / part / "high").mkdir(parents=True)
        for number in range(2):
            article = {
                "id": f"high{number}.txt", "article": text, "answers": ["A", "D"],
                "questions": ["the union is _ .", "what is over?"],
                "options": [["strong", "weak", "old", "new"], ["we", "it", "the law", "the war"]],
            }  # fmt: skip
            (folder / "race" / part / "high" / f"{number}.txt").write_text(json.dumps(article))


def _write_conversations(path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = [{"messages": [{"role": "system", "content": "be brief"}, *turns]}, {"messages": turns * 2},
            {"messages": [*turns, turns[0], {**turns[1], "weight": 0}]}, {"messages": turns}]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_tuned(folder: Path) -> None:
    """Fine-tune for one step: with labels, for questions, and on conversations with adapters.

    The runs have no summary and so are not complete. A resumed run therefore reads all its files.
    """
    for name in ("train", "dev"):
        shutil.copyfile(folder / "tables" / f"table-{name}.tsv", folder / f"{name}.tsv")
    shutil.copyfile(folder / "tables" / "squad.json", folder / "squad.json")
    run_crosscut("finetune", "table", "--model", ENCODER, *TABLE, "--output", "tuned", *STEP, folder=folder)
    run_crosscut("finetune", "squad", "--model", ENCODER, *QUESTIONS, "--output", "answers", *STEP, folder=folder)
    run_crosscut(
        "finetune", "chat", "chats.jsonl", "--model", "hf", "--lora-rank", "2", "--output", "chat", *CHAT, folder=folder
    )
    for name in ("tuned", "answers", "chat"):
        shutil.rmtree(folder / name / "tensorboard", ignore_errors=True)
        for picture in (folder / name).glob("*.png"):
            picture.unlink()
    shutil.copytree(folder / "chat" / "adapter", folder / "adapter")
    for name in ("tuned", "answers"):
        shutil.copytree(folder / name, folder / f"{name}-begun")
        (folder / f"{name}-begun" / "summary.json").unlink()
