"""The dry run and the formulas keep one account, and it is the one of a step that really runs."""

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from crosscut.architecture import describe
from crosscut.config import ConfigError, Layout, LayoutError, ModelConfig, RunConfig, write_toml
from crosscut.config.teachers import TeacherConfig
from crosscut.kernels import onednn
from crosscut.launch import process_group
from crosscut.model import Batch
from crosscut.parallel import cross_entropy, make_mesh
from crosscut.parallel.random import RandomStreams
from crosscut.parallel.state import gradient_norm
from crosscut.planner import forecast_memory, step_time
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.rehearsal import Rehearsal, rehearse, to_json
from crosscut.training.optimization.optimizer import MOMENTS
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer
from crosscut.training.watching.memory_account import account_of
from tests.refusals import refusal
from tests.rehearsal.cases import BERT, HALF, LARGE, LLAMA, SIZES, SMALL, SPLIT, ZERO3, Case, check_formulas, small
from tests.rehearsal.showing import check_shown

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a case: the cases that take longest are slow."""
    return (pytest.mark.slow,) if case.name in ("shared, kept", "offloaded", "long", "delta rules again") else ()


@cache
def rehearsed(case: Case) -> Rehearsal:
    return rehearse(case.run, device=case.device)


@pytest.mark.one_in(29)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks(case)) for case in SMALL])
def test_formulas_and_dry_run_agree(case):
    check_formulas(rehearsed(case))
    check_shown(rehearsed(case))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "case", [case for case in SMALL if "on context ranks" in case.name], ids=lambda case: case.name
)
def test_messages_of_repeated_attention_are_shown_in_their_place(case):
    again = replace(case.run, training=replace(case.run.training, recompute="selective"))
    check_shown(rehearse(again, device=case.device))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [case for case in SMALL if case.name.startswith("averaged")], ids=lambda c: c.name)
def test_the_average_of_the_weights_is_counted_to_the_byte(case):
    forecast = forecast_memory(rehearsed(case).run, device=case.device)
    assert rehearsed(case).peak.categories["optimizer"] == forecast.optimizer


TEACHERS = [
    ({"tensor": 2}, {}, {}, 1, {}),
    (SPLIT, HALF, LLAMA, 2, {"loss": "jsd"}),
    (ZERO3, HALF, {}, 4, {"loss": "reverse_kl", "temperature": 2.0}),
    ({"tensor": 2}, {"recompute": "full", "micro_batch_size": 1}, {}, 2, {}),
    ({"context": 2, "tensor": 2}, {"document_mask": True}, LLAMA, 1, {}),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("layout", "training", "model", "tensor", "teacher"), TEACHERS, ids=map(str, range(5)))
def test_a_teacher_is_counted(tmp_path, layout, training, model, tensor, teacher):
    """Its weights, its passes, its messages and its part of the loss. Only one instant is not exact."""
    case = small("with a teacher", "cuda" if training == HALF else "cpu", layout, training, model)
    shape = {"num_layers": 4, "hidden_size": 192, "mlp_size": 512, "layers": ("attention swiglu",)}
    write_toml(replace(case.run, model=ModelConfig(**{**SIZES, **shape})), tmp_path / "config.toml")
    run = replace(case.run, teacher=TeacherConfig(folder=str(tmp_path), tensor=tensor, **teacher))
    found = rehearse(run, device=case.device)
    check_formulas(found, memory=0.02, flops=1e-9)
    check_shown(found)
    assert step_time(run, KNOWN_HARDWARE["h100-sxm"]).total > step_time(case.run, KNOWN_HARDWARE["h100-sxm"]).total


@pytest.mark.slow  # only the head differs from the cases above
@pytest.mark.parametrize(
    ("layout", "training", "tensor"), [({"tensor": 2}, {}, 1), (SPLIT, HALF, 4)], ids=map(str, range(2))
)
def test_a_teacher_of_labels_is_counted(tmp_path, layout, training, tensor):
    """Its own ranks compute its logits, and exchange only these."""
    model = {**BERT, "head": "classes", "num_classes": 3}
    case = small("with a teacher of labels", "cuda" if training else "cpu", layout, training, model)
    write_toml(replace(case.run, model=replace(case.run.model, num_layers=4, mlp_size=512)), tmp_path / "config.toml")
    found = rehearse(replace(case.run, teacher=TeacherConfig(folder=str(tmp_path), tensor=tensor)), device=case.device)
    check_formulas(found, memory=0.02, flops=1e-9)
    check_shown(found)


STORED = [(*TEACHERS[1], 16), (*TEACHERS[0], 1000), (*TEACHERS[3], 300), (*TEACHERS[4], 1000), (*TEACHERS[2], 64)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("layout", "training", "model", "_tensor", "teacher", "k"), STORED, ids=map(str, range(5)))
def test_stored_logits_are_counted(layout, training, model, _tensor, teacher, k):
    """Their bytes in the batch and in the loss. There are no weights, passes and messages of a teacher."""
    case = small("with stored logits", "cuda" if training == HALF else "cpu", layout, training, model)
    run = replace(case.run, teacher=TeacherConfig(cache="logits", k=k, **teacher))
    found = rehearse(run, device=case.device)
    check_formulas(found, memory=0.02, flops=1e-9)
    check_shown(found)
    plain = rehearse(case.run, device=case.device)
    assert found.flops == plain.flops
    assert {sent.axis for sent in found.sent} == {sent.axis for sent in plain.sent}


def test_values_of_another_width_are_not_padded_as_on_a_gpu():
    (case,) = (case for case in SMALL if case.name == "latents, half precision")
    forecast = forecast_memory(rehearsed(case).run, device=case.device)
    assert rehearsed(case).peak.categories["activations"] <= forecast.activations


@pytest.mark.slow  # tests/kernels holds the products equal
@pytest.mark.skipif(not onednn.IS_THERE, reason="this PyTorch is without oneDNN")
def test_flops_are_the_same_by_onednn_which_no_gpu_has(monkeypatch):
    run = SMALL[0].run
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    plain = rehearse(run, device="cpu")
    calls, call = [], onednn._linear
    monkeypatch.setattr(onednn, "_linear", lambda *arguments: calls.append(arguments) or call(*arguments))
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setattr(onednn, "_LEAST_FLOPS", 0)
    assert rehearse(run, device="cpu").flops == plain.flops
    assert len(calls) >= 4 * 3 * run.model.num_layers
    calls.clear()
    rehearse(run, device="cuda")
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=[f"{case.name} {case.run.layout}" for case in LARGE])
def test_formulas_and_dry_run_agree_on_large_models(case):
    check_formulas(rehearsed(case))


OF_THE_PAPER = """
import resource
from crosscut.rehearsal import rehearse
from tests.rehearsal.cases import PAPER
seconds = rehearse(PAPER.run, device=PAPER.device).seconds
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.alone
def test_the_largest_model_of_the_paper_takes_a_minute_and_4_gb():
    """In a process of its own: what other tests have held counts for the memory of this one."""
    command = [sys.executable, "-c", OF_THE_PAPER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, cwd=ROOT)
    seconds, most = map(float, done.stdout.split())
    assert seconds < 60
    assert most * (1 if sys.platform == "darwin" else 1024) < 4e9


