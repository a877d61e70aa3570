"""Every message of a section's or a run's own checks, word for word."""

import dataclasses

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
        0: "model.num_kv_heads model.head_size model.mlp_size model.rotary_attention_factor model.vocab_size "
        "model.token_types model.num_classes model.logit_softcap model.lora_rank model.lora_alpha layout.shard_group "
        "training.compare_replicas_every checkpoint.in_memory training.initial_batch_size training.ramp_steps "
        "training.micro_batch_size training.seed training.z_loss training.validate_every training.validation_sequences "
        "optimizer.learning_rate optimizer.min_learning_rate optimizer.embedding_learning_rate "
        "optimizer.head_learning_rate optimizer.matrix_learning_rate optimizer.scalar_learning_rate "
        "optimizer.warmup_steps optimizer.decay_steps optimizer.weight_decay optimizer.gradient_rank checkpoint.every "
        "checkpoint.keep_every "
        "output.sample_tokens output.sample_temperature output.sample_every training.idle_expert_steps",
        1: "model.vocab_multiple "
        "model.num_layers model.hidden_size model.num_heads model.rotary_factor model.rotary_original_length "
        "model.max_sequence_length layout.tensor layout.data layout.context layout.pipeline layout.stages_per_rank "
        "layout.expert data.mask_words data.num_shards data.train_to_validation training.steps training.batch_size "
        "training.sequence_length training.recompute_every checkpoint.keep output.sample_repetition_penalty",
        257: "data.vocab_size",
    }.items()
    for name in names.split()
}


def make_section(name: str, value: object, **others: object) -> object:
    """The section that the dotted `name` belongs to, with that field set to `value`."""
    section, field = name.split(".")
    return SECTIONS[section](**{**(MODEL if section == "model" else {}), **others, field: value})


@pytest.mark.parametrize(("name", "bound"), LOWER_BOUNDS.items())
def test_a_field_below_its_bound_is_named_with_the_bound(name: str, bound: int) -> None:
    told = f"`{name}` must be at least {bound}, but is {bound - 1}."
    assert refusal(ConfigError, make_section, name, bound - 1) == told


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


