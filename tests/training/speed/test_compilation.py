"""Layers as compiled code: one graph for all of them, the eager numbers, and an error where it would not run."""

import re
import time
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from crosscut.config import ConfigError, RunConfig, TrainingError
from crosscut.evaluation import evaluate_loss
from crosscut.model.running import PLAIN_LOSS
from crosscut.parallel import CollectiveRecorder, fused
from crosscut.parallel.state.parameters import local_part
from crosscut.planner import layer_activations
from crosscut.training.precision import resolve_on
from crosscut.training.speed import compilation
from crosscut.training.speed.compilation import compiled_modules, require_compilation, uncompiled
from crosscut.training.step import Trainer
from tests.refusals import refusal
from tests.training.jobs import CPU, parts

pytestmark = [  # what the compiler does inside is not ours to mend
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
SPLIT = ("layout.tensor=2", "layout.sequence_parallel=true")
ON = "training.compile=on"
needs_cpp_compiler = pytest.mark.skipif(
    not compilation._has_cpp_compiler(), reason="inductor needs a C++ compiler on the CPU"
)


def trained(run: RunConfig, num_steps: int, backend: str, with_validation: bool = True) -> dict[str, Any]:
    """Losses and gradients of some steps, what they sent, and how many graphs were made for them."""
    with mock.patch.object(compilation, "BACKEND", backend):
        trainer, batches = parts(run)
    losses, loads, sent, validation = [], [], Counter(), 0.0
    for step in range(num_steps):
        with CollectiveRecorder(trainer.mesh) as recorder:
            losses.append(trainer.step(step, batches.micro_batches(step)).loss)
        sent.update(recorder.sent)
        loads.append([load.tolist() for load in trainer.balance.loads])
    trainer.accumulate(num_steps, batches.micro_batches(num_steps))
    counts = [trainer.compiler.num_graphs, trainer.compiler.num_runs] if trainer.compiler else []
    if with_validation:
        validation = evaluate_loss(trainer.model, batches.validation_batches()).loss
    return {
        "losses": losses,
        "loads": loads,
        "gradients": {n: p.grad.full_tensor().clone() for n, p in trainer.model.named_parameters()},
        "sent": sent,
        "counts": counts,
        "validation": validation,
        "graphs after validation": trainer.compiler.num_graphs if trainer.compiler else 0,
        "compiled": compiled_modules(trainer.model),
    }


def test_all_layers_share_one_graph_that_computes_and_sends_what_the_plain_code_does(ranks, run_with):
    options = (*SPLIT, "model.dropout=0.1", "training.precision=float64")
    run = run_with(*options, ON)
    num_ranks = run.layout.world_size
    plain = ranks.run(num_ranks, trained, run_with(*options), 1, "aot_eager")
    for expected, result in zip(plain, ranks.run(num_ranks, trained, run, 1, "aot_eager"), strict=True):
        assert result["compiled"] == ("blocks.0", "blocks.1")
        assert result["counts"] == [1, 2 * 2]  # graphs; layers of two forward passes
        assert result["graphs after validation"] == 2
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert result["validation"] == pytest.approx(expected["validation"], rel=1e-10)
        assert result["sent"] == expected["sent"]
        for name, gradient in expected["gradients"].items():
            margin = 1e-10 * gradient.abs().max().item()
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-10, atol=margin)


EXPERTS = ('model.layers=["attention experts"]', "model.experts.number=4", "model.experts.size=24")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        (("layout.data=2",), "inductor"),
        (("layout.data=2", *SPLIT), "aot_eager"),
        (("layout.data=4", "layout.sharding=zero2"), "aot_eager"),
        (("layout.data=4", "layout.sharding=zero3"), "aot_eager"),
    ],
)
@needs_cpp_compiler
def test_ranks_that_share_experts_need_one_graph_for_all_loads(ranks, run_with, layout, backend):
    options = (*EXPERTS, *layout, "layout.expert=2", "training.precision=float64", "model.dropout=0.0")
    run = run_with(*options, ON)
    num_ranks = run.layout.world_size
    plain = ranks.run(num_ranks, trained, run_with(*options), 3, backend)
    for expected, result in zip(plain, ranks.run(num_ranks, trained, run, 3, backend, time_limit=300.0), strict=True):
        first, second, third = result["loads"]
        assert first != second != third != first
        assert result["counts"][0] == 1
        assert result["graphs after validation"] == 2
        assert result["loads"] == expected["loads"]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert result["validation"] == pytest.approx(expected["validation"], rel=1e-12)
        assert result["sent"] == expected["sent"]
        for name, gradient in expected["gradients"].items():
            margin = 1e-12 * gradient.abs().max().item()
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-12, atol=margin)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "num_graphs", "num_runs"),
    [
        (("training.recompute=full", "training.recompute_every=2"), 1, 5),
        (("training.recompute=selective",), 1, 3),
        (("training.recompute=operators", "training.recompute_every=2"), 2, 3),
        (("layout.data=2", "layout.sharding=zero3", "training.recompute=full"), 1, 6),
    ],
    ids=str,
)
def test_recomputation_and_sharding_stay_outside_of_the_graph(ranks, run_with, options, num_graphs, num_runs):
    options = (*options, "model.num_layers=3", "model.dropout=0.0", "training.precision=float64")
    run = run_with(*options, ON)
    plain = ranks.run(run.layout.world_size, trained, run_with(*options), 2, "aot_eager", False)
    results = ranks.run(run.layout.world_size, trained, run, 2, "aot_eager", False)
    for expected, result in zip(plain, results, strict=True):
        assert result["counts"] == [num_graphs, 3 * num_runs]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert result["sent"] == expected["sent"]


