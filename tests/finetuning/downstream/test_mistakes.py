"""Mistakes that are told before any process starts."""

import json
from pathlib import Path

import pytest

from crosscut.config import ConfigError, CrosscutError, DataError, load_run
from crosscut.finetuning.downstream.folder import TaskRuns
from crosscut.finetuning.downstream.task import TunedTask
from tests.finetuning.downstream.conftest import PLAIN, finetune, sentences, write_table

ASKED = ("{tables}", "--model", "{bert}")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("{tables}",), ConfigError, "`finetune table` must be given `--model`, but no model is given"),
        (("{tables}", "--model", "{folder}/none"), ConfigError, "must be a run's folder, a checkpoint or a Hugging"),
        ((*ASKED, "--seeds", "0"), ConfigError, "`--seeds` must be at least 1, but is 0"),
        ((*ASKED, "--ensemble"), ConfigError, "`--seeds` must be at least 2 with `--ensemble`, but is 1"),
        ((*ASKED, "--epochs", "0"), ConfigError, "`epochs` must be above 0, but is 0"),
        ((*ASKED, "--warmup", "1"), ConfigError, "`warmup` must be at least 0 and below 1, but is 1"),
        ((*ASKED, "--text", "body"), DataError, "Line 1 of `.*train.tsv` must have the columns `body`, but has"),
        ((*ASKED, "--labels", "cat,dog"), DataError, r"`kind` in `.*` must be 'cat' or 'dog', but is 'fox' in line 2"),
        ((*ASKED, "--dev", "{folder}/other.tsv"), DataError, "`kind` in `.*` must be 'dog' or 'fox', but is 'bird'"),
        ((*ASKED, "--dev", "{folder}/none.tsv"), DataError, "`.*none.tsv` must be a readable file, but is not"),
        ((*ASKED, "--dev", "{folder}/unlabelled.tsv"), DataError, "Line 1 of `.*` must have the columns `kind`"),
        ((*ASKED, "--train", "{folder}/one.tsv"), DataError, "`.*` must have at least 2 different labels, but has 1"),
        (
            ("--text", "a", "--label", "b", "--model", "{bert}"),
            ConfigError,
            "`--train` must name the examples of the task, or .*, but neither option is given. Pass --train.",
        ),
        (
            ("--text", "a", "--label", "b", "--model", "{bert}", "--data", "{folder}"),
            ConfigError,
            r"`--train` must name the examples of the task, or .* has no `train.tsv` or `train.jsonl`. Pass --train.",
        ),
        (("--model", "{bert}"), ConfigError, "but `--text` is not given. Pass --text COLUMN."),
        (
            (*ASKED, "--long", "refuse", "training.sequence_length=12"),
            DataError,
            r"Every example of `.*` must fit into `training.sequence_length` \(12 tokens\), but \d+ of 44 do not",
        ),
        ((*ASKED, "training.sequence_length=50"), ConfigError, r"must be at most `model.max_sequence_length` \(48\)"),
        ((*ASKED, "layout.tensor=3"), CrosscutError, "`layout.tensor` must divide"),
        ((*ASKED, "data.text=a.txt"), ConfigError, "`data.text` must not be set for `finetune`, but is set. The"),
        ((*ASKED, "model.num_layers=3"), ConfigError, "must not be set for `finetune`, but is set. `--model` decides"),
        ((*ASKED, "output.folder=x"), ConfigError, "must not be set for `finetune`, but is set. `--output` names"),
        (
            (*ASKED, "training.initial_batch_size=4", "training.ramp_steps=2", "training.steps=9"),
            ConfigError,
            "`training.initial_batch_size` must be 0 for `finetune`",
        ),
        ((*ASKED, "optimizer.ema_decay=0.9"), ConfigError, "`optimizer.ema_decay` must be 0 for `finetune`"),
        (
            (*ASKED, "training.validate_every=4", "checkpoint.every=3"),
            ConfigError,
            r"`checkpoint.every` must divide `training.validate_every` \(4\)",
        ),
        (("--resume",), ConfigError, "must be the folder of a run of `crosscut finetune TASK`, but has no `task.json`"),
        (("--resume", "--seeds", "3"), ConfigError, "`--seeds` must not be given with `--resume`"),
        (("--resume", "--model", "x"), ConfigError, "`--model` must not be given with `--resume`"),
        ((*ASKED, "--output", "{folder}/held"), ConfigError, "`--output` must name a new folder, but `.*` already"),
        (("{folder}/bad.toml", *ASKED), ConfigError, r"`\[finetuning\]` in `.*` must be a section with only the keys"),
        (("{folder}/none.toml", *ASKED), ConfigError, "`.*none.toml` must be a readable TOML file, but is not"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_any_process_starts(bert, tables, tmp_path, arguments, kind, message):
    rows = sentences(8)
    write_table(tmp_path / "other.tsv", [(*row[:2], "bird") for row in rows])
    write_table(tmp_path / "unlabelled.tsv", rows, label="something")
    write_table(tmp_path / "one.tsv", [row for row in rows if row[2] == "fox"])
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.toml").write_text("")
    (tmp_path / "bad.toml").write_text("[finetuning]\nepoch = 3\n")
    words = [word for each in arguments for word in (map(str, tables) if each == "{tables}" else [each])]
    filled = [word.format(bert=bert, folder=tmp_path) for word in words]
    output = () if "--output" in filled else ("--output", tmp_path / "run")
    with pytest.raises(kind, match=message):
        finetune("table", *filled, *output, *([] if "--resume" in filled else PLAIN))
    assert not (tmp_path / "run" / "task.json").exists()


def test_answers_that_do_not_occur_in_their_text_are_told(bert, tmp_path):
    answers = [{"text": "France", "answer_start": 3}]
    table = {
        "data": [{"paragraphs": [{"context": "Normandy.", "qas": [{"id": "1", "question": "?", "answers": answers}]}]}]
    }
    path = tmp_path / "train.json"
    path.write_text(json.dumps(table))
    with pytest.raises(DataError, match=r"Every answer in .* must occur in the text at `answer_start`, but 1 do not"):
        finetune("squad", "--model", bert, "--train", path, "--dev", path, "--output", tmp_path / "run", *PLAIN)


def test_a_tokenizer_of_another_model_is_told(make_bert, tables, tmp_path):
    folder: Path = make_bert(vocab_size=60)
    with pytest.raises(ConfigError, match="must be the tokenizer of the model, with ids below 60, but has the id"):
        finetune("table", "--model", folder, *tables, "--output", tmp_path / "run", *PLAIN)


def test_a_folder_with_both_versions_of_squad_is_told(bert, tmp_path):
    for version in ("1.1", "2.0"):
        (tmp_path / f"train-v{version}.json").write_text("{}")
    with pytest.raises(
        ConfigError,
        match=r"`--data` must name a folder with exactly one file .* as --train, but .* Name the file with --train.",
    ):
        finetune("squad", "--model", bert, "--data", tmp_path, "--output", tmp_path / "run", *PLAIN)


def kept_in(folder: Path) -> TaskRuns:
    run = load_run({"model": {"preset": "laptop-bert"}, "output": {"folder": str(folder)}})
    return TaskRuns(task=TunedTask(name="rte"), run=run, model="", files={}, padding=0)


@pytest.mark.parametrize(("key", "value"), [("label", "abc"), ("label", 0.5), ("text", 3), ("pair", {})])
def test_kept_examples_have_the_types_of_their_fields(tmp_path, key, value):
    kept = kept_in(tmp_path)
    (tmp_path / "data").mkdir()
    table = {"text": "a", "pair": "b", "label": 1}
    (tmp_path / "data" / "dev.jsonl").write_text(json.dumps(table) + "\n")
    assert kept.examples("dev")[0].label == 1
    (tmp_path / "data" / "dev.jsonl").write_text(json.dumps({**table, key: value}) + "\n")
    with pytest.raises(DataError, match=f"must hold the examples of the run, but cannot be read: `{key}` must be a"):
        kept.examples("dev")


def test_a_description_that_is_nested_too_deeply_is_not_read(tmp_path):
    kept_in(tmp_path).save()
    assert TaskRuns.load(tmp_path).task == TunedTask(name="rte")
    table = json.loads((tmp_path / "task.json").read_text())
    table["run"]["output"] = "@"
    (tmp_path / "task.json").write_text(json.dumps(table).replace('"@"', '{"a":' * 900 + "1" + "}" * 900))
    with pytest.raises(ConfigError, match=r"task\.json` must describe a fine-tuning"):
        TaskRuns.load(tmp_path)