def test_a_dry_run_holds_what_a_real_step_holds():
    training = replace(SMALL[0].run.training, recompute="full", precision="bfloat16")
    run = replace(SMALL[0].run, training=training)
    with process_group(CPU):
        trainer = Trainer(resolve_on(run, CPU), make_mesh(run.layout, CPU))
        tokens = torch.zeros(run.micro_batch_size, run.training.sequence_length + 1, dtype=torch.long)
        batches = [Batch.from_ids(tokens)]
        trainer.step(0, batches)
        states = trainer.optimizer.state.values()
        named = {"parameters": trainer.parameters, "optimizer": [state[name] for state in states for name in MOMENTS]}
        with account_of(named, CPU) as account:
            trainer.step(1, batches)
    assert rehearse(run, device="cpu").peak.total == pytest.approx(account.peak()[0], rel=0.001)


def test_every_byte_has_a_category_and_a_module():
    peak = rehearsed(SMALL[1]).peak
    assert sum(peak.categories.values()) == sum(peak.modules.values()) == sum(peak.parts.values()) == peak.total
    assert peak.instant == "loss"
    parameters = peak.categories["master_weights"]
    assert peak.categories["optimizer"] == 2 * parameters
    assert {"tokens", "blocks.*.mlp.expand", "blocks.*.attention", "final_norm"} <= set(peak.modules)