def bytes_kept(runs: list[RunConfig], backend: str) -> list[int]:
    """Bytes that one layer of each run keeps for its backward pass, without its parameters."""
    found = []
    for run in runs:
        with mock.patch.object(compilation, "BACKEND", backend):
            trainer, _ = parts(run)
        own = {local_part(p).untyped_storage()._cdata for p in trainer.parameters}
        kept: dict[int, int] = {}

        def keep(saved: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
            return saved

        length = run.training.sequence_length // (run.layout.tensor if run.layout.sequence_parallel else 1)
        shape = (run.micro_batch_size, length, run.model.hidden_size)
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        trainer.streams.restart(step=0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            y, _ = trainer.model.blocks[0](x)
        assert trainer.compiler.num_runs == 1
        found.append(sum(size for storage, size in kept.items() if storage not in own))
        y.float().sum().backward()
    return found


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        (("layout.tensor=1",), "aot_eager"),
        pytest.param(("layout.tensor=2", "layout.sequence_parallel=true"), "aot_eager", marks=pytest.mark.slow),
        pytest.param(("layout.tensor=1",), "inductor", marks=[pytest.mark.slow, needs_cpp_compiler]),
    ],
    ids=str,
)
def test_a_compiled_layer_keeps_what_the_planner_says(ranks, run_with, layout, backend):
    options = (*layout, "model.dropout=0.0", "training.precision=bfloat16", ON)
    runs = [run_with(*options, f"training.recompute={mode}") for mode in ("none", "operators")]
    planned = [layer_activations(run, device="cpu") for run in runs]
    for kept in ranks.run(runs[0].layout.world_size, bytes_kept, runs, backend, time_limit=200.0):
        # A compiled layer also computes the few numbers per token again, with which a layer norm begins.
        assert kept == pytest.approx([account.total + account.weights for account in planned], rel=0.02)
        assert kept[0] - kept[1] >= planned[0].total - planned[1].total


def first_sum_is_kept(runs: list[RunConfig], backend: str) -> list[bool]:
    """Whether a compiled layer of each run keeps its first residual sum for the backward pass."""
    found = []
    for run in runs:
        with mock.patch.object(compilation, "BACKEND", backend):
            trainer, _ = parts(run)
        block = trainer.model.blocks[0]
        shape = (run.micro_batch_size, run.training.sequence_length, run.model.hidden_size)
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        sums: list[Tensor] = []
        trainer.streams.restart(step=0)
        runner = block.runner

        def add(function: Any, *inputs: Tensor, sums: list[Tensor] = sums) -> Tensor:
            sums.append(function(*inputs))
            return sums[-1]

        block.runner = replace(runner, kept=add)
        with uncompiled(trainer.model):
            block(x)
        block.runner = runner
        kept: list[Tensor] = []
        trainer.streams.restart(step=0)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved, kept=kept: kept.append(saved) or saved, lambda saved: saved
        ):
            block(x)
        assert trainer.compiler.num_runs == 1
        same = [each for each in kept if (each.shape, each.dtype) == (x.shape, x.dtype)]
        found.append(any(torch.allclose(each, sums[0], atol=0.05) for each in same))
    return found


