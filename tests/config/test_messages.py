"""Every message of a section's or a run's own checks, word for word."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from crosscut.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    Layout,
    LayoutError,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    RunConfig,
    TrainingConfig,
    load_run,
)
from tests.refusals import refusal

MODEL = {"num_layers": 2, "hidden_size": 48, "num_heads": 6}
SECTIONS = {
    "model": ModelConfig,
    "layout": Layout,
    "data": DataConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
    "output": OutputConfig,
}
LOWER_BOUNDS = {
    name: bound
    for bound, names in {
        0: (
            "model.num_kv_heads model.head_size model.mlp_size model.rotary_attention_factor model.vocab_size "
            "model.token_types model.num_classes model.logit_softcap model.lora_rank model.lora_alpha "
            "layout.shard_group training.compare_replicas_every checkpoint.in_memory training.initial_batch_size "
            "training.ramp_steps training.micro_batch_size training.seed training.z_loss training.validate_every "
            "training.validation_sequences optimizer.learning_rate optimizer.min_learning_rate "
            "optimizer.embedding_learning_rate optimizer.head_learning_rate optimizer.matrix_learning_rate "
            "optimizer.scalar_learning_rate optimizer.warmup_steps optimizer.decay_steps optimizer.weight_decay "
            "checkpoint.every checkpoint.keep_every output.sample_tokens output.sample_temperature"
        ),
        1: (
            "model.num_layers model.hidden_size model.num_heads model.rotary_factor model.rotary_original_length "
            "model.max_sequence_length layout.tensor layout.data layout.context layout.pipeline "
            "layout.stages_per_rank layout.expert data.mask_words data.num_shards data.train_to_validation "
            "training.steps training.batch_size training.sequence_length training.recompute_every checkpoint.keep"
        ),
        257: "data.vocab_size",
    }.items()
    for name in names.split()
}


def make_section(name: str, value: object, **others: object) -> object:
    """The section that the dotted `name` belongs to, with that field set to `value`."""
    section, field = name.split(".")
    return SECTIONS[section](**{**(MODEL if section == "model" else {}), **others, field: value})


def make_run(*, layout: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**MODEL),
        layout=Layout(**(layout or {})),
        training=TrainingConfig(**{"batch_size": 12, "sequence_length": 64, **training}),
    )


@pytest.mark.parametrize(("name", "bound"), LOWER_BOUNDS.items())
def test_a_field_below_its_bound_is_named_with_the_bound(name: str, bound: int) -> None:
    assert (
        refusal(ConfigError, make_section, name, bound - 1) == f"`{name}` must be at least {bound}, but is {bound - 1}."
    )


@pytest.mark.parametrize(("name", "bound"), LOWER_BOUNDS.items())
def test_a_field_may_be_at_its_bound(name: str, bound: int) -> None:
    others = {
        "model.hidden_size": {"num_heads": 1},
        "data.mask_words": {"objective": "masked"},
        "optimizer.learning_rate": {"min_learning_rate": 0},
    }
    make_section(name, bound, **others.get(name, {}))


def test_every_whole_number_has_a_bound() -> None:
    numbers = {
        f"{section}.{field.name}"
        for section, kind in SECTIONS.items()
        for field in dataclasses.fields(kind)
        if field.type is int
    }
    assert numbers <= set(LOWER_BOUNDS)


@pytest.mark.parametrize("name", ["model.dropout", "optimizer.beta1", "optimizer.beta2", "optimizer.ema_decay"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_fraction_is_below_one(name: str, value: float) -> None:
    assert (
        refusal(ConfigError, make_section, name, value) == f"`{name}` must be at least 0 and below 1, but is {value}."
    )


@pytest.mark.parametrize("name", ["optimizer.epsilon", "optimizer.clip_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_divisor_is_above_zero(name: str, value: float) -> None:
    assert refusal(ConfigError, make_section, name, value) == f"`{name}` must be above 0, but is {value}."


SECTION_MESSAGES = {
    ("training.precision", ""): (
        "`training.precision` must be 'auto', 'float32', 'bfloat16', 'float16', 'float8' or 'float64', but is ''."
    ),
    ("training.recompute", "all"): (
        "`training.recompute` must be 'none', 'selective', 'operators' or 'full', but is 'all'."
    ),
    ("training.recompute_every", 2): (
        "`training.recompute_every` must be 1 if nothing is recomputed, but is 2. Set "
        'training.recompute="full" or remove `training.recompute_every`.'
    ),
    ("training.offload", ("weights",)): "`training.offload` must be 'activations' or 'optimizer', but is 'weights'.",
    ("training.offload", ("optimizer", "optimizer")): (
        "`training.offload` must name each value once, but is ['optimizer', 'optimizer']. Remove the repetition."
    ),
    ("training.offload", ("activations",)): (
        '`training.offload` may contain "activations" only with training.recompute="full", but '
        '`training.recompute` is \'none\'. Set training.recompute="full" or remove "activations".'
    ),
    ("training.compile", "yes"): "`training.compile` must be 'auto', 'on' or 'off', but is 'yes'.",
    ("layout.sharding", "zero1"): "`layout.sharding` must be 'none', 'zero2' or 'zero3', but is 'zero1'.",
    ("layout.shard_group", 2): (
        '`layout.shard_group` must be 0 without sharding, but is 2. Set layout.sharding="zero3" or '
        "remove `layout.shard_group`."
    ),
    ("layout.symmetric_memory", True): (
        "`layout.symmetric_memory` needs sequence parallelism over several tensor ranks, but is set for "
        "tensor 1 x data 1. Set layout.sequence_parallel=true and layout.tensor above 1, or remove "
        "`layout.symmetric_memory`."
    ),
    ("data.objective", "mlm"): "`data.objective` must be 'causal' or 'masked', but is 'mlm'.",
    ("data.mask_words", 11): "`data.mask_words` must be at most 10, but is 11. Try 3.",
    ("data.mask_fraction", 0.6): "`data.mask_fraction` must be above 0 and at most 0.5, but is 0.6. BERT uses 0.15.",
    ("data.mask_fraction", 0.3): (
        '`data.mask_fraction` must be 0.15 with `data.objective` = "causal", but is 0.3. Remove '
        '`data.mask_fraction`, or set data.objective="masked".'
    ),
    ("data.pairs", False): (
        '`data.pairs` must be true with `data.objective` = "causal", but is false. Remove `data.pairs`, or '
        'set data.objective="masked".'
    ),
    ("training.device", "gpu"): "`training.device` must be 'auto', 'cpu' or 'cuda', but is 'gpu'.",
    ("checkpoint.on_failure", "retry"): "`checkpoint.on_failure` must be 'stop' or 'continue', but is 'retry'.",
    ("checkpoint.keep_every", 2500): (
        "`checkpoint.keep_every` must be a multiple of `checkpoint.every` (1000), but is 2500. Try 2000."
    ),
    ("output.folder", ""): "`output.folder` must name a folder, but is empty.",
    ("optimizer.min_learning_rate", 1.0): (
        "`optimizer.min_learning_rate` must be at most `optimizer.learning_rate` (0.00015), but is 1.0."
    ),
    ("optimizer.schedule", "wsd"): (
        '`optimizer.decay_steps` must be at least 1 with optimizer.schedule="wsd", but is 0. Set the number of '
        'steps of the decay, or set optimizer.schedule="constant" to decide on the decay later.'
    ),
    ("optimizer.matrices", "muon"): (
        '`optimizer.matrix_learning_rate` must be above 0 with optimizer.matrices="muon", but is 0. Muon needs '
        "a higher rate than AdamW. Try 0.02."
    ),
    ("optimizer.matrices", "sgd"): "`optimizer.matrices` must be 'adamw' or 'muon', but is 'sgd'.",
    ("optimizer.decay_steps", 9): (
        '`optimizer.decay_steps` must be 0 with optimizer.schedule="cosine", but is 9. Set '
        'optimizer.schedule="wsd", or remove `optimizer.decay_steps`.'
    ),
    ("optimizer.schedule", "step"): (
        "`optimizer.schedule` must be 'cosine', 'linear', 'wsd' or 'constant', but is 'step'."
    ),
    ("model.num_heads", 5): (
        "`model.num_heads` must divide `model.hidden_size` (48), but is 5. Try 1, 2, 3, 4, 6 or 8."
    ),
    ("model.num_kv_heads", 4): "`model.num_kv_heads` must divide `model.num_heads` (6), but is 4. Try 1, 2, 3 or 6.",
    ("model.norm_epsilon", 0.0): "`model.norm_epsilon` must be above 0 and finite, but is 0.0.",
    ("model.mlp", "relu"): "`model.mlp` must be 'gelu', 'gelu_exact', 'relu2', 'swiglu' or 'geglu', but is 'relu'.",
}


@pytest.mark.parametrize(("name", "value"), SECTION_MESSAGES)
def test_a_section_says_what_a_field_must_be(name: str, value: object) -> None:
    assert refusal(ConfigError, make_section, name, value) == SECTION_MESSAGES[name, value]


def test_a_rate_of_a_group_needs_a_rate_of_the_others() -> None:
    assert refusal(ConfigError, OptimizerConfig, learning_rate=0, min_learning_rate=0, head_learning_rate=0.1) == (
        "`optimizer.learning_rate` must be above 0 if `optimizer.head_learning_rate` is set, but is 0. Set the rate "
        "that the other parameters use, or remove `optimizer.head_learning_rate`."
    )


def test_a_decay_fits_between_the_warm_up_and_the_end() -> None:
    def make(decay_steps: int) -> RunConfig:
        optimizer = OptimizerConfig(schedule="wsd", warmup_steps=20, decay_steps=decay_steps)
        return RunConfig(model=ModelConfig(**MODEL), training=TrainingConfig(steps=100), optimizer=optimizer)

    make(80)
    assert refusal(ConfigError, make, 81) == (
        "`optimizer.decay_steps` must be at most 80, the number of steps after the warm-up (`training.steps` 100 - "
        "`optimizer.warmup_steps` 20), but is 81. Try 10."
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"initial_batch_size": 4},
            (
                "`training.ramp_steps` must be at least 1 if `training.initial_batch_size` is set, but is 0. Set both "
                "for a batch that grows, or remove `training.initial_batch_size`."
            ),
        ),
        (
            {"ramp_steps": 4},
            (
                "`training.initial_batch_size` must be at least 1 if `training.ramp_steps` is set, but is 0. Set both "
                "for a batch that grows, or remove `training.ramp_steps`."
            ),
        ),
        (
            {"initial_batch_size": 5, "ramp_steps": 4},
            (
                "`training.initial_batch_size` must be below `training.batch_size` (12) and divide it, but is 5. "
                "Try 1, 2, 3, 4 or 6."
            ),
        ),
        (
            {"initial_batch_size": 12, "ramp_steps": 4},
            (
                "`training.initial_batch_size` must be below `training.batch_size` (12) and divide it, but is 12. "
                "Try 1, 2, 3, 4 or 6."
            ),
        ),
        (
            {"initial_batch_size": 4, "ramp_steps": 100, "steps": 100},
            (
                "`training.ramp_steps` must be below `training.steps` (100), but is 100. The batch would never grow to "
                "`training.batch_size`. Try 10."
            ),
        ),
    ],
)
def test_a_batch_that_grows_reaches_its_size(given: dict[str, int], message: str) -> None:
    assert refusal(ConfigError, make_run, **given) == message


@pytest.mark.parametrize(
    ("name", "value", "default"), [("initial_spread", "fan_in", "paper"), ("zero_initial_outputs", True, False)]
)
def test_initial_weights_are_drawn_or_read(name: str, value: object, default: object) -> None:
    assert refusal(ConfigError, make_run, initialize_from="here", **{name: value}) == (
        f"`training.{name}` must be {default!r} with `training.initialize_from`, but is {value!r}. The weights are "
        f"read from that folder. Remove `training.{name}`."
    )


def test_every_layout_divides_the_smallest_batch() -> None:
    make_run(layout={"data": 2}, initial_batch_size=4, ramp_steps=3)
    with pytest.raises(LayoutError) as error:
        make_run(layout={"data": 3}, initial_batch_size=4, ramp_steps=3)
    told = "`training.initial_batch_size` must be a multiple of `layout.data` (3), but is 4. Try 3 or 6."
    assert str(error.value) == told
    assert refusal(
        ConfigError, make_run, layout={"data": 2}, initial_batch_size=4, ramp_steps=3, micro_batch_size=3
    ) == (
        "`training.micro_batch_size` must divide the 2 sequences of a data rank (`training.initial_batch_size` 4 / "
        "`layout.data` 2), but is 3. Try 1 or 2."
    )


MIX = {"folder": "books", "weight": 1.0}
NO_SHARE = (
    "`data.mixture.weight` of `mail` must be above 0 and finite, but is {}. To leave out the folder, remove its "
    "section."
)
NOT_EMPTY = "`data.{}` must be empty with `data.mixture`, but is {}. Set data.{}={}, or remove `data.mixture`."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *(({"mixture": [MIX, {"folder": "mail", "weight": w}]}, NO_SHARE.format(w)) for w in (0.0, -1.0, float("inf"))),
        ({"mixture": [{**MIX, "weight": float("nan")}]}, "`data.mixture.weight` must be a number, but is nan."),
        (
            {"mixture": [{**MIX, "folder": ""}]},
            "`data.mixture.folder` must name a folder of token shards, but is empty.",
        ),
        (
            {"mixture": [MIX, {**MIX, "weight": 2.0}]},
            (
                "`data.mixture` must name each folder once, but names `books` 2 times. Name the folder once, with the "
                "sum of its weights."
            ),
        ),
        ({"mixture": [MIX], "text": ["book.txt"]}, NOT_EMPTY.format("text", "('book.txt',)", "text", "[]")),
        ({"mixture": [MIX], "tokens": "all"}, NOT_EMPTY.format("tokens", "'all'", "tokens", '""')),
    ],
)
def test_a_mixture_says_what_is_wrong_with_its_folders(data: dict[str, Any], message: str) -> None:
    assert refusal(ConfigError, load_run, {"model": MODEL, "data": data}) == message


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"sequence_length": 4},
            (
                "`training.sequence_length` must be at least 5 for pairs of segments ([CLS] A [SEP] B [SEP]), but is "
                "4. Use longer sequences, or set data.pairs=false."
            ),
        ),
        (
            {"document_mask": True},
            (
                "`training.document_mask` must be false for pairs of segments, but is true. A pair comes from one "
                "document. Remove `training.document_mask`, or set data.pairs=false."
            ),
        ),
    ],
)
def test_pairs_of_segments_fit_a_sequence_and_need_no_document_mask(training: dict[str, Any], message: str) -> None:
    assert refusal(ConfigError, replace, make_run(**training), data=DataConfig(objective="masked")) == message
    replace(make_run(**training), data=DataConfig(objective="masked", pairs=False))


def test_dynamic_rotations_know_no_documents() -> None:
    model = ModelConfig(**MODEL, positions="rotary", rotary_scaling="dynamic", rotary_factor=2.0)
    assert refusal(
        ConfigError, RunConfig, model=model, training=TrainingConfig(sequence_length=64, document_mask=True)
    ) == (
        '`training.document_mask` must be false with `model.rotary_scaling` = "dynamic", but is true. The frequencies '
        "depend on the length of a whole sequence, and a document must not depend on the others. Set "
        'model.rotary_scaling="yarn", or remove `training.document_mask`.'
    )


@pytest.mark.parametrize(("name", "value", "plain"), [("document_mask", True, "false"), ("z_loss", 1e-4, "0.0")])
def test_a_task_is_not_trained_with_options_for_tokens(name: str, value: Any, plain: str) -> None:
    run = make_run(**{name: value})
    assert refusal(ConfigError, replace, run, model=run.model.with_head("spans")) == (
        f'`training.{name}` must be {plain} for a model with `model.head` = "spans", but is {str(value).lower()}. '
        f"This setting is for models that predict tokens. Remove `training.{name}`."
    )


def test_a_shard_group_divides_the_data_ranks() -> None:
    assert (
        refusal(LayoutError, make_run, layout={"data": 4, "sharding": "zero3", "shard_group": 3})
        == "`layout.shard_group` must divide `layout.data` (4), but is 3. Try 1, 2 or 4."
    )


@pytest.mark.parametrize(
    ("sizes", "tensor", "message"),
    [
        ({}, 4, "divide `model.num_heads` (6), but is 4. Try 1, 2, 3 or 6."),
        (
            {"num_heads": 12, "num_kv_heads": 4},
            3,
            "divide `model.num_kv_heads` (4) or be a multiple of it, but is 3. Try 1, 2, 4 or 12.",
        ),
        ({"mlp_size": 100}, 3, "divide `model.mlp_size` (100), but is 3. Try 1 or 2."),
    ],
)
def test_tensor_ranks_cut_the_model_evenly(sizes: dict[str, int], tensor: int, message: str) -> None:
    assert (
        refusal(
            LayoutError,
            RunConfig,
            model=ModelConfig(**{**MODEL, **sizes}),
            layout=Layout(tensor=tensor),
            training=TrainingConfig(batch_size=12, sequence_length=64),
        )
        == f"`layout.tensor` must {message}"
    )


def test_tensor_ranks_may_be_more_than_the_heads_of_keys_and_values() -> None:
    for tensor in (1, 2, 4, 8):
        RunConfig(
            model=ModelConfig(num_layers=1, hidden_size=64, num_heads=8, num_kv_heads=2), layout=Layout(tensor=tensor)
        )


@pytest.mark.parametrize(("batch_size", "tries"), [(12, "10 or 15"), (3, "5")])
def test_data_ranks_divide_the_batch(batch_size: int, tries: str) -> None:
    assert refusal(LayoutError, make_run, layout={"data": 5}, batch_size=batch_size) == (
        f"`training.batch_size` must be a multiple of `layout.data` (5), but is {batch_size}. Try {tries}."
    )


@pytest.mark.parametrize("micro_batch_size", [4, 12])
def test_micro_batches_divide_a_data_ranks_sequences(micro_batch_size: int) -> None:
    assert refusal(ConfigError, make_run, layout={"data": 2}, micro_batch_size=micro_batch_size) == (
        "`training.micro_batch_size` must divide the 6 sequences of a data rank (`training.batch_size` 12 / "
        f"`layout.data` 2), but is {micro_batch_size}. Try 1, 2, 3 or 6."
    )


def test_a_sequence_has_learned_positions() -> None:
    assert refusal(ConfigError, make_run, sequence_length=1025) == (
        "`training.sequence_length` must be at most `model.max_sequence_length` (1024), but is 1025. Use shorter "
        "sequences, or raise `model.max_sequence_length`."
    )


@pytest.mark.parametrize(("sequence_length", "tries"), [(64, "63 or 66"), (2, "3")])
def test_sequence_parallelism_splits_the_sequence_evenly(sequence_length: int, tries: str) -> None:
    assert refusal(
        LayoutError, make_run, layout={"tensor": 3, "sequence_parallel": True}, sequence_length=sequence_length
    ) == (
        "`training.sequence_length` must be a multiple of `layout.tensor` (3) under sequence parallelism, but is "
        f"{sequence_length}. Try {tries}."
    )


def test_without_sequence_parallelism_any_sequence_goes() -> None:
    make_run(layout={"tensor": 3}, sequence_length=64)
