from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from crosscut.architecture import describe
from crosscut.config import ConfigError, Layout, ModelConfig, RunConfig, TrainingConfig, default_loss_chunk
from crosscut.planner import Collective, parameters_per_rank, step_traffic, wire_bytes_per_step
from crosscut.planner.candidate import target_of
from crosscut.planner.messages.traffic import reason_against_halves

H, L, P, S = 32, 3, 48, 16
MODEL = ModelConfig(num_layers=L, hidden_size=H, num_heads=4, vocab_size=500, max_sequence_length=P)


def make_run(*, precision: str = "float32", micro_batch_size: int = 2, **layout: Any) -> RunConfig:
    training = TrainingConfig(batch_size=8, micro_batch_size=micro_batch_size, sequence_length=S, precision=precision)
    return RunConfig(model=MODEL, layout=Layout(**layout), training=training)


def counts(collectives: list[Collective], elements: int) -> Counter[tuple[str, str]]:
    """Number of collectives of the given size, by phase and operation."""
    counter: Counter[tuple[str, str]] = Counter()
    for c in collectives:
        if c.axis == "tensor" and c.elements == elements:
            counter[c.phase, c.operation] += c.count
    return counter


def the_only(purpose: str, collectives: list[Collective]) -> Collective:
    (collective,) = [c for c in collectives if c.purpose == purpose]
    return collective


def test_one_rank_sends_nothing() -> None:
    assert step_traffic(make_run()) == []
    assert step_traffic(make_run(sequence_parallel=True)) == []


def test_tensor_parallelism_meets_twice_per_layer_each_way() -> None:
    micro_batches = 4
    assert counts(step_traffic(make_run(tensor=2)), 2 * S * H) == {
        ("forward", "all_reduce"): micro_batches * (2 * L + 1),
        ("backward", "all_reduce"): micro_batches * (2 * L + 1),
    }


def test_sequence_parallelism_gathers_and_scatters_twice_per_layer_each_way() -> None:
    micro_batches, meetings = 4, 2 * L + 1
    assert counts(step_traffic(make_run(tensor=2, sequence_parallel=True)), 2 * S * H) == {
        ("forward", "all_gather"): micro_batches * meetings,
        ("forward", "reduce_scatter"): micro_batches * meetings,
        ("backward", "all_gather"): micro_batches * (meetings + 2 * L),  # inputs are kept split and gathered again
        ("backward", "reduce_scatter"): micro_batches * meetings,
    }


def test_sequence_parallelism_sends_the_bytes_of_tensor_parallelism_and_the_inputs_once_more() -> None:
    def activations(*, sequence_parallel: bool) -> float:
        collectives = step_traffic(make_run(tensor=4, sequence_parallel=sequence_parallel))
        return wire_bytes_per_step(c for c in collectives if c.elements == 2 * S * H)

    inputs = 4 * 2 * L * 3 / 4 * 2 * S * H * 4  # micro-batches, regions, a ring's part, elements, bytes
    assert activations(sequence_parallel=True) == activations(sequence_parallel=False) + inputs


@pytest.mark.parametrize(("every", "layers"), [(1, L), (2, 2), (3, 1)])
def test_layers_that_are_recomputed_send_again_what_their_backward_pass_needs(every: int, layers: int) -> None:
    def again(sequence_parallel: bool, **options: bool) -> Counter[str]:
        run = make_run(tensor=2, sequence_parallel=sequence_parallel)
        recomputing = replace(run, training=replace(run.training, recompute="full", recompute_every=every))
        counter: Counter[str] = Counter()
        for c in step_traffic(recomputing, **options):
            counter[c.operation] += c.count
        for c in step_traffic(run):
            counter[c.operation] -= c.count
        return +counter

    micro_batches = 4
    assert again(False) == {"all_reduce": micro_batches * layers}
    assert again(True) == {"all_gather": micro_batches * 2 * layers, "reduce_scatter": micro_batches * layers}
    assert again(False, compiled=True) == {"all_reduce": micro_batches * 2 * layers}
    assert again(True, compiled=True)["reduce_scatter"] == micro_batches * 2 * layers


@pytest.mark.parametrize("recompute", ["selective", "operators"])
def test_recomputing_inside_a_layer_sends_nothing_again(recompute: str) -> None:
    run = make_run(tensor=2, sequence_parallel=True)
    assert step_traffic(replace(run, training=replace(run.training, recompute=recompute))) == step_traffic(run)


@pytest.mark.parametrize("compile_", ["off", "on"])
def test_large_products_send_in_two_pieces(compile_: str) -> None:
    model = ModelConfig(
        num_layers=1, hidden_size=4096, num_heads=4, vocab_size=500, max_sequence_length=1024, dropout=0.0
    )
    layout = Layout(tensor=2, sequence_parallel=True)
    training = TrainingConfig(batch_size=2, sequence_length=1024, compile=compile_)
    large = step_traffic(RunConfig(model=model, layout=layout, training=training))
    forward = [c for c in large if c.phase == "forward" and c.purpose == "attention input"]
    assert [(c.count, c.elements) for c in forward] == [(2, 1024 * 4096)]
    loss = the_only("output projection input", [c for c in large if c.phase == "forward"])
    assert (loss.count, loss.elements) == (1, 2 * 1024 * 4096)
    in_8_bits = RunConfig(model=model, layout=layout, training=replace(training, precision="float8"))
    (gather, *_) = [c for c in step_traffic(in_8_bits) if c.purpose == "attention input"]
    assert (gather.phase, gather.count) == ("forward", 1)


def test_sequence_parallelism_sums_the_replicated_parameters_gradients_once() -> None:
    collective = the_only("replicated gradients", step_traffic(make_run(tensor=2, sequence_parallel=True)))
    assert (collective.operation, collective.axis, collective.phase) == ("all_reduce", "tensor", "step")
    assert (collective.count, collective.elements) == (1, L * (4 * H + 2 * H) + 2 * H + P * H)
    assert all(c.purpose != "replicated gradients" for c in step_traffic(make_run(tensor=2)))


@pytest.mark.parametrize("chunk_tokens", [1, 5, 8, 16, 32, 1000])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_loss_sends_three_scalars_per_token_in_chunks(chunk_tokens: int, sequence_parallel: bool) -> None:
    run = make_run(tensor=2, sequence_parallel=sequence_parallel)
    loss = [c for c in step_traffic(run, loss_chunk_tokens=chunk_tokens) if c.purpose.startswith("loss")]
    tokens, micro_batches = 2 * S, 4
    pairs = micro_batches * -(-tokens // chunk_tokens)
    for purpose, scalars in (("loss maximum", 1), ("loss sums", 2)):
        part = [c for c in loss if c.purpose == purpose]
        assert sum(c.count for c in part) == pairs
        assert sum(c.count * c.elements for c in part) == scalars * micro_batches * tokens
    assert all(c.operation == "all_reduce" and c.axis == "tensor" for c in loss)


def test_default_loss_chunk_holds_the_logits_that_training_keeps() -> None:
    local_vocab_size = 2**22
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=2 * local_vocab_size)
    run = RunConfig(model=model, layout=Layout(tensor=2), training=TrainingConfig(batch_size=1, sequence_length=64))
    assert the_only("loss maximum", step_traffic(run)).elements == default_loss_chunk(local_vocab_size, 64) == 4


@pytest.mark.parametrize(
    ("device", "compiled", "bound"),
    [("cpu", False, 2**24), ("cpu", True, 2**24), ("cuda", False, 2**29), ("cuda", True, 2**30)],
)
def test_logits_of_a_default_chunk_stay_below_a_bound_whatever_the_vocabulary(
    device: str, compiled: bool, bound: int
) -> None:
    for num_tokens in (1000, 8192, 100_000):
        for local_vocab_size in range(128, 300_000, 1664):
            chunk = default_loss_chunk(local_vocab_size, num_tokens, device=device, compiled=compiled)
            assert chunk * local_vocab_size <= bound
            if num_tokens * local_vocab_size <= bound // 2:
                assert chunk >= num_tokens, "what fits is done at once"


def test_logits_at_once_are_what_the_page_on_memory_says() -> None:
    vocab_sizes = (12_800, 25_600, 51_200, 102_400, 204_800)
    held = [default_loss_chunk(v, 8192, device="cuda") * v for v in vocab_sizes]
    assert [round(4 * logits / 2**30, 2) for logits in held] == [0.39, 0.78, 1.56, 1.56, 1.56]


@pytest.mark.parametrize(
    ("local_vocab_size", "num_tokens", "chunk"),
    [
        (50_304, 2048, 256),  # 333 would fit
        (25_216, 2048, 512),  # 665 would fit: three such chunks would leave 53 tokens, at the price of a whole chunk
        (25_216, 600, 640),
        (50_304, 60, 128),
        (2**26, 64, 1),
    ],
)
def test_loss_chunks_are_even(local_vocab_size: int, num_tokens: int, chunk: int) -> None:
    assert default_loss_chunk(local_vocab_size, num_tokens) == chunk
    assert default_loss_chunk(local_vocab_size, num_tokens, device="auto") == chunk
    assert default_loss_chunk(50_304, 8192, device="cuda") == 8192


def test_a_compiled_loss_on_a_gpu_has_half_as_many_chunks_and_so_fewer_passes_over_the_weights_gradient() -> None:
    model = ModelConfig(num_layers=1, hidden_size=2048, num_heads=16, vocab_size=2**17, dropout=0.0)
    training = TrainingConfig(batch_size=16, micro_batch_size=16, precision="bfloat16", device="cuda")
    stream, logits, weight = 2**14 * 2048, 2**14 * 2**17, 2**17 * 2048
    for compiled, chunks, of_logit in ((False, 4, 10 * 4), (True, 2, 3 * 2)):
        chosen = replace(training, compile="on" if compiled else "off")
        run = RunConfig(model=model, layout=Layout(tensor=2), training=chosen)
        assert the_only("loss maximum", step_traffic(run)).count == chunks / 2, "each rank has half of the vocabulary"
        target = replace(target_of(run, device="cuda"), tensor=1, compiled=compiled)
        cast, added = 6, 4 + 8 * (chunks - 1)
        assert describe(model).loss.ends_passes(target).forward == (
            6 * 2 * stream + of_logit * logits + (cast + added) * weight
        )


def test_loss_does_not_grow_with_the_vocabulary() -> None:
    def sent(vocab_size: int) -> float:
        model = ModelConfig(num_layers=L, hidden_size=H, num_heads=4, vocab_size=vocab_size)
        run = RunConfig(model=model, layout=Layout(tensor=2), training=TrainingConfig(batch_size=8, sequence_length=S))
        return wire_bytes_per_step(step_traffic(run), "tensor")

    assert sent(500) == sent(500_000)


def test_data_parallelism_sums_every_local_gradient_once() -> None:
    run = make_run(tensor=2, data=2)
    collective = the_only("gradients", step_traffic(run))
    assert (collective.operation, collective.axis, collective.phase) == ("all_reduce", "data", "step")
    assert (collective.count, collective.elements) == (1, parameters_per_rank(MODEL, run.layout))


def test_data_parallelism_alone_sends_gradients_and_the_reported_loss() -> None:
    assert [(c.axis, c.purpose, c.count, c.elements) for c in step_traffic(make_run(data=4))] == [
        ("data", "gradients", 1, parameters_per_rank(MODEL, Layout())),
        ("data", "target tokens", 1, 1),
        ("data", "reported loss and verdict", 1, 2),
    ]


def test_gradient_norm_is_one_wide_number_over_the_tensor_axis() -> None:
    collective = the_only("gradient norm", step_traffic(make_run(tensor=2)))
    assert (collective.axis, collective.count, collective.elements, collective.element_bytes) == ("tensor", 1, 1, 8)


def test_micro_batches_send_the_same_activations_in_more_parts() -> None:
    whole, parts = (step_traffic(make_run(tensor=2, micro_batch_size=size)) for size in (8, 2))
    assert wire_bytes_per_step(whole) == wire_bytes_per_step(parts)
    assert the_only("mlp output", parts).count == 4 * the_only("mlp output", whole).count


def test_bfloat16_halves_activations_and_keeps_sums_in_float32() -> None:
    single, half = (step_traffic(make_run(tensor=2, data=2, precision=p)) for p in ("float32", "bfloat16"))
    for wide, narrow in zip(single, half, strict=True):
        if wide.purpose in ("target tokens", "gradient norm"):  # whole numbers and float64, whatever the precision
            continue
        assert wide.element_bytes == 4
        assert narrow.element_bytes == (2 if narrow.elements == 2 * S * H else 4)


@pytest.mark.parametrize(("operation", "factor"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_a_ring_sends_all_but_one_part_per_round(operation: Any, factor: int) -> None:
    sizes = {"count": 3, "elements": 1000, "element_bytes": 4, "ranks": 4}
    collective = Collective(operation=operation, axis="tensor", phase="forward", purpose="a test", **sizes)
    assert collective.wire_bytes == factor * 3 / 4 * 3 * 1000 * 4


def test_bytes_are_summed_by_axis() -> None:
    collectives = step_traffic(make_run(tensor=2, data=2, sequence_parallel=True))
    tensor, data = (wire_bytes_per_step(collectives, axis) for axis in ("tensor", "data"))
    assert tensor > 0 < data
    assert wire_bytes_per_step(collectives) == tensor + data


def test_a_loss_chunk_has_at_least_one_token() -> None:
    with pytest.raises(ConfigError) as error:
        step_traffic(make_run(tensor=2), loss_chunk_tokens=0)
    assert str(error.value) == "`loss_chunk_tokens` must be at least 1, but is 0."


def test_unknown_vocabulary_is_an_error() -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=2)
    with pytest.raises(ConfigError, match=r"`model\.vocab_size` must be at least 1 for a forecast"):
        step_traffic(RunConfig(model=model, training=TrainingConfig(batch_size=1, sequence_length=8)))


def of_parameters(collectives: list[Collective]) -> float:
    """Bytes that weights and gradients take over the data axis."""
    sent = [c for c in collectives if "weights" in c.purpose or "gradients" in c.purpose]
    return wire_bytes_per_step(sent, "data")


def test_shared_copies_send_what_one_all_reduce_does_and_half_as_much_again_under_zero3() -> None:
    """Rajbhandari et al. 2020, section 7; the root is gathered once a micro-batch, as it is kept."""
    copies, zero2, zero3 = (
        of_parameters(step_traffic(make_run(micro_batch_size=4, data=2, sharding=sharding)))
        for sharding in ("none", "zero2", "zero3")
    )
    assert zero2 == copies
    root = 2 * 4 * (512 * H + P * H + 2 * H) / 2  # gathered and scattered, as much as reduced
    assert zero3 - root == pytest.approx(1.5 * (copies - root))


def test_groups_sum_their_shares_once_a_step() -> None:
    collectives = step_traffic(make_run(micro_batch_size=1, data=4, sharding="zero3", shard_group=2))
    between = [c for c in collectives if c.axis == "replica"]
    assert sum(c.count * c.elements for c in between) == parameters_per_rank(MODEL, Layout()) // 2
    assert {c.count for c in between} == {1, L}
    assert {c.axis for c in collectives if c.operation != "all_reduce"} == {"shard"}


def test_rows_that_a_group_does_not_divide_are_padded() -> None:
    collectives = step_traffic(make_run(micro_batch_size=2, data=4, sharding="zero2"))
    expected = 3 * H * H + 3 * H + H * H + 4 * H * H + 4 * H + 4 * H * H + 6 * H
    assert the_only("layer weights", collectives).elements == expected
    odd = ModelConfig(num_layers=1, hidden_size=6, num_heads=2, vocab_size=128, max_sequence_length=16)
    training = TrainingConfig(batch_size=4, sequence_length=16)
    run = RunConfig(model=odd, layout=Layout(data=4, sharding="zero2"), training=training)
    padded = 20 * 6 + 20 + 8 * 6 + 24 * 6 + 24 + 8 * 24 + 6 * 8
    assert the_only("layer weights", step_traffic(run)).elements == padded


@pytest.mark.parametrize(
    ("layout", "training", "reason"),
    [
        ({}, {"micro_batch_size": 1}, "a micro-batch of 1 sequence cannot be split into halves"),
        ({}, {"micro_batch_size": 3}, "a micro-batch of 3 sequences cannot be split into halves"),
        ({}, {"micro_batch_size": 2}, ""),
        ({}, {"micro_batch_size": 1, "sequence_length": 1024}, ""),  # halves of two would be too small as well
        ({"symmetric_memory": True}, {"micro_batch_size": 1}, ""),
        ({"sequence_parallel": False}, {"micro_batch_size": 1}, ""),
        ({}, {"micro_batch_size": 2, "precision": "float8"}, "float8 products are not split into halves"),
        ({}, {"micro_batch_size": 2, "precision": "float8", "sequence_length": 1024}, ""),
    ],
)
def test_a_split_micro_batch_without_halves_is_told(
    layout: dict[str, Any], training: dict[str, Any], reason: str
) -> None:
    model = ModelConfig(num_layers=1, hidden_size=1024, num_heads=16, vocab_size=500, max_sequence_length=8192)
    run = RunConfig(
        model=model,
        layout=Layout(**{"tensor": 2, "sequence_parallel": True, **layout}),
        training=TrainingConfig(**{"batch_size": 6, "sequence_length": 8192, **training}),
    )
    assert reason_against_halves(run).partition(". ")[0] == reason
    if reason:
        assert all(c.elements == run.micro_batch_size * 8192 * 1024 for c in step_traffic(run) if "input" in c.purpose)


@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_a_model_without_a_vocabulary_sends_nothing_that_could_be_counted(sharding: str) -> None:
    run = make_run(data=2, sharding=sharding)
    unknown = replace(run, model=replace(run.model, vocab_size=0))
    with pytest.raises(ConfigError, match=r"^`model.vocab_size` must be at least 1"):
        step_traffic(unknown, loss_chunk_tokens=64)