LLAMA = ('model.layers=["attention swiglu"]', "model.norm=rms", "model.positions=rotary", "model.biases=none")


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        ("aot_eager", [LLAMA]),
        pytest.param(
            "inductor",
            [("model.norm_place=before",), ("model.norm_place=after",)],
            marks=[pytest.mark.slow, needs_cpp_compiler],
        ),
    ],
)
def test_a_compiled_layer_keeps_its_residual_sums(ranks, run_with, backend, kinds):
    runs = [run_with(*kind, "model.dropout=0.0", "training.precision=bfloat16", ON) for kind in kinds]
    assert ranks.run(1, first_sum_is_kept, runs, backend, time_limit=300.0)[0] == [True] * len(kinds)


@pytest.mark.slow
def test_float8_products_are_part_of_the_one_graph(ranks, run_with):
    options = ("layout.tensor=2", "model.dropout=0.0", "training.precision=float8")
    plain = ranks.run(2, trained, run_with(*options), 2, "aot_eager", False)[0]
    for result in ranks.run(2, trained, run_with(*options, ON), 2, "aot_eager", False):
        assert result["counts"] == [1, 2 * 3]
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-4)


@needs_cpp_compiler
@pytest.mark.slow
def test_twenty_steps_of_real_compiled_code_stay_within_a_millionth(ranks, run_with):
    options = ("model.num_layers=1", "model.dropout=0.0", "training.steps=20")
    plain = ranks.run(1, trained, run_with(*options), 20, "inductor", False)[0]
    result = ranks.run(1, trained, run_with(*options, ON), 20, "inductor", False, time_limit=200.0)[0]
    assert result["counts"] == [1, 21]
    assert result["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert plain["losses"][-1] < 0.95 * plain["losses"][0], "nothing was learned"


def sent_beside_products(run: RunConfig, num_pieces: int) -> list[list[str]]:
    """Products and messages of a layer's two passes, in the order in which the compiler's code runs them."""
    from torch._inductor.utils import run_and_get_code

    called = re.compile(r"\b(all_gather|reduce_scatter|all_reduce|wait|mm|addmm)[a-z_]*(?:\.default)?\(")
    with mock.patch.object(fused, "num_pieces", lambda *_: num_pieces):
        trainer, batches = parts(run)
        _, codes = run_and_get_code(trainer.accumulate, 0, batches.micro_batches(0))
    found = [called.findall(code.partition("def call(")[2]) for code in codes if "wait_tensor" in code]
    return [["product" if "mm" in name else name for name in names] for names in found]


def waited_for_at_once(names: list[str]) -> int:
    """Messages between whose start and end there is no product; they end in the order of their starts."""
    starts = [i for i, name in enumerate(names) if name not in ("product", "wait")]
    ends = [i for i, name in enumerate(names) if name == "wait"]
    return sum("product" not in names[start:end] for start, end in zip(starts, ends, strict=True))


@needs_cpp_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "num_pieces", "alone"),
    [(False, 1, (2, 0)), (True, 1, (4, 2)), (True, 2, (4, 2))],
    ids=["plain", "sequence parallel", "in halves"],
)
def test_what_is_sent_runs_beside_products_in_real_compiled_code(ranks, run_with, split, num_pieces, alone):
    run = run_with("layout.tensor=2", f"layout.sequence_parallel={str(split).lower()}", "model.dropout=0.0", ON)
    forward, backward = ranks.run(2, sent_beside_products, run, num_pieces, time_limit=200.0)[0]
    sent = [[name for name in names if name not in ("product", "wait")] for names in (forward, backward)]
    if split:
        assert sent[0] == [*["all_gather"] * num_pieces, *["reduce_scatter"] * num_pieces] * 2
        assert sent[1] == [*["all_gather"] * num_pieces, "all_gather", "reduce_scatter"] * 2
    else:
        assert sent == [["all_reduce"] * 2] * 2
    assert (waited_for_at_once(forward), waited_for_at_once(backward)) == alone, (forward, backward)


def drawn_again(run: RunConfig) -> dict[str, Any]:
    """Losses of two trainers alike, and a layer's input gradient kept and computed again in the backward pass."""
    one, batches = parts(run)
    losses = [one.step(step, batches.micro_batches(step)).loss for step in range(3)]
    other = Trainer(one.run, one.mesh)
    again = [other.step(step, batches.micro_batches(step)).loss for step in range(2)]
    other.streams.restart(step=2)  # as a run that goes on from a checkpoint does
    again.append(other.step(2, batches.micro_batches(2)).loss)
    block = one.model.blocks[0]
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))

    def gradient(recompute: bool) -> Tensor:
        one.streams.restart(step=5)
        leaf = x.clone().requires_grad_()
        y, _ = checkpoint(block, leaf, use_reentrant=False) if recompute else block(leaf)
        torch.rand(100)  # others draw before the backward pass
        y.square().sum().backward()
        return leaf.grad

    return {"losses": losses, "again": again, "kept": gradient(False), "recomputed": gradient(True)}


