"""Options for speed that exclude each other, as far as the config alone can tell."""

from typing import Any

from crosscut.config import ConfigError, Layout, ModelConfig, RunConfig, TrainingConfig
from tests.refusals import refusal


def make_run(*, dropout: float = 0.0, hidden_size: int = 64, layout: dict[str, Any], **training: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_layers=1, hidden_size=hidden_size, num_heads=4, dropout=dropout),
        layout=Layout(**layout),
        training=TrainingConfig(**training),
    )


def test_dropout_under_tensor_parallelism_is_not_compiled() -> None:
    assert refusal(ConfigError, make_run, dropout=0.1, layout={"tensor": 2}, compile="on") == (
        '`training.compile` must be "auto" or "off" for this run, but is "on": dropout under tensor parallelism '
        "switches between two random streams, and a compiler cannot trace the switches (`model.dropout` is 0.1 and "
        "`layout.tensor` is 2). With layout.sequence_parallel=true, each rank has only one stream. Remove the cause, "
        'or set training.compile="auto".'
    )
    assert make_run(dropout=0.1, layout={"tensor": 2}).reason_against_compiling
    split = {"tensor": 2, "sequence_parallel": True}
    assert not make_run(dropout=0.1, layout=split, compile="on").reason_against_compiling
    assert not make_run(dropout=0.1, layout={"data": 2}, compile="on").reason_against_compiling
    assert not make_run(layout={"tensor": 2}, compile="on").reason_against_compiling


def test_float8_products_do_not_run_in_pieces() -> None:
    layout = {"tensor": 2, "sequence_parallel": True, "symmetric_memory": True}
    make_run(layout=layout, precision="bfloat16")
    assert refusal(ConfigError, make_run, layout=layout, precision="float8") == (
        '`training.precision` must not be "float8" with `layout.symmetric_memory`. Symmetric memory supports only '
        '16-bit types. Set training.precision="bfloat16", or remove `layout.symmetric_memory`.'
    )


def test_float8_products_have_rows_of_sixteen() -> None:
    make_run(layout={"tensor": 4}, precision="float8")
    assert refusal(ConfigError, make_run, hidden_size=96, layout={"tensor": 4}, precision="float8") == (
        "`model.num_heads` x `model.head_size` / `layout.tensor` must be a multiple of 16 for float8 products, but is "
        '24. Choose other sizes, or set training.precision="bfloat16".'
    )
