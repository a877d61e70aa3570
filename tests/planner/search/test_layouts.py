from dataclasses import replace
from pathlib import Path

import pytest

from crosscut.config import ConfigError, Layout, LayoutError, ModelConfig, RunConfig, TrainingConfig, load_run
from crosscut.config.checks import divisors
from crosscut.config.teachers import TeacherConfig
from crosscut.planner import Candidate, flops_per_step
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.search import Plans, search_layouts
from crosscut.planner.search.reasons import reason_against_arrangement
from tests.refusals import refusal
from tests.timing import quickest

DGX, H100, LAPTOP = (KNOWN_HARDWARE[key] for key in ("v100-32gb-dgx2h", "h100-sxm", "laptop"))


def run_of(
    preset: str = "megatron-8.3b", *, batch: int = 512, precision: str = "float16", **model: object
) -> RunConfig:
    training = {"precision": precision, "batch_size": batch}
    return load_run({"model": {"preset": preset, **model}, "training": training})


def reasons_of(plans: Plans) -> dict[str, str]:
    return {rejected.label: rejected.reason for rejected in plans.rejected}


@pytest.fixture(scope="module")
def paper() -> Plans:
    """The paper's model on its GPUs."""
    return search_layouts(run_of(), DGX, 512)


def test_the_fastest_comes_first_and_all_fit(paper: Plans) -> None:
    times = [plan.time.total for plan in paper.fitting]
    assert times == sorted(times)
    assert len(times) > 100
    assert all(plan.memory.total <= 32e9 for plan in paper.fitting)
    assert all(plan.candidate.layout.world_size == 512 for plan in paper.fitting)


@pytest.mark.parametrize(("hardware", "precision"), [(H100, "bfloat16"), (DGX, "float16"), (LAPTOP, "float32")])
def test_without_a_precision_the_devices_own_is_planned(hardware: Hardware, precision: str) -> None:
    own, same = (search_layouts(run_of("gpt2-small", batch=8, precision=p), hardware, 2) for p in ("auto", precision))
    assert own.asked.training.precision == precision
    assert own.fitting == same.fitting


def test_every_setting_is_looked_at(paper: Plans) -> None:
    seen = [entry.candidate for entry in (*paper.fitting, *paper.rejected)]
    tensors = {candidate.layout.tensor for candidate in seen}
    assert tensors == set(divisors(512))
    possible = [candidate for candidate in seen if (candidate.layout.tensor, candidate.layout.pipeline) == (8, 1)]
    settings = {
        (
            candidate.layout.sequence_parallel,
            candidate.layout.sharding,
            candidate.layout.shard_group,
            candidate.training.recompute,
            candidate.training.recompute_every,
            candidate.micro_batch_size,
        )
        for candidate in possible
    }
    assert len(settings) == len(possible) == 2 * 5 * 4 * 4  # of sharding: none, two kinds in groups of all or of a node


def test_a_chosen_layout_is_a_run_that_can_be(paper: Plans) -> None:
    for plan in paper.fitting:
        run = plan.run(paper.asked)
        assert run.layout == plan.candidate.layout
        assert run.micro_batch_size == plan.candidate.micro_batch_size
        assert run.training.device == "auto"
        assert run.optimizer == paper.asked.optimizer


def test_rates_are_of_the_same_step(paper: Plans) -> None:
    best = paper.fitting[0]
    assert best.flops_per_second * 512 * best.time.total == pytest.approx(flops_per_step(paper.asked))
    assert best.utilisation == best.flops_per_second / 130e12
    assert best.tokens_per_day == pytest.approx(512 * 1024 * 86400 / best.time.total)


def test_what_does_not_fit_is_told_with_its_reason(paper: Plans) -> None:
    reasons = {rejected.label: rejected.reason for rejected in paper.leanest}
    assert (
        reasons["tensor 1 x data 512, not sharded"] == "weights and optimizer need 100 GB per rank; the GPU has 32 GB"
    )
    without_sharding = reasons["tensor 4 x data 128, not sharded"]
    assert without_sharding == "weights, optimizer and gradients need 33 GB per rank; the GPU has 32 GB"
    assert any(plan.candidate.layout.tensor == 4 for plan in paper.fitting)
    assert reasons["tensor 64 x data 8"] == "32 attention heads cannot be divided evenly over 64 tensor ranks"
    assert all(rejected.reason and not rejected.reason.endswith(".") for rejected in paper.rejected)


def test_a_batch_that_does_not_fit_is_told_apart_from_weights() -> None:
    plans = search_layouts(run_of("megatron-1.2b"), DGX, 1)
    assert {r.label for r in plans.rejected} == {"tensor 1 x data 1"}  # no other rank to share with
    reasons = {
        r.candidate.micro_batch_size: r.reason for r in plans.rejected if r.candidate.training.recompute == "none"
    }
    assert reasons[512].startswith("activations and buffers of a micro-batch of 512 need ")
    assert reasons[512].endswith(" GB per rank besides 17 GB of state; the GPU has 32 GB")


