"""A whole run: model, layout, data, training, optimizer and output, checked together.

What a single section can know it checks itself; what takes two sections, such as heads and tensor ranks, is checked
by `RunConfig`.
"""

from dataclasses import dataclass, field

from crosscut.config.checks import (
    divisors,
    listed,
    require_at_least,
    require_fraction,
    require_one_of,
)
from crosscut.config.conventions import CHECKPOINTS_FOLDER
from crosscut.config.errors import ConfigError, LayoutError
from crosscut.config.layout import Layout
from crosscut.config.model import ModelConfig
from crosscut.config.precision import FLOAT8_MULTIPLE, PRECISIONS

RECOMPUTATIONS = ("none", "selective", "operators", "full")
"""The values of `training.recompute`."""

OFFLOADS = ("activations", "optimizer")
"""What `training.offload` may hold."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text or the tokens come from (paper, section 4.1.3)."""

    text: tuple[str, ...] = ()
    """Raw text to train on: files, folders or globs of .txt, .jsonl or .parquet, also .gz and .zst;
    `builtin:state-of-the-union` is the corpus that comes with Crosscut. Empty when `tokens` holds shards already."""

    tokens: str = ""
    """Folder of token shards; made from `text` when it is not there. Empty means `tokens` in the run's folder."""

    tokenizer: str = ""
    """A `tokenizer.json` file. Empty trains a byte-level BPE tokenizer on `text`."""

    vocab_size: int = 8192
    """Entries of the tokenizer that is trained when `tokenizer` is empty."""

    text_key: str = "text"
    """The key or column that holds the text in jsonl and parquet files."""

    num_shards: int = 5
    """Training shards; their order is shuffled every epoch. The paper uses 5."""

    train_to_validation: int = 29
    """Training documents for each validation document. The paper splits 29:1."""

    verify: bool = True
    """Compare every shard's hash with the manifest before the run starts."""

    def __post_init__(self) -> None:
        require_at_least("data.vocab_size", self.vocab_size, 257)
        require_at_least("data.num_shards", self.num_shards, 1)
        require_at_least("data.train_to_validation", self.train_to_validation, 1)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What the loop does (paper, section 4.1.1)."""

    steps: int = 300_000
    """Optimizer steps."""

    batch_size: int = 512
    """Sequences per step, over all data ranks."""

    micro_batch_size: int = 0
    """Sequences per forward pass of one data rank; the rest of the batch is accumulated. 0 takes all at once."""

    sequence_length: int = 1024
    """Tokens per sequence."""

    seed: int = 1234
    """Initial weights, order of the data and dropout follow from it, whatever the layout."""

    precision: str = "float32"
    """Of activations and matrix products: `float32`, `bfloat16`, `float16` (with a loss scale that follows overflows),
    `float8` (matrix products of the layers, on GPUs that have it; the rest in bfloat16) or `float64`. Weights, their
    gradients' sums and the optimizer stay float32 (float64 with `float64`)."""

    recompute: str = "none"
    """Activations that the backward pass computes again instead of keeping: `none`; `selective`, the attention core
    (Korthikanti et al. 2022); `operators`, whatever is cheap: all but matrix products, attention and what was sent;
    `full`, whole layers, of which only the input is kept (the paper's)."""

    recompute_every: int = 1
    """Which layers do so: every k-th one, from the first."""

    offload: tuple[str, ...] = ()
    """What waits in host memory while it is not used: `activations`, the layer inputs that `recompute = "full"` keeps;
    `optimizer`, AdamW's moments."""

    compile: str = "auto"
    """Fuse each layer with `torch.compile`: `on`, `off`, or `auto`: on GPUs, where the run allows it. A run that asks
    for `on` and cannot have it does not start."""

    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""

    validate_every: int = 1000
    """Steps between validations; the first and the last step are always validated. 0 turns the others off."""

    validation_sequences: int = 1024
    """Validation sequences per validation, always the same; 0 takes the whole validation set."""

    compare_replicas_every: int = 100
    """Steps between comparisons of the parameters that several ranks hold alike; also before every checkpoint. A
    difference stops the run. 0 never compares."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length"):
            require_at_least(f"training.{name}", getattr(self, name), 1)
        for name in ("micro_batch_size", "seed", "validate_every", "validation_sequences", "compare_replicas_every"):
            require_at_least(f"training.{name}", getattr(self, name), 0)
        require_one_of("training.precision", self.precision, tuple(PRECISIONS))
        require_one_of("training.recompute", self.recompute, RECOMPUTATIONS)
        require_at_least("training.recompute_every", self.recompute_every, 1)
        for value in self.offload:
            require_one_of("training.offload", value, OFFLOADS)
        require_one_of("training.compile", self.compile, ("auto", "on", "off"))
        if self.recompute_every > 1 and self.recompute == "none":
            raise ConfigError(
                f"`training.recompute_every` must be 1 where nothing is recomputed, but is {self.recompute_every}. Set "
                'training.recompute="full" or leave it out.'
            )
        if "activations" in self.offload and self.recompute != "full":
            raise ConfigError(
                '`training.offload` may hold "activations" only with training.recompute="full", whose layer inputs '
                f"they are, but that is {self.recompute!r}. Set it or leave activations out."
            )
        require_one_of("training.device", self.device, ("auto", "cpu", "cuda"))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay (paper, section 4.1.1)."""

    learning_rate: float = 1.5e-4
    """Highest rate, reached at the end of the warm-up."""

    min_learning_rate: float = 1e-5
    """The rate at which the decay stops."""

    warmup_steps: int = 3000
    """Steps of linear warm-up."""

    weight_decay: float = 0.01
    """Decoupled weight decay; not on biases and layer norms."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.999
    """Decay of the second moment."""

    epsilon: float = 1e-8
    """Added to the square root of the second moment."""

    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "min_learning_rate", "weight_decay"):
            require_at_least(f"optimizer.{name}", getattr(self, name), 0)
            if not getattr(self, name) < float("inf"):
                raise ConfigError(f"`optimizer.{name}` must be finite, but is {getattr(self, name)}.")
        require_at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        for name in ("beta1", "beta2"):
            require_fraction(f"optimizer.{name}", getattr(self, name))
        for name in ("epsilon", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"`optimizer.{name}` must be above 0, but is {getattr(self, name)}.")
        if self.min_learning_rate > self.learning_rate:
            raise ConfigError(
                f"`optimizer.min_learning_rate` must be at most `optimizer.learning_rate` ({self.learning_rate}), "
                f"but is {self.min_learning_rate}."
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run's state is saved, where, and which checkpoints are kept (docs/checkpoints.md)."""

    every: int = 1000
    """Steps between checkpoints; the last step always writes one. 0 turns the others off."""

    keep: int = 2
    """Newest checkpoints to keep."""

    keep_every: int = 0
    """Steps between checkpoints that are kept for good, beside the newest; 0 keeps none."""

    folder: str = ""
    """A path or any URL that fsspec knows, such as `s3://bucket/run`. Empty means `checkpoints` in the run's folder."""

    on_failure: str = "stop"
    """What the run does when a checkpoint cannot be written: `stop` at the next one, or `continue` and try again
    then. It says so either way, and earlier checkpoints stay as they were."""

    def __post_init__(self) -> None:
        require_at_least("checkpoint.keep", self.keep, 1)
        for name in ("every", "keep_every"):
            require_at_least(f"checkpoint.{name}", getattr(self, name), 0)
        require_one_of("checkpoint.on_failure", self.on_failure, ("stop", "continue"))
        if self.every and self.keep_every % self.every:
            raise ConfigError(
                f"`checkpoint.keep_every` must be a multiple of `checkpoint.every` ({self.every}), but is "
                f"{self.keep_every}. Try {self.every * max(1, round(self.keep_every / self.every))}."
            )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What the run leaves behind."""

    folder: str = "runs/default"
    """The run's folder: its config, metrics, plots, checkpoints."""

    sample_prompt: str = ""
    """Start of the text sampled at the end of the run; empty starts at an end of text."""

    sample_tokens: int = 120
    """Tokens to sample at the end of the run; 0 samples none."""

    def __post_init__(self) -> None:
        if not self.folder:
            raise ConfigError("`output.folder` must name a folder, but is empty.")
        require_at_least("output.sample_tokens", self.sample_tokens, 0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that a run is; enough to repeat it."""

    model: ModelConfig
    layout: Layout = field(default_factory=Layout)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        self._check_tensor_axis()
        self._check_batch()
        self._check_sequence()
        self._check_warm_up()
        self._check_float8()
        self._check_compile()

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass of one data rank."""
        return self.training.micro_batch_size or self.training.batch_size // self.layout.data

    @property
    def num_micro_batches(self) -> int:
        """Forward passes per step."""
        return self.training.batch_size // (self.layout.data * self.micro_batch_size)

    @property
    def tokens_folder(self) -> str:
        """Where the run's token shards are or will be."""
        return self.data.tokens or f"{self.output.folder}/tokens"

    @property
    def checkpoints_folder(self) -> str:
        """Where the run's checkpoints are or will be: a path or a URL."""
        return self.checkpoint.folder or f"{self.output.folder}/{CHECKPOINTS_FOLDER}"

    @property
    def reason_against_compiling(self) -> str:
        """Why the layers of such a run cannot be compiled, in words that follow a colon; empty where they can be."""
        if self.layout.tensor > 1 and self.model.dropout:
            return (
                f"dropout (`model.dropout` {self.model.dropout}) under tensor parallelism (`layout.tensor` "
                f"{self.layout.tensor}) switches between two random streams, which a compiler cannot follow"
            )
        return ""

    @property
    def is_compiled_on_gpus(self) -> bool:
        """Whether layers are compiled where the run is on GPUs that allow it."""
        return self.training.compile != "off" and not self.reason_against_compiling

    def _check_tensor_axis(self) -> None:
        tensor, heads = self.layout.tensor, self.model.num_heads
        if heads % tensor:
            raise LayoutError(
                f"`layout.tensor` must divide `model.num_heads` ({heads}), but is {tensor}. "
                f"Try {listed(divisors(heads))}."
            )

    def _check_batch(self) -> None:
        batch, data, micro = self.training.batch_size, self.layout.data, self.training.micro_batch_size
        if batch % data:
            raise LayoutError(
                f"`training.batch_size` must be a multiple of `layout.data` ({data}), but is {batch}. "
                f"Try {listed(_multiples_around(batch, data))}."
            )
        if micro and batch // data % micro:
            raise ConfigError(
                f"`training.micro_batch_size` must divide the {batch // data} sequences of a data rank "
                f"(`training.batch_size` {batch} / `layout.data` {data}), but is {micro}. "
                f"Try {listed(divisors(batch // data))}."
            )

    def _check_warm_up(self) -> None:
        warm_up, steps = self.optimizer.warmup_steps, self.training.steps
        if warm_up >= steps:
            raise ConfigError(
                f"`optimizer.warmup_steps` must be below `training.steps` ({steps}), but is {warm_up}: the highest "
                f"rate would never be reached. Try {steps // 10}."
            )

    def _check_float8(self) -> None:
        part, multiple = self.model.hidden_size // self.layout.tensor, FLOAT8_MULTIPLE
        if self.training.precision == "float8" and part % multiple:
            raise ConfigError(
                f"`model.hidden_size` / `layout.tensor` must be a multiple of {multiple} for float8 products, but is "
                f'{part}. Choose other sizes, or set training.precision="bfloat16".'
            )

        if self.training.precision == "float8" and self.layout.symmetric_memory:
            raise ConfigError(
                '`training.precision` must not be "float8" with layout.symmetric_memory, whose pieces are of 16 bits. '
                'Set training.precision="bfloat16", or leave symmetric memory out.'
            )

    def _check_compile(self) -> None:
        if self.training.compile == "on" and (reason := self.reason_against_compiling):
            raise ConfigError(not_compilable(reason))

    def _check_sequence(self) -> None:
        length, tensor = self.training.sequence_length, self.layout.tensor
        if length > self.model.max_sequence_length:
            raise ConfigError(
                f"`training.sequence_length` must be at most `model.max_sequence_length` "
                f"({self.model.max_sequence_length}), but is {length}."
            )
        if self.layout.sequence_parallel and length % tensor:
            raise LayoutError(
                f"`training.sequence_length` must be a multiple of `layout.tensor` ({tensor}) under sequence "
                f"parallelism, but is {length}. Try {listed(_multiples_around(length, tensor))}."
            )


def not_compilable(reason: str) -> str:
    """The message for a run that asks to be compiled and cannot be."""
    return (
        f'`training.compile` must be "auto" or "off" here, but is "on": {reason}. Change that, or set '
        'training.compile="auto".'
    )


def _multiples_around(number: int, divisor: int) -> list[int]:
    """The positive multiples of `divisor` next below and next above `number`."""
    below = number // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple]