@pytest.mark.slow
@needs_cpp_compiler
def test_compiled_dropout_draws_the_same_in_a_restarted_run_and_in_recomputation(ranks, run_with):
    told = ranks.run(1, drawn_again, run_with("model.dropout=0.2", ON), time_limit=200.0)[0]
    assert told["losses"] == told["again"]
    assert len(set(told["losses"])) == 3
    assert torch.equal(told["kept"], told["recomputed"])


def loss_and_gradients(run: RunConfig) -> list[Tensor]:
    trainer, batches = parts(run)
    loss = trainer.accumulate(0, batches.micro_batches(0))
    return [loss, *(parameter.grad.to_local() for parameter in trainer.parameters)]


@pytest.mark.slow
@needs_cpp_compiler
@pytest.mark.parametrize("more", [["full"], ["full", "training.offload=activations"], ["operators"]], ids=" ".join)
@pytest.mark.parametrize("tensor", [1, 2])
def test_compiled_dropout_is_drawn_again_by_the_runs_own_recomputation(ranks, run_with, tensor, more):
    of_run = (ON, "model.dropout=0.2", *([] if tensor == 1 else ["layout.tensor=2", "layout.sequence_parallel=true"]))
    kept, again = (
        ranks.run(tensor, loss_and_gradients, run_with(*of_run, *options), time_limit=200.0)
        for options in ([], [f"training.recompute={more[0]}", *more[1:]])
    )
    for one, other in zip(kept, again, strict=True):
        assert all(map(torch.equal, one, other))
        assert len(one) == len(other) > 10


def settings_in_both_passes(run: RunConfig) -> list[tuple[bool, bool, bool]]:
    """For every graph of a layer: whether it is a backward pass, and the settings with which Inductor compiles it."""
    from torch._inductor import compile_fx, config

    trainer, batches = parts(run)
    trainer.model.head.projection.runner = PLAIN_LOSS
    seen, inner = [], compile_fx._compile_fx_inner

    def watch(*arguments: Any, **options: Any) -> Any:
        seen.append((bool(options.get("is_backward")), config.reorder_for_peak_memory, config.deterministic))
        return inner(*arguments, **options)

    fresh: Any = torch.compiler.config.patch(cache_key_tag=str(time.time_ns()))  # what is cached is not compiled
    with mock.patch.object(compile_fx, "_compile_fx_inner", watch), fresh:
        trainer.accumulate(0, batches.micro_batches(0))
    return seen


@pytest.mark.slow
@needs_cpp_compiler
@pytest.mark.parametrize(
    ("layout", "reorders", "deterministic"),
    [
        (["layout.tensor=1"], True, False),
        (["layout.tensor=2"], False, True),  # both ranks compute the same norms
        (["layout.tensor=2", "layout.sequence_parallel=true"], False, False),
    ],
)
def test_ranks_that_compute_the_same_take_the_same_kernels(ranks, run_with, layout, reorders, deterministic):
    run = run_with(ON, "model.dropout=0.0", *layout)
    for seen in ranks.run(run.layout.tensor, settings_in_both_passes, run, time_limit=200.0):
        assert sorted(seen) == [(False, reorders, deterministic), (True, reorders, deterministic)]