def test_the_data_ranks_must_divide_the_batch() -> None:
    reasons = reasons_of(search_layouts(run_of("megatron-1.2b", batch=6), DGX, 8))
    assert reasons["tensor 1 x data 8"] == "a batch of 6 sequences cannot be divided evenly over 8 data ranks"


def test_float16_on_gpus_before_ampere_keeps_keys_and_values_for_each_head_of_queries() -> None:
    def activations(hardware: Hardware, num_kv_heads: int) -> int:
        run = run_of("gpt2-small", batch=8, num_kv_heads=num_kv_heads)
        plans = search_layouts(run, hardware, 1).fitting
        return next(plan.memory.activations for plan in plans if plan.candidate.training.recompute == "none")

    volta, ampere = DGX, KNOWN_HARDWARE["a100-80gb"]
    assert activations(volta, 12) == activations(ampere, 12)
    assert activations(volta, 4) == activations(volta, 12) > activations(ampere, 4)


def test_what_cannot_be_compiled_as_asked_is_rejected() -> None:
    def plans_of(dropout: float) -> Plans:
        training = {"precision": "float16", "batch_size": 8, "compile": "on"}
        return search_layouts(
            load_run({"model": {"preset": "megatron-1.2b", "dropout": dropout}, "training": training}), DGX, 8
        )

    plans = plans_of(0.1)
    layouts = {plan.candidate.layout for plan in plans.fitting}
    assert {layout.tensor for layout in layouts} == {1, 2, 4, 8}
    assert all(layout.sequence_parallel for layout in layouts if layout.tensor > 1)
    assert all(plan.run(plans.asked).training.compile == "on" for plan in plans.fitting)
    assert reasons_of(plans)["tensor 4 x data 2"] == (
        '`training.compile` is "on", but dropout under tensor parallelism switches between two random streams, and a '
        "compiler cannot trace the switches (`model.dropout` is 0.1 and `layout.tensor` is 4). With "
        "layout.sequence_parallel=true, each rank has only one stream"
    )
    assert {plan.candidate.layout.tensor for plan in plans_of(0.0).fitting} == {1, 2, 4, 8}


def test_what_does_not_cut_evenly_is_told_apart() -> None:
    plans = search_layouts(run_of("megatron-1.2b", num_heads=24, num_kv_heads=3, mlp_size=6148), DGX, 8)
    reasons = {rejected.candidate.layout.tensor: rejected.reason for rejected in plans.rejected if not rejected.needed}
    assert reasons == {
        2: "3 key-value heads cannot be divided or shared evenly by 2 tensor ranks",
        4: "3 key-value heads cannot be divided or shared evenly by 4 tensor ranks",
        8: "the MLP's width of 6148 cannot be divided evenly over 8 tensor ranks",
    }


def test_context_ranks_that_cannot_exchange_heads_are_told() -> None:
    model = {"num_layers": 2, "hidden_size": 768, "vocab_size": 256, "layers": ["mamba2 swiglu"], "num_heads": 12}
    training = {"sequence_length": 512, "batch_size": 16}
    layout = {"context": 2, "context_attention": "all_to_all"}
    run = load_run({"model": model, "layout": layout, "training": training})
    reasons = reasons_of(search_layouts(run, H100, 16))
    assert "3 state-space heads of a tensor rank cannot be exchanged evenly among 2 context ranks" in reasons.values()
    assert not any("8 heads" in reason or "12 heads" in reason for reason in reasons.values())


def test_layers_that_must_be_compiled_have_no_scores_on_a_processor_to_recompute() -> None:
    def found(**training: object) -> set[str]:
        table = {"batch_size": 8, "sequence_length": 256, **training}
        run = load_run({"model": {"preset": "laptop-base", "vocab_size": 8192, "dropout": 0.1}, "training": table})
        return {plan.candidate.training.recompute for plan in search_layouts(run, LAPTOP, 1).fitting}

    assert "selective" in found()
    assert "selective" not in found(compile="on")


def test_ranks_on_a_laptop_share_its_memory() -> None:
    training = {"batch_size": 8, "sequence_length": 256}
    run = load_run({"model": {"preset": "laptop-base", "vocab_size": 8192}, "training": training})
    one, two = (search_layouts(run, LAPTOP, num) for num in (1, 2))
    assert one.fitting[0].time.total < two.fitting[0].time.total  # nothing is gained by sharing a processor
    crowded = search_layouts(run_of("megatron-1.2b", precision="float32", batch=4), LAPTOP, 4)
    assert crowded.rejected[-1].reason.endswith("; each of 4 ranks has 4.0 GB")


SMALL_V100 = KNOWN_HARDWARE["v100-16gb"]
ONE_GPU = "The model does not fit on one GPU, so several tensor ranks must share it. Try"
OTHER = f"{ONE_GPU} another value, or a GPU with more memory."
HEADS = "`model.num_heads` must have a divisor above 1 in common with `--gpus`"
WITH_31_HEADS = run_of("megatron-1.2b", precision="float32", batch=4, hidden_size=1550, num_heads=31)


