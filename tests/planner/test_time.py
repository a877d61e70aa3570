from dataclasses import replace

import pytest

from crosscut.architecture import Target, describe, layer_parameters
from crosscut.architecture.readings import weight_flops
from crosscut.config import PRESETS, Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.config.parts.mamba2 import Mamba2Config
from crosscut.planner import flops_per_step, recomputed_flops_per_step
from crosscut.planner.candidate import target_of
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.passes import layer_passes, optimizer_bytes, weight_passes
from crosscut.planner.program import crosscut_program
from crosscut.planner.time import bubble_share, model_flops_per_second, step_time

H100 = KNOWN_HARDWARE["h100-sxm"]


def run_of(layout: Layout | None = None, **training: object) -> RunConfig:
    model = ModelConfig(**{**PRESETS["megatron-1.2b"], "dropout": 0.0})
    settings = {"batch_size": 8, "precision": "bfloat16", "device": "cuda", **training}
    return RunConfig(model=model, layout=layout or Layout(), training=TrainingConfig(**settings))  # type: ignore[arg-type]


def test_a_step_is_the_sum_of_its_parts() -> None:
    time = step_time(run_of(Layout(tensor=2)), H100)
    parts = time.products + time.attention + time.passes + time.optimizer
    assert time.compute == parts
    assert time.total == parts + time.exposed + time.bubble
    assert time.bubble == 0.0


def without_limits() -> Hardware:
    """All at the peak, the attention kernel at half of it, memory at once."""
    rates = {"products_attained": 1.0, "attention_attained": 0.5, "memory_bandwidth": 1e30}
    return replace(H100, **rates, multiprocessors=0, start=0.0)


def test_without_anything_but_products_it_is_their_flops() -> None:
    ideal = without_limits()
    run = replace(run_of(), model=replace(run_of().model, vocab_size=128 * 400))  # no padding
    time = step_time(run, ideal)
    core = 3 * run.model.num_layers * 4 * 8 * 1024**2 * run.model.query_size
    assert time.products == pytest.approx((flops_per_step(run) - core) / 989e12)
    assert time.attention == pytest.approx(core / 3 * 3.5 / 989e12)  # half the square at half the rate; backward 2.5
    assert time.passes + time.optimizer == pytest.approx(0.0)


@pytest.mark.parametrize("layer", ["attention experts", "latent_attention swiglu", "mamba gelu"])
def test_products_that_no_message_overlaps_with_count_as_well(layer: str) -> None:
    model = replace(run_of().model, layers=(layer,), biases="none", positions="rotary", vocab_size=128)
    run = replace(run_of(), model=model)
    decoder, target = describe(run.model), target_of(run, device="cuda")
    layers = sum(count * weight_flops(layer, target) for layer, count in decoder.kinds.items())
    flops = 3 * (layers + decoder.loss.product(target).flops)
    assert step_time(run, without_limits()).products == pytest.approx(flops / 989e12)


def test_attention_with_a_mask_of_documents_computes_the_whole_square_and_reads_the_mask() -> None:
    plain, masked = replace(without_limits(), memory_bandwidth=1e12), run_of(document_mask=True)
    before, after = step_time(run_of(), plain), step_time(masked, plain)
    assert after.attention == pytest.approx(2 * before.attention)
    mask = 8 * 1024**2 * 2  # bfloat16
    rate = plain.memory_bandwidth * plain.memory_attained
    assert after.passes - before.passes == pytest.approx(2 * masked.model.num_layers * mask / rate)
    assert flops_per_step(masked) == flops_per_step(run_of())


def test_bidirectional_attention_computes_the_whole_square() -> None:
    run = run_of()
    ideal, both = without_limits(), replace(run, model=replace(run.model, attention="bidirectional"))
    assert step_time(both, ideal).attention == pytest.approx(2 * step_time(run, ideal).attention)


@pytest.mark.parametrize("compiled", [True, False])
def test_recomputation_takes_the_time_of_what_it_repeats(compiled: bool) -> None:
    ideal = without_limits()
    plain, full = run_of(), run_of(recompute="full")
    program = crosscut_program(plain, ideal)._replace(compiled=compiled, repeats_last=compiled)
    more = step_time(full, ideal, program=program).total - step_time(plain, ideal, program=program).total
    assert more == pytest.approx(recomputed_flops_per_step(full, compiled=compiled) / 989e12)


def test_every_second_layer_repeats_half() -> None:
    none, half, full = (
        step_time(run_of(recompute=mode, recompute_every=every), H100).total
        for mode, every in (("none", 1), ("full", 2), ("full", 1))
    )
    assert half - none == pytest.approx((full - none) / 2)


def test_a_residual_stream_is_read_and_written_as_the_table_says() -> None:
    run = run_of()
    stream, inner = 8 * 1024 * 1536 * 2, 8 * 1024 * 4 * 1536 * 2
    (layer,), target = describe(run.model).kinds, target_of(run, device="cuda")
    compiled = layer_passes(layer, target)
    assert (compiled.forward, compiled.backward) == (2 * 5 * stream + 2 * inner, 2 * 5 * stream + 4 * inner)
    eager = layer_passes(layer, replace(target, compiled=False))
    assert (eager.forward, eager.backward) == (2 * 7 * stream + 2 * inner, 2 * 9 * stream + 4 * inner)


def test_cheap_operators_are_norms_and_gelu() -> None:
    plain, cheap = (step_time(run_of(recompute=mode), H100) for mode in ("none", "operators"))
    num_bytes = 40 * (4 * 8 * 1024 * 1536 * 2 + 2 * 8 * 1024 * 4 * 1536 * 2)
    assert cheap.passes - plain.passes == pytest.approx(num_bytes / (3350e9 * 0.85))
    assert cheap.products == plain.products


def test_dropout_adds_its_mask_and_under_tensor_parallelism_takes_the_compiler() -> None:
    run = replace(run_of(Layout(tensor=2)), model=replace(run_of().model, dropout=0.1))
    assert not crosscut_program(run, H100).compiled
    assert crosscut_program(run_of(Layout(tensor=2)), H100).compiled
    assert step_time(run, H100).passes > 1.5 * step_time(run_of(Layout(tensor=2)), H100).passes


def test_sharding_divides_the_optimizers_work() -> None:
    whole, shared = run_of(Layout(data=8)), run_of(Layout(data=8, sharding="zero2"))
    program = crosscut_program(whole, H100)
    assert optimizer_bytes(whole, program) == pytest.approx(8 * 52 / 36 * optimizer_bytes(shared, program))


def test_a_split_sequence_divides_norms_and_residuals() -> None:
    whole, split = (step_time(run_of(Layout(tensor=8, sequence_parallel=s)), H100) for s in (False, True))
    assert split.passes < whole.passes
    assert split.products == whole.products


def test_accumulation_repeats_the_micro_batch_and_not_the_optimizer() -> None:
    one, four = step_time(run_of(micro_batch_size=8), H100), step_time(run_of(micro_batch_size=2), H100)
    assert four.optimizer == one.optimizer
    assert four.products == pytest.approx(one.products, rel=0.15)
    assert four.passes > one.passes


def test_the_first_micro_batch_adds_its_gradients_to_none() -> None:
    """Every other micro-batch reads two float32 tensors and writes one. Nothing else depends on the number of
    micro-batches, neither the starts of kernels nor the gradient of the vocabulary in the loss.
    """
    run = run_of(precision="float32")
    program = crosscut_program(run, H100)
    layers = 40 * sum(
        parameter.size for parameter in layer_parameters(describe(run.model).layers[0], Target.of(Layout()))
    )
    for micro, batches in ((8, 1), (4, 2), (1, 8)):
        cast, summed = weight_passes(run_of(precision="float32", micro_batch_size=micro), program)
        assert (cast, batches * summed) == (0.0, pytest.approx((batches - 1) * 3 * 4 * layers))
        cast, summed = weight_passes(run_of(micro_batch_size=micro), program)
        assert (cast, batches * summed) == (6 * layers, pytest.approx((batches * 6 + (batches - 1) * 12) * layers))


def test_moments_come_from_host_memory() -> None:
    stays, comes = (step_time(run_of(offload=offload), H100).optimizer for offload in ((), ("optimizer",)))
    assert comes - stays == pytest.approx(8 * 1_209_661_440 / 64e9, rel=0.1)


@pytest.mark.parametrize("hardware", [h for h in KNOWN_HARDWARE.values() if h.device == "cuda"], ids=lambda h: h.key)
def test_no_device_is_faster_than_its_peak(hardware: Hardware) -> None:
    precision = "bfloat16" if "bfloat16" in hardware.flops else "float16"
    run = run_of(precision=precision)
    rate = model_flops_per_second(run, step_time(run, hardware).total)
    assert 0.1 < rate / hardware.flops[precision] < hardware.products_attained


def test_the_bubble_is_narayanans() -> None:
    assert bubble_share(1, 64) == 0.0
    assert bubble_share(8, 64) == 7 / 64
    assert bubble_share(8, 64, chunks=4) == 7 / 256


def calibrated(**figures: object) -> Hardware:
    """A processor of whose rates all else is none."""
    laptop = KNOWN_HARDWARE["laptop"]
    return replace(laptop, memory_bandwidth=1e30, start=0.0, **figures)  # type: ignore[arg-type]


def on_cpu(**training: object) -> RunConfig:
    """Two micro-batches of 4 x 256 tokens in 3 layers of hidden size 64."""
    model = ModelConfig(num_layers=3, hidden_size=64, num_heads=2, vocab_size=512, max_sequence_length=256, dropout=0.0)
    settings = {"batch_size": 8, "micro_batch_size": 4, "sequence_length": 256, "device": "cpu", **training}
    return RunConfig(model=model, layout=Layout(), training=TrainingConfig(**settings))  # type: ignore[arg-type]


def test_a_host_that_does_not_run_ahead_starts_the_operators_of_each_layer_and_micro_batch() -> None:
    """And of embedding and loss, as half a layer's; a wholly recomputed layer's forward ones again."""
    hardware = calibrated(layer_host=(1.0, 3.0))
    assert step_time(on_cpu(), hardware).passes == pytest.approx(2 * (3 * 4 + 2))
    assert step_time(on_cpu(recompute="full"), hardware).passes == pytest.approx(2 * (3 * 5 + 2))


def test_a_host_that_does_not_run_ahead_goes_over_every_parameter_once_a_step() -> None:
    run = on_cpu()
    tensors = 2 + 2 + 3 * (4 + 2 * 5)  # embeddings, final norm; norms, and query, key and value, output and MLP
    assert step_time(run, calibrated(tensor_host=2.0)).optimizer == pytest.approx(2.0 * tensors)


def test_gelu_takes_its_arithmetic_forward_backward_and_where_it_is_repeated() -> None:
    """The model has 3 layers with 256 columns, and a step has 2 micro-batches of 1024 tokens."""
    hardware, elements = calibrated(gelu=1e9), 2 * 3 * 1024 * 256
    assert step_time(on_cpu(), hardware).passes == pytest.approx(2 * elements / 1e9)
    assert step_time(on_cpu(recompute="operators"), hardware).passes == pytest.approx(3 * elements / 1e9)


def test_selective_recomputation_repeats_the_passes_over_scores_where_no_kernel_fuses_them() -> None:
    """The model has 3 layers, and a step has 2 micro-batches. `scores` is the bytes of the scores of 4 sequences of 256
    tokens with 2 heads, with 4 bytes per score.
    """
    hardware = replace(KNOWN_HARDWARE["laptop"], memory_bandwidth=1e9, memory_attained=1.0, start=0.0)
    scores = 4 * 2 * 256**2 * 4

    def more(dropout: float) -> float:
        plain, again = on_cpu(), on_cpu(recompute="selective")
        times = [step_time(replace(run, model=replace(run.model, dropout=dropout)), hardware) for run in (plain, again)]
        assert times[1].attention > times[0].attention
        return times[1].passes - times[0].passes

    assert more(0.1) == pytest.approx(2 * 3 * 10.25 * scores / 1e9)
    assert more(0.0) == 0.0


def test_ranks_on_one_processor_share_the_rate_of_gelu() -> None:
    hardware = calibrated(gelu=1e9)
    shared = replace(on_cpu(micro_batch_size=4), layout=Layout(data=2))
    assert step_time(shared, hardware).passes == pytest.approx(step_time(on_cpu(), hardware).passes)


def test_kinds_of_equal_cost_take_the_time_of_equal_layers() -> None:
    sharded = run_of(Layout(data=8, sharding="zero3"))
    models = [replace(sharded.model, layers=(f"attention {kind}",)) for kind in ("swiglu", "geglu")]
    mixed = replace(sharded.model, layers=("attention swiglu", "attention geglu"))
    times = [step_time(replace(sharded, model=model), H100).exposed for model in (*models, mixed)]
    assert times[1:] == pytest.approx([times[0]] * 2)


def test_a_scan_is_booked_as_a_scan() -> None:
    sizes = Mamba2Config(head_size=64, state_size=128)
    model = replace(run_of().model, layers=("mamba2", "attention"), mamba2=sizes)
    run = replace(run_of(), model=model)
    ideal = without_limits()
    time = step_time(run, ideal)
    inner, chunks = 2 * model.hidden_size, 1024 // 128
    of_sequence = 2 * 128 * chunks * (128 * 128 + 128 * inner) + 2 * 2 * 128 * (chunks - 1) * 128 * inner
    assert time.scan == pytest.approx(3 * model.num_layers / 2 * 8 * of_sequence / 989e12)
    assert time.attention == pytest.approx(step_time(run_of(), ideal).attention / 2)
    assert time.compute == time.products + time.attention + time.scan + time.passes + time.optimizer
    again = step_time(replace(run, training=replace(run.training, recompute="selective", compile="off")), ideal)
    assert again.scan == pytest.approx(time.scan * 4 / 3)
