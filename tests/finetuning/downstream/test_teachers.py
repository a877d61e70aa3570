"""A teacher of labels: the loss beside plain PyTorch, layouts, resumed runs, and the teachers that are refused."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from crosscut.config import ConfigError, Layout
from crosscut.data.tokenization.wordpiece import train_wordpiece
from crosscut.finetuning.downstream.folder import TaskRuns
from crosscut.parallel import Mixture, make_mesh
from crosscut.parallel.distillation import distil_labels
from tests.finetuning.downstream.conftest import EXACT, finetune, rows_of
from tests.refusals import refusal

LABELS = {"id2label": {0: "dog", 1: "fox"}, "label2id": {"dog": 0, "fox": 1}}
WIDE = {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 64}


@pytest.fixture(scope="module")
def student(make_bert) -> Path:
    return make_bert("BertForSequenceClassification", **LABELS)


@pytest.fixture(scope="module")
def teacher(make_bert) -> Path:
    """A classifier that is wider than the student, and sure of some of its labels."""
    folder = make_bert("BertForSequenceClassification", **LABELS, **WIDE, initializer_range=0.3)
    assert (folder / "tokenizer.json").is_file()
    return folder


def divergence(student: torch.Tensor, teacher: torch.Tensor, loss: str, heat: float) -> torch.Tensor:
    """T^2 x the divergence of each row, in the words of Hinton et al. 2015 and of Agarwal et al. 2024."""
    log_s, log_t = (F.log_softmax(each / heat, -1) for each in (student, teacher))
    if loss == "forward_kl":
        return heat**2 * F.kl_div(log_s, log_t, log_target=True, reduction="none").sum(-1)
    if loss == "reverse_kl":
        return heat**2 * F.kl_div(log_t, log_s, log_target=True, reduction="none").sum(-1)
    mixed = (0.5 * log_s.exp() + 0.5 * log_t.exp()).log()
    kls = [F.kl_div(mixed, each, log_target=True, reduction="none").sum(-1) for each in (log_s, log_t)]
    return heat**2 * 2 * (kls[0] + kls[1])


@pytest.mark.parametrize(("loss", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.5)])
def test_labels_and_their_gradients_are_those_of_plain_pytorch(ranks, loss, beta):
    ranks.run(1, compared, loss, beta)


def compared(loss: str, beta: float) -> None:
    """On a rank: compare the losses. A label that is missing counts nothing, whatever the teacher says about it."""
    draw = torch.Generator().manual_seed(1)
    ours, theirs = (torch.randn(5, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    counts = torch.tensor([True, True, False, True, True])
    ours.requires_grad_()
    expected = divergence(ours, theirs, loss, 2.0) * counts
    (gradient,) = torch.autograd.grad(expected.sum(), ours)
    theirs[2] = torch.nan
    axis = make_mesh(Layout(), torch.device("cpu")).tensor
    found = distil_labels(ours, theirs, counts, axis, Mixture(0.5, beta, 2.0))
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.slow  # a whole run
@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd"])
def test_the_loss_is_the_formula_in_plain_pytorch(student, teacher, tables, tmp_path, forked_ranks, loss):
    finetune(
        "table", "--model", student, *tables, "--output", tmp_path / "run", *EXACT, "training.steps=2", "--warmup", 0,
        f"teacher.folder={teacher}", f"teacher.loss={loss}", "teacher.alpha=0.3", "teacher.temperature=2",
    )  # fmt: skip
    kept = TaskRuns.load(tmp_path / "run")
    batch, labels = their_batch(kept)
    ours, theirs = (their_logits(folder, batch) for folder in (student, teacher))
    data, learned = F.cross_entropy(ours, labels), divergence(ours, theirs, loss, 2.0).mean()
    found = [rows_of(tmp_path / "run", name)[0] for name in ("data_loss", "distillation_loss", "loss")]
    assert found[:2] == pytest.approx([float(data), float(learned)], rel=1e-12)
    assert found[2] == pytest.approx(float(0.7 * data + 0.3 * learned), rel=1e-6)
    assert float(learned) > 0.01


@pytest.mark.slow  # tests/verification has the quick test of a step
def test_layouts_change_nothing_and_a_resumed_run_names_a_changed_teacher(
    student, teacher, tables, tmp_path, forked_ranks, monkeypatch
):
    monkeypatch.setattr("crosscut.finetuning.downstream.job.keep_best", lambda *_: None)  # the run was killed
    copy = shutil.copytree(teacher, tmp_path / "teacher")
    asked = ("--model", student, *tables, *EXACT, "--epochs", 1, "checkpoint.every=3", "checkpoint.keep=9")
    asked += (f"teacher.folder={copy}", "teacher.loss=jsd", "teacher.temperature=2", "teacher.tensor=1")
    for number, layout in enumerate((("layout.tensor=1",), ("layout.tensor=2", "layout.sequence_parallel=true"))):
        finetune("table", *asked, "--output", tmp_path / str(number), *layout)
    for name in ("data_loss", "distillation_loss"):
        one, two = (rows_of(tmp_path / str(number), name) for number in (0, 1))
        assert two == pytest.approx(one, rel=1e-10)
        assert len(set(one)) == 6
    shutil.rmtree(tmp_path / "0" / "checkpoints" / "step-00000006")
    for name in ("summary.json", "report.md"):
        (tmp_path / "0" / name).unlink()
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    told = finetune("table", "--resume", "--output", tmp_path / "0").output
    assert "The teacher or its share of the loss changes at step 4 (`teacher`). `teacher.folder` now holds" in told
    assert len(rows_of(tmp_path / "0", "distillation_loss")) == 6


SWAPPED = {"id2label": {0: "fox", 1: "dog"}, "label2id": {"fox": 0, "dog": 1}}


@pytest.mark.parametrize(
    ("kind", "more", "settings", "told"),
    [
        ("BertForSequenceClassification", SWAPPED, (), "('dog', 'fox'), but `{folder}` has 'fox', 'dog'. Choose"),
        ("BertForSequenceClassification", {"num_labels": 3}, (), "whose `model.num_classes` is that of the run (2)"),
        ("BertForMaskedLM", {}, (), "whose `model.head` is that of the run (classes), but `{folder}` has masked"),
        ("BertForSequenceClassification", LABELS, ("teacher.cache=x",), "`teacher.cache` must be '' for a model with"),
    ],
)
def test_teachers_of_other_labels_are_refused(student, make_bert, tables, tmp_path, kind, more, settings, told):
    folder = make_bert(kind, **more)
    asked = ("--model", student, *tables, "--output", tmp_path / "run", *EXACT, f"teacher.folder={folder}", *settings)
    message = refusal(ConfigError, finetune, "table", *asked)
    assert told.format(folder=folder) in message
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_teacher_with_another_tokenizer_is_refused(student, make_bert, tables, tmp_path):
    folder = make_bert("BertForSequenceClassification", **LABELS)
    train_wordpiece(["other words zzz yyy xxx " * 9], vocab_size=200).save(str(folder / "tokenizer.json"))
    asked = ("--model", student, *tables, "--output", tmp_path / "run", *EXACT, f"teacher.folder={folder}")
    assert "must hold a model with the tokenizer of the run" in refusal(ConfigError, finetune, "table", *asked)


def their_batch(kept: TaskRuns) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The first batch of a run, for `transformers`."""
    rows, run = kept.rows("train"), kept.run
    whole = rows.batch(0, batch_size=run.training.batch_size, seed=run.training.seed)
    made = rows.padded(whole, length=rows.longest(whole, multiple=1), padding=kept.padding)
    arrays = {"input_ids": made.tokens, "token_type_ids": made.segments, "attention_mask": made.mask}
    return {name: torch.as_tensor(each).long() for name, each in arrays.items()}, torch.as_tensor(made.labels)


def their_logits(folder: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits
