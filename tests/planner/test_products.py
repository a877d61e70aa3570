from dataclasses import replace

import pytest

from crosscut.architecture import Product, describe
from crosscut.architecture.messages import products_at
from crosscut.config import PRESETS, Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.planner import forward_flops_per_token
from crosscut.planner.candidate import target_of
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware, MeasuredProduct
from crosscut.planner.products import Speed, filled

H100 = KNOWN_HARDWARE["h100-sxm"]


def run_of(preset: str = "megatron-8.3b", *, tensor: int = 1, micro: int = 2) -> RunConfig:
    training = TrainingConfig(batch_size=8, micro_batch_size=micro, precision="bfloat16")
    return RunConfig(model=ModelConfig(**PRESETS[preset]), layout=Layout(tensor=tensor), training=training)


@pytest.mark.parametrize("preset", ["megatron-8.3b", "llama3-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_the_products_are_those_whose_flops_are_counted(preset: str, tensor: int) -> None:
    run = run_of(preset, tensor=tensor)
    model, length = run.model, run.training.sequence_length
    decoder, target = describe(model), target_of(run, device="cpu")
    in_layer = sum(product.flops for found in products_at(decoder.layers[0], target).values() for product in found)
    core = 2 * 2 * run.micro_batch_size * length**2 * model.query_size // tensor
    logits = decoder.loss.product(target)
    without_padding = logits.flops * model.vocab_size // (logits.n * tensor)
    counted = run.micro_batch_size * length * forward_flops_per_token(model, length) / tensor
    assert model.num_layers * (in_layer + core) + without_padding == pytest.approx(counted, rel=1e-6)


def test_the_backward_products_are_as_large() -> None:
    product = Product(512, 3072, 1152)
    assert product.of_input == Product(512, 1152, 3072)
    assert product.of_weight == Product(3072, 512, 1152)
    assert product.of_input.flops == product.of_weight.flops == product.flops == 2 * 512 * 3072 * 1152


def test_a_large_product_takes_what_the_device_attains() -> None:
    product = Product(128 * 132, 8192, 8192)  # 64 full turns of tiles
    seconds = Speed(H100, "bfloat16").product(product)
    assert seconds == pytest.approx(product.flops / (989e12 * H100.products_attained) + H100.start)


def test_a_thin_product_waits_for_memory() -> None:
    product = Product(8192, 8, 8192)
    moved = 2 * (8192 * 8 + 8 * 8192 + 8192**2)
    assert Speed(H100, "bfloat16").product(product) == pytest.approx(moved / (3350e9 * 0.85) + H100.start)


@pytest.mark.parametrize(
    ("product", "share"),
    [
        (Product(128, 64, 128 * 132), 1.0),
        (Product(128, 64, 128 * 66), 0.5),
        (Product(128, 64, 128 * 133), 133 / 264),
        (Product(64, 64, 128 * 132), 0.5),
        (Product(128, 1024, 128 * 66), 1.0),  # cut in two along k
        (Product(128, 64, 128, batch=132), 1.0),
        (Product(32 * 132, 64, 128, groups=132), 0.25),
        (Product(32 * 132, 64, 128, groups=132).of_weight, 0.5),
    ],
)
def test_tiles_fill_the_device_or_do_not(product: Product, share: float) -> None:
    assert filled(product, 132) == pytest.approx(share)
    assert filled(product, 0) == 1.0


def test_each_group_of_rows_reads_a_matrix_of_its_own() -> None:
    product = Product(8 * 64, 4096, 512, groups=64)
    moved = 2 * (8 * 64 * (4096 + 512) + 64 * 4096 * 512)
    assert Speed(H100, "bfloat16").product(product) == pytest.approx(moved / (3350e9 * 0.85) + H100.start)
    assert Speed(H100, "bfloat16").product(product.of_weight) == pytest.approx(moved / (3350e9 * 0.85) + H100.start)


def measured(*points: MeasuredProduct) -> Hardware:
    return replace(H100, measured={"bfloat16": points}, start=0.0)


def test_a_measured_shape_takes_what_was_measured() -> None:
    fast, slow = MeasuredProduct(8192, 4096, 4096, 600e12), MeasuredProduct(8192, 1024, 1024, 200e12)
    speed = Speed(measured(fast, slow), "bfloat16")
    for point in (fast, slow):
        product = Product(*point[:3])
        assert speed.product(product) == pytest.approx(product.flops / point.flops_per_second, rel=1e-3)
    between = Product(8192, 2048, 2048)
    assert 200e12 < between.flops / speed.product(between) < 600e12


def test_ranks_on_a_processor_share_it() -> None:
    laptop = replace(KNOWN_HARDWARE["laptop"], start=0.0)
    one, four = Speed(laptop, "float32"), Speed(laptop, "float32", ranks=4)
    product = Product(1024, 1024, 1024)
    assert four.product(product) == pytest.approx(4 * one.product(product))
    assert four.passes(1e9) == pytest.approx(4 * one.passes(1e9))


def test_float8_makes_the_layers_products_faster_and_no_others() -> None:
    narrow, wide = Speed(H100, "float8"), Speed(H100, "bfloat16")
    product = Product(128 * 132, 8192, 8192)
    assert narrow.product(product) < 0.6 * wide.product(product)
    assert narrow.product(product, in_layer=False) == wide.product(product)


def test_larger_tiles_cover_a_result_less_evenly() -> None:
    product = Product(256, 512, 384)
    assert filled(product, 6) == 1.0  # 2 x 3 tiles of 128 x 128
    assert filled(product, 6, (256, 128)) == 0.5  # 1 x 3 tiles