@pytest.mark.slow
def test_every_rank_of_a_layout_can_be_rehearsed():
    case = SMALL[-1]
    first, last = rehearsed(case), rehearse(case.run, rank=511, device=case.device)
    assert (first.flops, first.sent) == (last.flops, last.sent)
    assert first.peak.total == last.peak.total


def test_a_rehearsal_leaves_random_numbers_and_process_groups_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    rehearse(SMALL[0].run, device="cuda")
    assert torch.equal(torch.rand(3), expected)
    assert not torch.distributed.is_initialized()


def test_figures_are_told_as_json():
    told = to_json(rehearsed(SMALL[2]))
    assert told["peak_bytes"] == sum(told["categories"].values())
    assert [row["name"] for row in told["compared"]] == ["peak bytes", "FLOPs", "bytes of messages, tensor"]


def test_a_rank_that_is_not_there_is_an_error():
    assert refusal(LayoutError, rehearse, SMALL[2].run, rank=2) == (
        "`rank` must be from 0 to 1, the last rank of the layout, but is 2. Choose another rank, or a larger layout."
    )


def test_an_unknown_vocabulary_is_an_error():
    run = SMALL[0].run
    with pytest.raises(ConfigError, match=r"`model\.vocab_size` must be at least 1 for a forecast"):
        rehearse(replace(run, model=replace(run.model, vocab_size=0)))


def require_same_with_all_parts(monkeypatch: pytest.MonkeyPatch, run: RunConfig, fast: Rehearsal) -> Rehearsal:
    """Require that a dry run in which each part of a step runs has the same result, and return its result."""
    monkeypatch.setattr(sys.modules["crosscut.rehearsal.rehearse"], "equal_parts_once", lambda *_: nullcontext())
    whole = rehearse(run, rank=fast.rank)
    assert replace(fast, seconds=0.0) == replace(whole, seconds=0.0)
    return whole


def with_few_layers(run: RunConfig, layout: Layout) -> RunConfig:
    """The run with one layer for each stage of the layout."""
    return replace(run, model=replace(run.model, num_layers=layout.num_stages))


@pytest.mark.parametrize(
    "changes",
    [
        # the chunks do not depend on the layout; the test of micro-batches runs them, too
        {"layout": Layout(tensor=2)},
        pytest.param({"layout": Layout(pipeline=3), "training": {"micro_batch_size": 1}}, marks=pytest.mark.slow),
        pytest.param(
            {"layout": Layout(data=4, sharding="zero3"), "training": {"recompute": "full"}}, marks=pytest.mark.slow
        ),
    ],
    ids=["tensor", "pipeline", "zero3, recomputed"],
)
def test_equal_chunks_of_the_loss_run_once_with_the_same_result(monkeypatch, changes):
    """Chunks of 32 tokens, so that a small model has many of them."""
    layout = changes["layout"]
    run = with_few_layers(SMALL[2].run, layout)
    run = replace(run, layout=layout, training=replace(run.training, batch_size=8, **changes.get("training", {})))
    monkeypatch.setattr(sys.modules["crosscut.rehearsal.rehearse"], "default_loss_chunk", lambda *_, **__: 32)
    chunks: list[int] = []
    plain = cross_entropy._losses_of_chunk
    monkeypatch.setattr(cross_entropy, "_losses_of_chunk", lambda *a: (chunks.append(1), plain(*a))[1])
    fast = rehearse(run, rank=run.layout.world_size - 1)
    number = len(chunks)
    whole = require_same_with_all_parts(monkeypatch, run, fast)
    assert number == 3 * whole.run.num_micro_batches < len(chunks) - number