MESSAGES = {
    "training.precision=": "`training.precision` must be 'auto', 'float32', 'bfloat16', 'float16', 'float8' or "
    "'float64', but is ''.",
    "training.recompute=all": "`training.recompute` must be 'none', 'selective', 'operators' or 'full', but is 'all'.",
    "training.recompute_every=2": "`training.recompute_every` must be 1 if nothing is recomputed, but is 2. Set "
    'training.recompute="full" or remove `training.recompute_every`.',
    "training.offload=weights": "`training.offload` must be 'activations' or 'optimizer', but is 'weights'.",
    "training.offload=optimizer,optimizer": "`training.offload` must name each value once, but is ['optimizer', "
    "'optimizer']. Remove the repetition.",
    "training.offload=activations": '`training.offload` may contain "activations" only with training.recompute="full", '
    'but `training.recompute` is \'none\'. Set training.recompute="full" or remove "activations".',
    "training.compile=yes": "`training.compile` must be 'auto', 'on' or 'off', but is 'yes'.",
    "layout.sharding=zero1": "`layout.sharding` must be 'none', 'zero2' or 'zero3', but is 'zero1'.",
    "data.objective=mlm": "`data.objective` must be 'causal' or 'masked', but is 'mlm'.",
    "data.mask_words=11 data.objective=masked": "`data.mask_words` must be at most 10, but is 11. Try 3.",
    "data.mask_fraction=0.6 data.objective=masked": "`data.mask_fraction` must be above 0 and at most 0.5, but is 0.6. "
    "BERT uses 0.15.",
    "data.mask_fraction=0.3": '`data.mask_fraction` must be 0.15 with `data.objective` = "causal", but is 0.3. Remove '
    '`data.mask_fraction`, or set data.objective="masked".',
    "data.pairs=false": '`data.pairs` must be true with `data.objective` = "causal", but is false. Remove '
    '`data.pairs`, or set data.objective="masked".',
    "training.device=gpu": "`training.device` must be 'auto', 'cpu' or 'cuda', but is 'gpu'.",
    "checkpoint.on_failure=retry": "`checkpoint.on_failure` must be 'stop' or 'continue', but is 'retry'.",
    "checkpoint.keep_every=2500": "`checkpoint.keep_every` must be a multiple of `checkpoint.every` (1000), but is "
    "2500. Try 2000.",
    "output.folder=": "`output.folder` must name a folder, but is empty.",
    "optimizer.min_learning_rate=1.0": "`optimizer.min_learning_rate` must be at most `optimizer.learning_rate` "
    "(0.00015), but is 1.0.",
    "optimizer.schedule=wsd": '`optimizer.decay_steps` must be at least 1 with optimizer.schedule="wsd", but is 0. Set '
    'the number of steps of the decay, or set optimizer.schedule="constant" to decide on the decay later.',
    "optimizer.matrices=muon": '`optimizer.matrix_learning_rate` must be above 0 with optimizer.matrices="muon", but '
    "is 0. Muon needs a higher rate than AdamW. Try 0.02.",
    "optimizer.matrices=sgd": "`optimizer.matrices` must be 'adamw' or 'muon', but is 'sgd'.",
    "optimizer.decay_steps=9": '`optimizer.decay_steps` must be 0 with optimizer.schedule="cosine", but is 9. Set '
    'optimizer.schedule="wsd", or remove `optimizer.decay_steps`.',
    "optimizer.schedule=step": "`optimizer.schedule` must be 'cosine', 'linear', 'wsd' or 'constant', but is 'step'.",
    "model.num_heads=5": "`model.num_heads` must divide `model.hidden_size` (48), but is 5. Try 1, 2, 3, 4, 6 or 8, or "
    "a hidden size of 40 or 50.",
    "model.num_heads=32": "`model.num_heads` must divide `model.hidden_size` (48), but is 32. Try 1, 2, 3, 4, 6, 8, "
    "12, 16, 24 or 48, or a hidden size of 64.",
    "model.num_kv_heads=4": "`model.num_kv_heads` must divide `model.num_heads` (6), but is 4. Try 1, 2, 3 or 6.",
    "model.norm_epsilon=0.0": "`model.norm_epsilon` must be above 0 and finite, but is 0.0.",
    "model.layers=relu": "`model.layers` must list layers of 1 to 8 parts each (attention, sliding_attention, "
    "nope_attention, sparse_attention, latent_attention, mamba, mamba2, gated_delta, gelu, gelu_exact, relu2, swiglu, "
    "geglu or experts), but has the layer 'relu'. Write for example layers = [\"attention swiglu\"].",
    "model.mlp=swiglu": '`model.mlp` must be a key of `model`, but there is no such key. Write layers = ["attention '
    'swiglu"] in its place.',
    "optimizer.learning_rate=0 optimizer.min_learning_rate=0 optimizer.head_learning_rate=0.1 model.tied=false": (
        "`optimizer.learning_rate` must be above 0 if `optimizer.head_learning_rate` is set, but is 0.0. Set the rate "
        "that the other parameters use, or remove `optimizer.head_learning_rate`."
    ),
    "training.steps=100 optimizer.schedule=wsd optimizer.warmup_steps=20 optimizer.decay_steps=81": (
        "`optimizer.decay_steps` must be at most 80, the number of steps after the warm-up (`training.steps` 100 - "
        "`optimizer.warmup_steps` 20), but is 81. Try 10."
    ),
    "training.initial_batch_size=4": "`training.ramp_steps` must be at least 1 if `training.initial_batch_size` is "
    "set, but is 0. Set both for a batch that grows, or remove `training.initial_batch_size`.",
    "training.ramp_steps=4": "`training.initial_batch_size` must be at least 1 if `training.ramp_steps` is set, but is "
    "0. Set both for a batch that grows, or remove `training.ramp_steps`.",
    "training.initial_batch_size=5 training.ramp_steps=4": "`training.initial_batch_size` must be below "
    "`training.batch_size` (12) and divide it, but is 5. Try 1, 2, 3, 4 or 6.",
    "training.initial_batch_size=12 training.ramp_steps=4": "`training.initial_batch_size` must be below "
    "`training.batch_size` (12) and divide it, but is 12. Try 1, 2, 3, 4 or 6.",
    "training.initial_batch_size=4 training.ramp_steps=100 training.steps=100 optimizer.warmup_steps=0": (
        "`training.ramp_steps` must be below `training.steps` (100), but is 100. The batch would never grow to "
        "`training.batch_size`. Try 10."
    ),
    "training.initialize_from=here training.initial_spread=fan_in": "`training.initial_spread` must be 'paper' with "
    "`training.initialize_from`, but is 'fan_in'. The weights are read from that folder. Remove "
    "`training.initial_spread`.",
    "training.initialize_from=here training.zero_initial_outputs=true": "`training.zero_initial_outputs` must be False "
    "with `training.initialize_from`, but is True. The weights are read from that folder. Remove "
    "`training.zero_initial_outputs`.",
    "layout.data=2 training.initial_batch_size=4 training.ramp_steps=3 training.micro_batch_size=3": (
        "`training.micro_batch_size` must divide the 2 sequences of a data rank (`training.initial_batch_size` 4 / "
        "`layout.data` 2), but is 3. Try 1 or 2."
    ),
    "data.mixture=[{folder='books',weight=1},{folder='mail',weight=0}]": "`data.mixture.weight` of `mail` must be "
    "above 0 and finite, but is 0.0. To leave out the folder, remove its section.",
    "data.mixture=[{folder='books',weight=1},{folder='mail',weight=-1}]": "`data.mixture.weight` of `mail` must be "
    "above 0 and finite, but is -1.0. To leave out the folder, remove its section.",
    "data.mixture=[{folder='books',weight=1},{folder='mail',weight=inf}]": "`data.mixture.weight` of `mail` must be "
    "above 0 and finite, but is inf. To leave out the folder, remove its section.",
    "data.mixture=[{folder='books',weight=nan}]": "`data.mixture.weight` must be a number, but is nan.",
    "data.mixture=[{folder='',weight=1}]": "`data.mixture.folder` must name a folder of token shards, but is empty.",
    "data.mixture=[{folder='books',weight=1},{folder='books',weight=2}]": "`data.mixture` must name each folder once, "
    "but names `books` 2 times. Name the folder once, with the sum of its weights.",
    "data.mixture=[{folder='books',weight=1}] data.text=book.txt": "`data.text` must be empty with `data.mixture`, but "
    "is ['book.txt']. Set data.text=[], or remove `data.mixture`.",
    "data.mixture=[{folder='books',weight=1}] data.tokens=all": "`data.tokens` must be empty with `data.mixture`, but "
    "is 'all'. Set data.tokens=\"\", or remove `data.mixture`.",
    "data.objective=masked training.sequence_length=4": "`training.sequence_length` must be at least 5 for pairs of "
    "segments ([CLS] A [SEP] B [SEP]), but is 4. Use longer sequences, or set data.pairs=false.",
    "data.objective=masked training.document_mask=true": "`training.document_mask` must be false for pairs of "
    "segments, but is true. A pair comes from one document. Remove `training.document_mask`, or set data.pairs=false.",
    "model.positions=rotary model.rotary_scaling=dynamic model.rotary_factor=2.0 training.document_mask=true": (
        '`training.document_mask` must be false with `model.rotary_scaling` = "dynamic", but is true. The frequencies '
        "depend on the length of a whole sequence, and a document must not depend on the others. Set "
        'model.rotary_scaling="yarn", or remove `training.document_mask`.'
    ),
    "model.layers=sparse_attention training.document_mask=true": "`training.document_mask` must be false with "
    "`sparse_attention` in `model.layers`, but is true. Blocks are counted from the start of the sequence, and a "
    "document must not depend on the documents before it. Choose other layers, or remove `training.document_mask`.",
    "model.sparse_attention.block_size=0": "`model.sparse_attention.block_size` must be at least 1, but is 0.",
    "model.head=spans training.document_mask=true": "`training.document_mask` must be false for a model with "
    '`model.head` = "spans", but is true. This setting is for models that predict tokens. Remove '
    "`training.document_mask`.",
    "model.head=spans training.z_loss=1e-4": '`training.z_loss` must be 0.0 for a model with `model.head` = "spans", '
    "but is 0.0001. This setting is for models that predict tokens. Remove `training.z_loss`.",
    "layout.data=2 training.micro_batch_size=4": "`training.micro_batch_size` must divide the 6 sequences of a data "
    "rank (`training.batch_size` 12 / `layout.data` 2), but is 4. Try 1, 2, 3 or 6.",
    "layout.data=2 training.micro_batch_size=12": "`training.micro_batch_size` must divide the 6 sequences of a data "
    "rank (`training.batch_size` 12 / `layout.data` 2), but is 12. Try 1, 2, 3 or 6.",
    "training.sequence_length=1025": "`training.sequence_length` must be at most `model.max_sequence_length` (1024), "
    "but is 1025. Use shorter sequences, or raise `model.max_sequence_length`.",
    "model.norm_place=between": "`model.norm_place` must be 'before', 'after' or 'output', but is 'between'.",
    "model.attention=between": "`model.attention` must be 'causal' or 'bidirectional', but is 'between'.",
    "model.token_types=-1": "`model.token_types` must be at least 0, but is -1.",
    "model.head=masked_tokens": '`model.attention` must be "bidirectional" for a model that predicts masked tokens, '
    'but is "causal". Set model.attention="bidirectional", or model.head="next_token".',
    "model.head=masked_tokens model.attention=bidirectional model.lora_rank=4": "`model.lora_rank` must be 0 for a "
    "model that predicts masked tokens, but is 4. Adapters are for models that predict the next token. Remove "
    "`model.lora_rank`.",
    "model.sentence_order=true": "`model.sentence_order` must be false for a model that predicts the next token, but "
    'is true. Set model.head="masked_tokens", or remove `model.sentence_order`.',
    "model.head=choice model.tied=false": '`model.tied` must be true for a model with `model.head` = "choice", but is '
    "false. This model has no output projection. Set model.tied=true.",
    "model.head=spans model.logit_softcap=15.0": "`model.logit_softcap` must be 0.0 for a model with `model.head` = "
    '"spans", but is 15.0. This model has no output projection. Set model.logit_softcap=0.0.',
    "model.head=spans model.lora_rank=4": '`model.lora_rank` must be 0 for a model with `model.head` = "spans", but is '
    "4. Adapters are for models that predict the next token. Remove `model.lora_rank`.",
    "model.head=spans model.sentence_order=true": "`model.sentence_order` must be false for a model with `model.head` "
    '= "spans", but is true. Set model.head="masked_tokens", or remove `model.sentence_order`.',
    "model.head=classes model.num_classes=1": "`model.num_classes` must be at least 2 for a model with `model.head` = "
    '"classes", but is 1. Set `model.num_classes` to the number of labels.',
    "model.head=spans model.num_classes=2": '`model.num_classes` must be 0 for a model with `model.head` = "spans", '
    'but is 2. Remove `model.num_classes`, or set model.head="classes".',
    "model.head=class": "`model.head` must be 'next_token', 'masked_tokens', 'classes', 'number', 'spans' or 'choice', "
    "but is 'class'.",
    "model.hidden_size=9 model.num_heads=3 model.positions=rotary": "`model.head_size` must be even, but is 3. Rotary "
    "positions rotate pairs of elements. Choose an even head size.",
    "model.rotary_factor=4.0": '`model.rotary_factor` must be 1 with `model.positions` = "learned", but is 4.0. Remove '
    '`model.rotary_factor`, or set model.positions="rotary".',
    "model.positions=rotary model.rotary_scaling=yarn": "`model.rotary_factor` must be above 1 with "
    '`model.rotary_scaling` = "yarn", but is 1. Set `model.rotary_factor` to the longest sequence divided by '
    "`model.rotary_original_length`, or remove `model.rotary_scaling`.",
    "model.positions=rotary model.rotary_scaling=linear model.rotary_factor=4.0 model.rotary_attention_factor=1.5": (
        '`model.rotary_attention_factor` must be 0 with `model.rotary_scaling` = "linear", but is 1.5. Only YaRN uses '
        "this factor. Remove `model.rotary_attention_factor`."
    ),
    "model.positions=rotary model.rotary_scaling=dynamic model.rotary_factor=4.0 model.head_size=2": (
        '`model.head_size` must be above 2 with `model.rotary_scaling` = "dynamic", but is 2. The scaled base has the '
        'exponent `model.head_size` / (`model.head_size` - 2). Set model.rotary_scaling="linear".'
    ),
    "model.positions=rotary model.rotary_scaling=yarn model.rotary_factor=4.0 model.rotary_base=1.0": (
        '`model.rotary_base` must be above 1 with `model.rotary_scaling` = "yarn", but is 1.0. Set '
        "model.rotary_base=10000, or the base of the published model."
    ),
    "model.mlp_pattern=gelu,relu2": "`model.mlp_pattern` must be a key of `model`, but there is no such key. Write "
    'layers = ["attention gelu", "attention relu2"] in its place.',
    "model.norm_affine=false model.biases=none optimizer.scalar_learning_rate=0.1": "`optimizer.scalar_learning_rate` "
    "must be 0 for a model whose matrices have no biases and whose norms have no parameters, but is 0.1. Remove "
    "`optimizer.scalar_learning_rate`, or set model.norm_affine=true.",
    "layout.context=2 layout.context_attention=ring": '`model.dropout` must be 0 with layout.context_attention="ring", '
    "but is 0.1. The ring merges the results of several kernels, and these kernels cannot drop scores. Set "
    'layout.context_attention="auto", or model.dropout=0.',
}
LAYOUT_MESSAGES = {
    "model.layers=sparse_attention layout.context=2 layout.context_attention=gather": (
        '`layout.context_attention` must be "all_to_all" for a model with `sparse_attention` in `model.layers`, but is '
        '"gather": blocks are counted from the start of the sequence. Set layout.context_attention="auto".'
    ),
    "model.layers=sparse_attention layout.context=4": "For all-to-all attention, `layout.context` must divide the 6 "
    "heads of a tensor rank (`model.num_heads` 6 / `layout.tensor` 1), but is 4. Try 1, 2, 3 or 6, or choose other "
    "layers.",
    "layout.shard_group=2": '`layout.shard_group` must be 0 without sharding, but is 2. Set layout.sharding="zero3" or '
    "remove `layout.shard_group`.",
    "layout.symmetric_memory=true": "`layout.symmetric_memory` needs sequence parallelism over several tensor ranks, "
    "but is set for tensor 1 x data 1. Set layout.sequence_parallel=true and layout.tensor above 1, or remove "
    "`layout.symmetric_memory`.",
    "layout.data=3 training.initial_batch_size=4 training.ramp_steps=3": "`training.initial_batch_size` must be a "
    "multiple of `layout.data` (3), but is 4. Try 3 or 6.",
    "layout.data=4 layout.sharding=zero3 layout.shard_group=3": "`layout.shard_group` must divide `layout.data` (4), "
    "but is 3. Try 1, 2 or 4.",
    "layout.tensor=4": "`layout.tensor` must divide `model.num_heads` (6), but is 4. Try 1, 2, 3 or 6.",
    "layout.tensor=3 model.num_heads=12 model.num_kv_heads=4": "`layout.tensor` must divide `model.num_kv_heads` (4) "
    "or be a multiple of it, but is 3. Try 1, 2, 4 or 12.",
    "layout.tensor=3 model.mlp_size=100": "`layout.tensor` must divide `model.mlp_size` (100), but is 3. Try 1 or 2.",
    "layout.data=5": "`training.batch_size` must be a multiple of `layout.data` (5), but is 12. Try 10 or 15.",
    "layout.data=5 training.batch_size=3": "`training.batch_size` must be a multiple of `layout.data` (5), but is 3. "
    "Try 5.",
    "layout.tensor=3 layout.sequence_parallel=true": "`training.sequence_length` must be a multiple of `layout.tensor` "
    "(3) under sequence parallelism, but is 64. Try 63 or 66.",
    "layout.tensor=3 layout.sequence_parallel=true training.sequence_length=2": "`training.sequence_length` must be a "
    "multiple of `layout.tensor` (3) under sequence parallelism, but is 2. Try 3.",
    "layout.context=4 training.sequence_length=60": "`training.sequence_length` must be a multiple of 8 (2 x "
    "`layout.context`), but is 60. Every context rank has an early and a late piece of each sequence. Try 56 or 64.",
    "layout.context=4 layout.tensor=2 layout.sequence_parallel=true training.sequence_length=56": (
        "`training.sequence_length` must be a multiple of 16 (2 x `layout.context` x `layout.tensor`), but is 56. "
        "Every context rank has an early and a late piece of each sequence. Try 48 or 64."
    ),
    "layout.context=8 layout.tensor=3 layout.context_attention=all_to_all model.num_heads=12": (
        "For all-to-all attention, `layout.context` must divide the 4 heads of a tensor rank (`model.num_heads` 12 / "
        '`layout.tensor` 3), but is 8. Try 1, 2 or 4, or set layout.context_attention="auto".'
    ),
    "layout.context=2 model.head=masked_tokens model.attention=bidirectional data.objective=masked": (
        '`layout.context` must be 1 for a model with `model.head` = "masked_tokens", but is 2. Context parallelism is '
        "only for models that predict the next token. Remove `layout.context`."
    ),
    "layout.context=2 layout.data=4 layout.sharding=zero3 layout.shard_group=2": "`layout.shard_group` must be 0 with "
    "`layout.context` above 1, but is 2. The context ranks and all data ranks together hold one copy of the state. "
    "Remove `layout.shard_group`.",
}
RUN = {"recipe": "paper", "model": MODEL, "training": {"batch_size": 12, "sequence_length": 64}}