def watched_by_a_mode(run: RunConfig, layers: bool) -> str:
    class Recompute(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with mock.patch.object(compilation, "BACKEND", "aot_eager"):
        trainer, batches = parts(run)
    trainer.compiler.is_paused = not layers
    with Recompute(), pytest.raises(TrainingError) as error:
        trainer.step(0, batches.micro_batches(0))
    return str(error.value)


@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames")  # PyTorch 2.12's word
@pytest.mark.parametrize("what", ["A layer", "The loss"])
def test_what_would_run_uncompiled_is_an_error(ranks, run_with, what):
    assert ranks.run(1, watched_by_a_mode, run_with(ON, "model.dropout=0.0"), what == "A layer")[0] == (
        f"{what} must run as compiled code (`training.compile`), but does not: PyTorch ran it uncompiled. Set "
        'training.compile="off", or run with TORCH_LOGS=graph_breaks,recompiles to see the cause.'
    )


def many_shapes(run: RunConfig) -> tuple[int, str]:
    with mock.patch.object(compilation, "BACKEND", "eager"):
        trainer, _ = parts(run)
    block = trainer.model.blocks[0]
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(TrainingError) as error:
        for length in range(4, 8):
            block(torch.zeros(2, length, 64))
    made = trainer.compiler.num_graphs
    with uncompiled(trainer.model):
        assert block(torch.zeros(2, 9, 64))[0].shape == (2, 9, 64)
    assert trainer.compiler.num_graphs == made
    return made, str(error.value)


def test_more_shapes_than_graphs_are_an_error_and_plain_code_takes_any(ranks, run_with):
    made, message = ranks.run(1, many_shapes, run_with(ON, "model.dropout=0.0"))[0]
    assert made == 2
    assert "but does not: PyTorch met too many different shapes or settings. Set" in message


def untraceable(run: RunConfig) -> str:
    with mock.patch.object(compilation, "BACKEND", "eager"):
        trainer, batches = parts(run)
    trainer.model.blocks[0].mlp.forward = torch._dynamo.disable(trainer.model.blocks[0].mlp.forward)
    return refusal(TrainingError, trainer.step, 0, batches.micro_batches(0))


def test_a_graph_break_is_an_error(ranks, run_with):
    message = ranks.run(1, untraceable, run_with(ON, "model.dropout=0.0"))[0]
    assert message.startswith("A layer must run as compiled code (`training.compile`), but does not: PyTorch cannot")


def test_without_being_asked_nothing_is_compiled_on_the_cpu(ranks, run_with):
    for option in ("training.compile=auto", "training.compile=off"):
        assert ranks.run(1, trained, run_with(option), 1, "inductor")[0]["compiled"] == ()


def test_a_machine_without_a_compiler_is_refused_before_the_start(run_with):
    run = run_with(ON)
    with torch._dynamo.config.patch(disable=True), pytest.raises(ConfigError) as error:
        require_compilation(resolve_on(run, CPU), CPU)
    assert str(error.value) == (
        '`training.compile` must be "auto" or "off" for this run, but is "on": TORCH_COMPILE_DISABLE or '
        "TORCHDYNAMO_DISABLE in the environment turns compilation off. Remove the cause, or set "
        'training.compile="auto".'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        with pytest.raises(
            ConfigError, match="TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE in the environment turns compilation off"
        ):
            require_compilation(resolve_on(run, CPU), CPU)
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(ConfigError, match=r"no C\+\+ compiler was found for the CPU kernels"):
            require_compilation(resolve_on(run, CPU), CPU)
        require_compilation(resolve_on(run_with("training.compile=auto"), CPU), CPU)


def test_ranks_that_compute_the_same_are_compiled_alike_and_in_order(run_with):
    found = {}
    for split in ("false", "true"):
        run = run_with("layout.tensor=2", f"layout.sequence_parallel={split}")
        found[split] = compilation._inductor_settings(resolve_on(run, CPU))
    assert found == {"false": {**compilation._IN_ORDER, **compilation._ALIKE}, "true": compilation._IN_ORDER}
    assert compilation._inductor_settings(resolve_on(run_with(), CPU)) == {}


def test_a_ring_is_not_compiled_with_a_pytorch_that_gets_it_wrong(run_with, monkeypatch):
    settings = (ON, "model.dropout=0.0", "layout.context=2", "layout.context_attention=ring")
    monkeypatch.setattr(compilation, "_RING_IS_RIGHT", False)
    with pytest.raises(ConfigError, match="compiles ring attention to wrong results"):
        require_compilation(resolve_on(run_with(*settings), CPU), CPU)
    require_compilation(resolve_on(run_with(*settings[:-1], "layout.context_attention=gather"), CPU), CPU)


@pytest.mark.parametrize(
    ("precision", "capability", "dtype"),
    [("float64", (9, 0), "float64"), ("bfloat16", (7, 5), "bfloat16"), ("float32", (9, 0), ""), ("auto", (7, 5), "")],
)
def test_attention_that_keeps_its_scores_on_a_gpu_is_not_compiled(run_with, precision, capability, dtype):
    run = run_with(ON, f"training.precision={precision}", "training.recompute=selective")
    device, triton = torch.device("cuda", 0), mock.patch("importlib.util.find_spec", return_value=object())
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability), triton:
        if not dtype:
            require_compilation(resolve_on(run, device), device)
            return
        with pytest.raises(ConfigError, match=f"attention in {dtype} keeps its scores on this GPU, but training"):
            require_compilation(resolve_on(run, device), device)
        require_compilation(resolve_on(replace(run, training=replace(run.training, recompute="full")), device), device)
