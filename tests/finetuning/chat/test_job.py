"""`crosscut finetune chat` from files to a tuned model, on any layout."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.config import ConfigError, CrosscutError, DataError, Layout, RunHung, RunStopped, load_run
from crosscut.finetuning.chat.job import ChatOrder, _packed, _run_of
from crosscut.launch import door
from crosscut.pretrained import export_checkpoint, find_model
from crosscut.training import run_training
from crosscut.training.driving import driver
from tests.finetuning.chat.conftest import ENDED, chats, write_chats
from tests.finetuning.downstream.conftest import finetune, rows_of
from tests.pretrained import jobs
from tests.pretrained.test_export import tensors_in

SETTINGS = (
    "training.batch_size=4", "training.sequence_length=64", "training.precision=float64", "training.steps=4",
    "optimizer.learning_rate=0.01", "training.device=cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def in_threes(published, tmp_path_factory) -> Path:
    """A model whose heads three ranks can share, and conversations beside it."""
    folder = tmp_path_factory.mktemp("threes")
    shutil.copytree(published("llama in threes"), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(ENDED)
    write_chats(folder / "chats.jsonl", chats(24))
    return folder


@pytest.mark.slow  # the next test compares a run that is resumed on three ranks
@pytest.mark.parametrize("rank", [4, 0], ids=["adapters", "all weights"])
def test_three_tensor_ranks_train_the_same_model_as_one(in_threes, tmp_path, forked_ranks, rank):
    for tensor in (1, 3):
        finetune(
            "chat", in_threes / "chats.jsonl", "--model", in_threes / "model",
            "--output", tmp_path / str(tensor), "--lora-rank", rank, f"layout.tensor={tensor}", *SETTINGS,
        )  # fmt: skip
        export_checkpoint(find_model(tmp_path / str(tensor)), tmp_path / f"merged-{tensor}")
    one, three = (rows_of(tmp_path / str(tensor), "loss") for tensor in (1, 3))
    assert one == pytest.approx(three, rel=1e-6)
    assert one[-1] < one[0]
    merged, initial = tensors_in(tmp_path / "merged-1"), tensors_in(in_threes / "model")
    for name, tensor in tensors_in(tmp_path / "merged-3").items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-7, atol=1e-9)
        is_matrix = tensor.dim() == 2 and ".layers." in name
        assert torch.equal(tensor.float(), initial[name]) == (bool(rank) and not is_matrix), name


@pytest.mark.slow  # tests/training/teachers has the quick tests
def test_a_teacher_on_another_number_of_ranks_teaches_only_the_answers(in_threes, tmp_path, forked_ranks):
    """From the untuned model, whose predictions are those of the student before its first step. A resumed run says that
    the weights of its teacher have changed.
    """
    model, teacher = in_threes / "model", shutil.copytree(in_threes / "model", tmp_path / "teacher")
    settings = (f"teacher.folder={teacher}", "teacher.alpha=0.5", "teacher.loss=reverse_kl", "teacher.tensor=1")
    for tensor in (1, 3):
        finetune(
            "chat", in_threes / "chats.jsonl", "--model", model, "--output", tmp_path / str(tensor),
            f"layout.tensor={tensor}", *SETTINGS, *settings,
        )  # fmt: skip
    for name in ("loss", "data_loss", "distillation_loss"):
        one, three = (rows_of(tmp_path / str(tensor), name) for tensor in (1, 3))
        assert one == pytest.approx(three, rel=1e-6, abs=1e-12)
    assert one[0] == pytest.approx(0.0, abs=1e-12)
    assert one[-1] > 1e-6
    weights = teacher / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    told = finetune("chat", "--resume", "--output", tmp_path / "1", "training.steps=5").output
    assert "The teacher or its share of the loss changes at step 5 (`teacher`). `teacher.folder` now holds" in told


@pytest.mark.slow
def test_a_run_is_resumed_on_another_layout_without_its_files(ranks, in_threes, tmp_path, forked_ranks):
    path, model, out = tmp_path / "chats.jsonl", in_threes / "model", tmp_path / "run"
    shutil.copy(in_threes / "chats.jsonl", path)
    finetune(
        "chat", path, "--model", model, "--output", out, "--lora-rank", "2", *SETTINGS,
        "checkpoint.every=2", "checkpoint.keep=9",
    )  # fmt: skip
    whole = rows_of(out, "loss")
    export_checkpoint(find_model(out), tmp_path / "whole")
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    path.unlink()
    with pytest.raises(
        ConfigError, match=r"holds a run of `crosscut finetune chat`\. Resume that run with `crosscut fine"
    ):
        run_training(load_run(out / "config.toml"), resume=True)
    finetune("chat", "--resume", "--output", out, "layout.tensor=3")
    assert rows_of(out, "loss") == pytest.approx(whole, rel=1e-6)
    assert whole[-1] < whole[0]
    export_checkpoint(find_model(out), tmp_path / "resumed")
    expected, initial = tensors_in(tmp_path / "whole"), tensors_in(model)
    for name, tensor in tensors_in(tmp_path / "resumed").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-7, atol=1e-9)
        assert torch.equal(tensor.float(), initial[name]) != (tensor.dim() == 2 and ".layers." in name), name
    own, beside = find_model(out), find_model(model, adapter=out / "adapter")
    (ours, theirs) = (ranks.run(1, jobs.logits, one, Layout(), ["float64"])[0][0] for one in (own, beside))
    assert float((ours - theirs).abs().max()) < 1e-6
    summary = json.loads((out / "summary.json").read_text())
    assert summary["validation_loss_after"] < summary["validation_loss_before"]


def test_ranks_that_hang_start_again_and_a_run_that_hangs_says_how_it_resumes(
    in_threes, tmp_path, forked_ranks, monkeypatch
):
    launch, hangs = door.launch, [True, False]

    def launch_and_hang(*arguments: Any, **options: Any) -> None:
        if len(hangs) == 2:
            launch(*arguments, **options)
        raise RunHung(may_restart=hangs.pop(0))

    monkeypatch.setattr(door, "launch", launch_and_hang)
    monkeypatch.setattr(driver, "ignore_requests", lambda: None)
    out = tmp_path / "run"
    with pytest.raises(RunStopped) as stopped:
        finetune("chat", in_threes / "chats.jsonl", "--model", in_threes / "model", "--output", out, *SETTINGS)
    newest = out / "checkpoints" / "step-00000004"
    assert f"The last checkpoint is `{newest}`. Requeue the job, or resume with `" in str(stopped.value)
    assert f"finetune chat --resume --output {out}`." in str(stopped.value)
    assert not hangs


@pytest.mark.slow  # a whole run
def test_a_validation_file_replaces_the_conversations_held_out(model, tmp_path, forked_ranks):
    for name, number in (("chats", 4), ("others", 3)):
        write_chats(tmp_path / f"{name}.jsonl", chats(number))
    result = finetune(
        "chat", tmp_path / "chats.jsonl", "--model", model, "--output", tmp_path / "run",
        "--validation", tmp_path / "others.jsonl", "--epochs", "2", *SETTINGS[:3], "training.batch_size=1",
    )  # fmt: skip
    assert "finetune chat" in result.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] >= 2


ASKED = ("{chats}", "--model", "{model}")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("--model", "{model}"), ConfigError, "must be given files with conversations and `--model`, but no file is"),
        (("{chats}",), ConfigError, "but no `--model` is given"),
        (("{chats}", "--model", "{chats}"), ConfigError, "`--model` must name a Hugging Face folder, but `.*` has no"),
        ((*ASKED, "--epochs", "0"), ConfigError, "`--epochs` must be above 0, but is 0"),
        (("{one}", "--model", "{model}"), DataError, "must hold at least 2 conversations, because one is held out"),
        (
            (*ASKED, "training.sequence_length=16"),
            DataError,
            r"Every conversation must fit into `training.sequence_length` \(16 tokens\), but 19 of 19 do not",
        ),
        (
            ("--resume",),
            ConfigError,
            "`--output` must name the folder of a run to resume, but `.*` has no `config.toml`",
        ),
        ((*ASKED, "data.text=a.txt"), ConfigError, "`data` must not be set for `finetune chat`"),
        ((*ASKED, "training.document_mask=false"), ConfigError, "`training.document_mask` must"),
        ((*ASKED, "evaluation.text=README.md"), ConfigError, "`evaluation` must name no files"),
        ((*ASKED, "teacher.cache=logits"), ConfigError, "`teacher.cache` must be empty for `finetune chat`"),
        ((*ASKED, "layout.tensor=3"), CrosscutError, "`layout.tensor` must divide"),
        ((*ASKED, "--lora-rank", "-1"), ConfigError, "`model.lora_rank` must be at least 0"),
    ],
)
def test_mistakes_are_told_before_any_process_starts(model, tmp_path, arguments, kind, message):
    places = {
        "model": str(model),
        "chats": str(write_chats(tmp_path / "chats.jsonl", chats(20))),
        "one": str(write_chats(tmp_path / "one.jsonl", chats(1))),
    }
    filled = [argument.format(**places) for argument in arguments]
    length = (
        () if any(word.startswith("training.sequence_length") for word in filled) else ("training.sequence_length=64",)
    )
    with pytest.raises(kind, match=message):
        finetune("chat", *filled, "--output", tmp_path / "run", *length)


@pytest.mark.slow  # it imports everything in a new process
def test_no_web_server_is_needed():
    code = "import sys; sys.modules.update(uvicorn=None, starlette=None); import crosscut.finetuning.chat.job"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow  # a whole run
def test_conversations_that_are_too_long_may_be_left_out(model, tmp_path, forked_ranks):
    records = chats(12)
    records[3]["messages"][0]["content"] = "fox " * 200
    result = finetune(
        "chat", write_chats(tmp_path / "chats.jsonl", records), "--model", model, "--output", tmp_path / "run",
        "--drop-long", *SETTINGS,
    )  # fmt: skip
    assert "done" in result.output
    assert (tmp_path / "run" / "chat" / "training.npz").is_file()


def test_conversations_that_are_left_out_are_not_checked(model, tmp_path):
    """The template cuts the long answer, but no one learns it."""
    shutil.copytree(model, tmp_path / "model")
    template = ENDED.replace("message.content }}", "message.content[:300] }}")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    records = chats(4)
    records[2]["messages"][1]["content"] = "fox " * 200
    path = write_chats(tmp_path / "chats.jsonl", records)
    order = ChatOrder(files=(str(path),), model=str(tmp_path / "model"), output="out", overrides=SETTINGS)
    with pytest.raises(DataError, match="1 of 6 answers do not come back"):
        _packed(order, _run_of(order))
    (training, _), _ = _packed(dataclasses.replace(order, drop_long=True), _run_of(order))
    assert training.num_targets


@pytest.mark.parametrize(
    ("epochs", "overrides", "every"),
    [(1.0, (), 2), (100.0, (), 80), (1.0, ("training.validate_every=3",), 3), (1.0, ("training.steps=8",), 0)],
)
def test_a_short_run_does_not_mainly_validate(published, epochs, overrides, every):
    """64 sequences in batches of 8."""
    order = ChatOrder(files=("a",), model=str(published("llama")), output="out", epochs=epochs, lora_rank=2,
                      overrides=("training.sequence_length=32", *overrides))  # fmt: skip
    run = _run_of(order, num_sequences=64)
    assert (run.training.steps, run.training.validate_every) == (8 * epochs, every)