@pytest.mark.parametrize("settings", MESSAGES)
def test_settings_that_cannot_be_say_why(settings: str) -> None:
    assert refusal(ConfigError, load_run, RUN, settings.split(" ")) == MESSAGES[settings]


@pytest.mark.parametrize("settings", LAYOUT_MESSAGES)
def test_a_layout_that_cannot_be_says_why(settings: str) -> None:
    assert refusal(LayoutError, load_run, RUN, settings.split(" ")) == LAYOUT_MESSAGES[settings]


@pytest.mark.parametrize(
    "settings",
    [
        "training.steps=100 optimizer.schedule=wsd optimizer.warmup_steps=20 optimizer.decay_steps=80",
        "layout.data=2 training.initial_batch_size=4 training.ramp_steps=3",
        "data.objective=masked data.pairs=false training.sequence_length=4",
        "data.objective=masked data.pairs=false training.document_mask=true",
        "layout.tensor=3",
        *(f"layout.tensor={n} model.num_heads=8 model.num_kv_heads=2 model.hidden_size=64" for n in (1, 2, 4, 8)),
        "optimizer.scalar_learning_rate=0.1 model.norm_affine=false",
        "optimizer.scalar_learning_rate=0.1 model.biases=none",
        "layout.context_attention=ring training.sequence_length=61 model.dropout=0.1",
    ],
)
def test_settings_just_inside_the_bounds_are_accepted(settings: str) -> None:
    load_run(RUN, settings.split(" "))
