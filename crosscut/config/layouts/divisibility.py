"""Conditions that a layout must meet for the model and the training of a run: what is divided over ranks must be
divisible.
"""

from crosscut.config.checks import divisors, listed, multiples_around
from crosscut.config.errors import ConfigError, LayoutError
from crosscut.config.layout import Layout
from crosscut.config.model import ModelConfig
from crosscut.config.parts.kinds import MLPS
from crosscut.config.precision import FLOAT8_MULTIPLE, Precision
from crosscut.config.training import TrainingConfig


def require_batch(layout: Layout, training: TrainingConfig) -> None:
    """Raise `LayoutError` or `ConfigError` if the data ranks cannot share a batch."""
    (name, batch), data, micro = training.smallest_batch, layout.data, training.micro_batch_size
    if batch % data:
        raise LayoutError(
            f"`{name}` must be a multiple of `layout.data` ({data}), but is {batch}. "
            f"Try {listed(multiples_around(batch, data))}."
        )
    if micro and batch // data % micro:
        raise ConfigError(
            f"`training.micro_batch_size` must divide the {batch // data} sequences of a data rank "
            f"(`{name}` {batch} / `layout.data` {data}), but is {micro}. "
            f"Try {listed(divisors(batch // data))}."
        )


def require_stages(model: ModelConfig, layout: Layout, training: TrainingConfig) -> None:
    """Raise `LayoutError` if the layers, or a step's micro-batches, cannot be divided over the pipeline's stages."""
    layers = model.num_layers
    but = (
        f"but `model.num_layers` is {layers} and there are {layout.num_stages} stages (`layout.pipeline` "
        f"{layout.pipeline} x `layout.stages_per_rank` {layout.stages_per_rank})"
    )
    if layout.num_stages > layers:
        name = "layout.pipeline" if layout.stages_per_rank == 1 else "layout.stages_per_rank"
        raise LayoutError(f"`{name}` must leave at least one layer for each stage, {but}. Use fewer stages.")
    if layout.stages and sum(layout.stages) != layers:
        raise LayoutError(
            f"`layout.stages` must add up to `model.num_layers` ({layers}), but {list(layout.stages)} adds up to "
            f"{sum(layout.stages)}. Change `layout.stages`, or remove it."
        )
    if layout.stages_per_rank == 1:
        return
    if not layout.stages and layers % layout.num_stages:
        raise LayoutError(
            f"`layout.stages_per_rank` must split the layers evenly, {but}. Change `layout.stages_per_rank`, or list "
            "the layers of each stage in `layout.stages`."
        )
    (name, batch), sequences = training.smallest_batch, training.sequences_at_once(layout.data)
    at_once = layout.data * sequences
    if batch // at_once % layout.pipeline:
        raise LayoutError(
            f"With `layout.stages_per_rank` {layout.stages_per_rank}, the number of micro-batches per step must be "
            f"a multiple of `layout.pipeline` ({layout.pipeline}), but is {batch // at_once} (`{name}` {batch} / "
            f"`layout.data` {layout.data} / {sequences} sequences per micro-batch). Change "
            "`training.micro_batch_size`, or remove `layout.stages_per_rank`."
        )


def require_sequence(model: ModelConfig, layout: Layout, training: TrainingConfig) -> None:
    """Raise `ConfigError` or `LayoutError` if the model or the ranks cannot take sequences of this length."""
    length, multiple = training.sequence_length, layout.length_divisor
    if length > model.max_sequence_length:
        raise ConfigError(
            f"`training.sequence_length` must be at most `model.max_sequence_length` "
            f"({model.max_sequence_length}), but is {length}. Use shorter sequences, or raise "
            "`model.max_sequence_length`."
        )
    if length % multiple:
        of = f"`layout.tensor` ({multiple}) under sequence parallelism, but is {length}."
        if layout.context > 1:
            by = " x `layout.tensor`" if layout.splits_sequence else ""
            of = f"{multiple} (2 x `layout.context`{by}), but is {length}. Every context rank has an early and a late "
            of += "piece of each sequence."
        tried = listed(multiples_around(length, multiple))
        raise LayoutError(f"`training.sequence_length` must be a multiple of {of} Try {tried}.")


def require_float8(model: ModelConfig, layout: Layout, training: TrainingConfig) -> None:
    """Raise `ConfigError` if a run in float8 has products or messages that float8 does not support."""
    if training.precision == Precision.FLOAT8:
        _require_multiples(model, layout.tensor, FLOAT8_MULTIPLE)
    if training.precision == Precision.FLOAT8 and layout.symmetric_memory:
        raise ConfigError(
            '`training.precision` must not be "float8" with `layout.symmetric_memory`. Symmetric memory supports '
            'only 16-bit types. Set training.precision="bfloat16", or remove `layout.symmetric_memory`.'
        )


def _require_multiples(model: ModelConfig, tensor: int, multiple: int) -> None:
    """Raise `ConfigError` unless the widths of all matrices on one of `tensor` ranks are multiples of `multiple`."""
    widths = {"`model.hidden_size`": model.hidden_size}
    if model.has_keys_of_heads:
        key_value = 2 * max(model.num_kv_heads // tensor, 1) * model.head_size
        widths["`model.num_heads` x `model.head_size` / `layout.tensor`"] = model.query_size // tensor
        widths["The width of keys and values on one rank"] = key_value
    for section in model.sections.values():
        widths |= section.widths(tensor)
    if any(kind in MLPS for kind in model.kinds):
        widths["`model.mlp_size` / `layout.tensor`"] = model.mlp_size // tensor
    widths["`model.lora_rank`"] = model.lora_rank
    for name, width in widths.items():
        if width % multiple:
            raise ConfigError(
                f"{name} must be a multiple of {multiple} for float8 products, but is {width}. Choose other sizes, "
                'or set training.precision="bfloat16".'
            )