@pytest.mark.parametrize(
    ("run", "num_ranks", "hardware", "message"),
    [
        (run_of(), 0, DGX, "`--gpus` must be at least 1, but is 0. Set it to the number of devices."),
        (
            *(run_of(batch=8), 512, DGX),
            (
                "`training.batch_size` must be at least 16, but is 8. A step needs one sequence for each stage of "
                "each data rank, and 512 GPUs with at most 32 tensor ranks have at least 16 such stages. Raise the "
                "batch size, or use at most 256 GPUs."
            ),
        ),
        (
            *(run_of(batch=100, num_layers=3), 512, DGX),
            (
                "`training.batch_size` must be divisible by the number of data ranks, but is 100. No possible layout "
                "of 512 GPUs has a number of data ranks that divides 100. Try 112."
            ),
        ),
        (run_of("gpt2-xl", batch=512, hidden_size=6400), 8, DGX, f"{HEADS} (8), but is 25. {ONE_GPU} 5 or 25 GPUs."),
        (run_of(num_heads=1), 2, SMALL_V100, f"{HEADS} (2), but is 1. {OTHER}"),
        (WITH_31_HEADS, 4, LAPTOP, f"{HEADS} (4), but is 31. {OTHER}"),
        (
            *(run_of(mlp_size=32767), 8, SMALL_V100),
            (
                "`model.mlp_size` must have a divisor above 1 in common with `--gpus` (8) and `model.num_heads` (32), "
                f"but is 32767. {OTHER}"
            ),
        ),
        (
            *(run_of(num_heads=12, num_kv_heads=3, head_size=256), 8, SMALL_V100),
            (
                "`model.num_kv_heads` must divide or be a multiple of a tensor size that `--gpus` (8) and "
                "`model.num_heads` (12) and `model.mlp_size` (12288) allow (2 or 4), but is 3. "
                f"{ONE_GPU} 3, 6 or 12 GPUs."
            ),
        ),
        (
            *(run_of(precision="bfloat16"), 8, DGX),
            (
                "`training.precision` must be a precision of V100 SXM3 32 GB (DGX-2H), but is 'bfloat16'. Choose "
                '"float16" (the fastest), "float32" or "float64".'
            ),
        ),
    ],
)
def test_nonsense_is_told(run: RunConfig, num_ranks: int, hardware, message: str) -> None:
    assert refusal(ConfigError, search_layouts, run, hardware, num_ranks) == message


def test_numbers_without_small_divisors_take_no_longer() -> None:
    def search() -> None:
        with pytest.raises(LayoutError, match=r"^`training.batch_size` must be at least"):
            search_layouts(run_of(), DGX, 99_999_989)  # a prime

    assert quickest(search, limit=0.5) < 0.5


@pytest.mark.slow
@pytest.mark.alone
def test_ten_thousand_layouts_take_less_than_five_seconds() -> None:
    """Hundreds here stand for thousands. A model of one layer has no pipelines."""
    run = run_of(batch=4096, precision="bfloat16", num_layers=1)
    plans = search_layouts(run, H100, 1024)
    looked_at = len(plans.fitting) + len(plans.rejected)
    assert looked_at > 500
    limit = 5 * looked_at / 10_000
    assert quickest(lambda: search_layouts(run, H100, 1024), limit=limit) < limit


@pytest.mark.slow
@pytest.mark.alone
def test_thousands_of_pipelines_take_less_than_two_seconds() -> None:
    run = run_of(batch=4096, precision="bfloat16")
    assert quickest(lambda: search_layouts(run, H100, 1024), limit=2.0) < 2.0


def test_layouts_that_cannot_have_the_teacher_are_refused(tmp_path: Path) -> None:
    shape = {"num_layers": 2, "hidden_size": 36, "num_heads": 3, "vocab_size": 300, "max_sequence_length": 64}
    (tmp_path / "config.toml").write_text("[model]\n" + "\n".join(f"{name} = {size}" for name, size in shape.items()))
    model = ModelConfig(**{**shape, "hidden_size": 64, "num_heads": 4})
    run = Candidate(model, Layout(), TrainingConfig(batch_size=8), teacher=TeacherConfig(folder=str(tmp_path)))
    assert reason_against_arrangement(run, Layout(data=2)) == ""
    cut = "the teacher cannot be cut: 3 attention heads cannot be divided evenly over 2 tensor ranks"
    assert reason_against_arrangement(run, Layout(tensor=2)) == cut
    fixed = replace(run, teacher=replace(run.teacher, tensor=3))
    told = "3 tensor ranks of the teacher do not divide the 4 ranks that compute the loss"
    assert reason_against_arrangement(fixed, Layout(data=2, tensor=2, pipeline=2)) == told