def test_a_gpu_takes_the_norm_of_each_gradient_whole(monkeypatch):
    lengths: list[int] = []
    norms = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda rows: (lengths.append(len(rows)), norms(rows))[1])
    before = gradient_norm.NORM_PIECE
    run = SMALL[1].run
    rehearse(run, device="cuda")
    assert sum(lengths) == len(list(describe(run.model).parameters())) + 1  # and the loss
    assert before == gradient_norm.NORM_PIECE


def test_progress_is_told_to_the_end():
    told: list[tuple[int, int]] = []
    rehearse(SMALL[0].run, device="cpu", tell=lambda *numbers: told.append(numbers))
    total = 2 * SMALL[0].run.model.num_layers * SMALL[0].run.num_micro_batches
    assert told == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize(
    ("layout", "training", "message"),
    [
        ({"data": 1 << 18}, {"batch_size": 1 << 18}, "must have at most 131,072 ranks, but tensor 1 x data 262144 has"),
        (
            {},
            {"batch_size": 10**9, "micro_batch_size": 1},
            "must have at most 4,096 micro-batches, but `training.batch",
        ),
        ({}, {"batch_size": 10**9}, "must have at most 67,108,864 tokens, but has 128,000,000,000. Set"),
    ],
)
def test_a_step_that_is_too_large_is_refused(layout, training, message):
    run = SMALL[0].run
    run = replace(run, layout=Layout(**layout), training=replace(run.training, **training))
    with pytest.raises(ConfigError, match=message):
        rehearse(run)


def test_the_largest_step_is_run(monkeypatch):
    monkeypatch.setattr(sys.modules[rehearse.__module__], "_MOST_MICRO_BATCHES", SMALL[0].run.num_micro_batches)
    rehearse(SMALL[0].run)


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "changes",
    [
        {"layout": Layout(tensor=2)},
        {"layout": Layout(tensor=2), "training": {"recompute": "selective"}},
        {"layout": Layout(pipeline=2)},
        {"layout": Layout(tensor=2, data=2, sharding="zero3"), "training": {"recompute": "full"}},
        {"layout": Layout(data=2), "training": {"precision": "float16"}},
        {"case": "documents again"},
        {"case": "masked BERT, shared"},  # many tensors in a batch
    ],
    ids=["tensor", "selective", "pipeline", "zero3", "float16", "documents", "BERT"],
)
def test_equal_micro_batches_run_once_with_the_same_result(monkeypatch, changes):
    """Chunks of 32 tokens, so that each micro-batch has equal chunks, too."""
    monkeypatch.setattr(sys.modules["crosscut.rehearsal.rehearse"], "default_loss_chunk", lambda *_, **__: 32)
    run = next(case for case in SMALL if case.name == changes.get("case", SMALL[2].name)).run
    layout = changes.get("layout", run.layout)
    training = {"batch_size": 7 * layout.data, "micro_batch_size": 1, **changes.get("training", {})}
    run = replace(with_few_layers(run, layout), layout=layout, training=replace(run.training, **training))
    assert run.num_micro_batches == 7
    starts: list[int] = []
    restart = RandomStreams.restart

    def restarted(streams: RandomStreams, *, step: int, micro_batch: int) -> None:
        starts.append(micro_batch)
        restart(streams, step=step, micro_batch=micro_batch)

    monkeypatch.setattr(RandomStreams, "restart", restarted)
    fast = rehearse(run)
    assert starts == ([0, 1, 2, 3, 4, 5, 6] if layout.pipeline > 1 else [0, 1, 6])
    whole = require_same_with_all_parts(monkeypatch, run, fast)
    assert starts[-7:] == list(range(7))
    assert to_json(fast) | {"seconds": 0.0} == to_json(whole) | {"seconds": 0.0}
