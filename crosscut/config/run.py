"""Config of a whole run: model, layout, data, training, optimizer, checkpoints, evaluation and output.

Each section checks its own fields. `RunConfig` checks the conditions that involve two sections, for example that the
tensor ranks divide the heads.
"""

from dataclasses import dataclass, field, replace

from crosscut.config.checks import Choice, divisors, listed, require_at_least, resolve_choices, shown
from crosscut.config.conventions import CHECKPOINTS_FOLDER, TOKENS_FOLDER, predicted_rows
from crosscut.config.data import SHORTEST_PAIR, DataConfig, Objective
from crosscut.config.errors import ConfigError, LayoutError
from crosscut.config.evaluation import EvaluationConfig
from crosscut.config.layout import Layout, PipelineSchedule
from crosscut.config.layouts.context import ContextChoice, choose_context_attention, require_context
from crosscut.config.model import ModelConfig, RotaryScaling, require_tensor_axis
from crosscut.config.optimizer import OptimizerConfig
from crosscut.config.precision import FLOAT8_MULTIPLE, Precision
from crosscut.config.training import Compile, TrainingConfig


class OnFailure(Choice):
    """The choices for `checkpoint.on_failure`."""

    STOP = "stop"
    CONTINUE = "continue"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: how often they are saved, where, and which of them are kept (docs/checkpoints.md)."""

    every: int = 1000
    """Number of steps between checkpoints. The last step is always saved. 0 saves only the last step."""

    in_memory: int = 0
    """Number of steps between checkpoints in the memory of the machines (docs/elastic.md). Each machine also holds the
    checkpoint of a neighbour, so that a run under torchrun can lose one machine and continue without reading the disk.
    0 writes no checkpoints to memory.
    """

    keep: int = 2
    """Number of newest checkpoints to keep."""

    keep_every: int = 0
    """Number of steps between checkpoints that are kept permanently, in addition to the newest checkpoints. 0 keeps no
    checkpoint permanently."""

    folder: str = ""
    """Folder of the checkpoints: a path, or a URL that fsspec supports, such as `s3://bucket/run`. Empty means
    `checkpoints` in the run's folder."""

    on_failure: OnFailure = OnFailure.STOP
    """Reaction to a checkpoint that cannot be written. `stop` ends the run when the next checkpoint is due. `continue`
    tries again when the next checkpoint is due. In both cases the run reports the failure and leaves earlier
    checkpoints unchanged."""

    def __post_init__(self) -> None:
        require_at_least("checkpoint.keep", self.keep, 1)
        for name in ("every", "keep_every", "in_memory"):
            require_at_least(f"checkpoint.{name}", getattr(self, name), 0)
        resolve_choices(self, "checkpoint")
        if self.every and self.keep_every % self.every:
            raise ConfigError(
                f"`checkpoint.keep_every` must be a multiple of `checkpoint.every` ({self.every}), but is "
                f"{self.keep_every}. Try {self.every * max(1, round(self.keep_every / self.every))}."
            )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Output of the run."""

    folder: str = "runs/default"
    """Folder of the run, for the config, metrics, plots and checkpoints."""

    sample_prompt: str = ""
    """Prompt of a second sample at the end of the run. The first sample is a new document. An empty prompt gives only
    the first sample."""

    sample_tokens: int = 120
    """Number of tokens of each sample at the end of the run. 0 samples no text."""

    sample_temperature: float = 0.8
    """Sampling temperature of the samples at the end of the run. A low temperature suits a small model, whose unlikely
    tokens are noise. 0 always takes the likeliest token."""

    def __post_init__(self) -> None:
        if not self.folder:
            raise ConfigError("`output.folder` must name a folder, but is empty.")
        for name in ("sample_tokens", "sample_temperature"):
            require_at_least(f"output.{name}", getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Complete description of a run, sufficient to repeat the run."""

    model: ModelConfig
    layout: Layout = field(default_factory=Layout)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    recipe: str = field(default="", compare=False)
    """Name of the recipe that gave the settings which the run left out. The settings of a resolved run no longer depend
    on it. Empty if the run gave all settings."""

    def __post_init__(self) -> None:
        require_tensor_axis(self.model, self.layout.tensor)
        self._check_batch()
        self._check_stages()
        self._check_sequence()
        self._check_rotary()
        require_context(self.model, self.layout, self.training)
        self._check_masked_samples()
        self._check_task()
        self._check_warm_up()
        self._check_rates()
        self._check_float8()
        self._check_compile()
        if self.evaluation.has_tasks:
            self.evaluation.window_for(self.training.sequence_length)

    @property
    def micro_batch_size(self) -> int:
        """Number of sequences per forward pass of one data rank."""
        return self.training.sequences_at_once(self.layout.data)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per step on each data rank. If the batch grows, the first steps have fewer
        micro-batches.
        """
        return self.training.batch_size // (self.layout.data * self.micro_batch_size)

    @property
    def mask_fraction(self) -> float:
        """Fraction of the tokens that a masked language model predicts."""
        return self.data.mask_fraction

    @property
    def predicted_tokens(self) -> int:
        """Number of tokens of a rank's micro-batch for which the head computes logits. For a masked language model,
        this is the expected number.
        """
        tokens = self.micro_batch_size * self.training.sequence_length // self.layout.context
        return expected_predictions(self.model, tokens, self.mask_fraction)

    @property
    def context_attention(self) -> ContextChoice:
        """Method of computing attention over sequences that several context ranks share, and the reason for it."""
        return choose_context_attention(self.model, self.layout, self.training)

    @property
    def tokens_folder(self) -> str:
        """Folder of the run's token shards. With a mixture, the first folder of the mixture."""
        if self.data.mixture:
            return self.data.mixture[0].folder
        return self.data.tokens or f"{self.output.folder}/{TOKENS_FOLDER}"

    @property
    def checkpoints_folder(self) -> str:
        """Folder of the run's checkpoints: a path or a URL."""
        return self.checkpoint.folder or f"{self.output.folder}/{CHECKPOINTS_FOLDER}"

    def with_vocabulary(self) -> "RunConfig":
        """Return the run with a known vocabulary size: if `model.vocab_size` is 0, `data.vocab_size` replaces it.

        0 means that the run trains a tokenizer. The tokenizer has at most `data.vocab_size` tokens.
        """
        return replace(self, model=replace(self.model, vocab_size=self.model.vocab_size or self.data.vocab_size))

    @property
    def reason_against_compiling(self) -> str:
        """Reason why the layers of this run cannot be compiled, as a clause to follow a colon. Empty if the layers can
        be compiled.
        """
        return reason_against_compiling(self.model, self.layout)

    @property
    def is_compiled_on_gpus(self) -> bool:
        """Whether the run compiles its layers if it is on GPUs that support compilation."""
        return self.training.compile != Compile.OFF and not self.reason_against_compiling

    def _check_batch(self) -> None:
        (name, batch), data, micro = self.training.smallest_batch, self.layout.data, self.training.micro_batch_size
        if batch % data:
            raise LayoutError(
                f"`{name}` must be a multiple of `layout.data` ({data}), but is {batch}. "
                f"Try {listed(_multiples_around(batch, data))}."
            )
        if micro and batch // data % micro:
            raise ConfigError(
                f"`training.micro_batch_size` must divide the {batch // data} sequences of a data rank "
                f"(`{name}` {batch} / `layout.data` {data}), but is {micro}. "
                f"Try {listed(divisors(batch // data))}."
            )

    def _check_stages(self) -> None:
        layout, layers = self.layout, self.model.num_layers
        if layout.num_stages > layers:
            name = "layout.pipeline" if layout.stages_per_rank == 1 else "layout.stages_per_rank"
            raise LayoutError(
                f"`{name}` must leave at least one layer for each stage, but `model.num_layers` is {layers} and there "
                f"are {layout.num_stages} stages (`layout.pipeline` {layout.pipeline} x `layout.stages_per_rank` "
                f"{layout.stages_per_rank}). Use fewer stages."
            )
        if layout.stages and sum(layout.stages) != layers:
            raise LayoutError(
                f"`layout.stages` must add up to `model.num_layers` ({layers}), but {list(layout.stages)} adds up to "
                f"{sum(layout.stages)}. Change `layout.stages`, or remove it."
            )
        if layout.stages_per_rank == 1:
            return
        if not layout.stages and layers % layout.num_stages:
            raise LayoutError(
                f"`layout.stages_per_rank` must split the layers evenly, but `model.num_layers` is {layers} and there "
                f"are {layout.num_stages} stages (`layout.pipeline` {layout.pipeline} x `layout.stages_per_rank` "
                f"{layout.stages_per_rank}). Change `layout.stages_per_rank`, or list the layers of each stage in "
                "`layout.stages`."
            )
        (name, batch), at_once = self.training.smallest_batch, layout.data * self.micro_batch_size
        if batch // at_once % layout.pipeline:
            raise LayoutError(
                f"With `layout.stages_per_rank` {layout.stages_per_rank}, the number of micro-batches per step must be "
                f"a multiple of `layout.pipeline` ({layout.pipeline}), but is {batch // at_once} (`{name}` {batch} / "
                f"`layout.data` {layout.data} / {self.micro_batch_size} sequences per micro-batch). Change "
                "`training.micro_batch_size`, or remove `layout.stages_per_rank`."
            )

    def _check_warm_up(self) -> None:
        warm_up, steps = self.optimizer.warmup_steps, self.training.steps
        if warm_up >= steps:
            raise ConfigError(
                f"`optimizer.warmup_steps` must be below `training.steps` ({steps}), but is {warm_up}. The run would "
                f"never reach its maximum learning rate. Try {steps // 10}."
            )
        if (decay := self.optimizer.decay_steps) > steps - warm_up:
            raise ConfigError(
                f"`optimizer.decay_steps` must be at most {steps - warm_up}, the number of steps after the warm-up "
                f"(`training.steps` {steps} - `optimizer.warmup_steps` {warm_up}), but is {decay}. "
                f"Try {max(1, steps // 10)}."
            )

    def _check_rates(self) -> None:
        if self.model.tied and not self.model.solves_task and self.optimizer.head_learning_rate:
            raise ConfigError(
                "`optimizer.head_learning_rate` must be 0 for a model whose output projection shares the weight of the "
                f"embedding, but is {self.optimizer.head_learning_rate}. Set `optimizer.embedding_learning_rate`, or "
                "set model.tied=false."
            )
        if self.optimizer.scalar_learning_rate and not self.model.norm_affine and self.model.biases == "none":
            raise ConfigError(
                "`optimizer.scalar_learning_rate` must be 0 for a model whose matrices have no biases and whose norms "
                f"have no parameters, but is {self.optimizer.scalar_learning_rate}. Remove "
                "`optimizer.scalar_learning_rate`, or set model.norm_affine=true."
            )

    def _check_float8(self) -> None:
        if self.training.precision == Precision.FLOAT8:
            self._require_multiples(FLOAT8_MULTIPLE)
        if self.training.precision == Precision.FLOAT8 and self.layout.symmetric_memory:
            raise ConfigError(
                '`training.precision` must not be "float8" with `layout.symmetric_memory`. Symmetric memory supports '
                'only 16-bit types. Set training.precision="bfloat16", or remove `layout.symmetric_memory`.'
            )

    def _require_multiples(self, multiple: int) -> None:
        model, tensor = self.model, self.layout.tensor
        key_value = 2 * max(model.num_kv_heads // tensor, 1) * model.head_size
        widths = {
            "`model.hidden_size`": model.hidden_size,
            "`model.num_heads` x `model.head_size` / `layout.tensor`": model.query_size // tensor,
            "The width of keys and values on one rank": key_value,
            "`model.mlp_size` / `layout.tensor`": model.mlp_size // tensor,
            "`model.lora_rank`": model.lora_rank,
        }
        for name, width in widths.items():
            if width % multiple:
                raise ConfigError(
                    f"{name} must be a multiple of {multiple} for float8 products, but is {width}. Choose other sizes, "
                    'or set training.precision="bfloat16".'
                )

    def _check_compile(self) -> None:
        if self.training.compile == Compile.ON and (reason := self.reason_against_compiling):
            raise ConfigError(not_compilable(reason))

    def _check_masked_samples(self) -> None:
        if self.data.objective is Objective.CAUSAL or not self.data.pairs:
            return
        if (length := self.training.sequence_length) < SHORTEST_PAIR:
            raise ConfigError(
                f"`training.sequence_length` must be at least {SHORTEST_PAIR} for pairs of segments ([CLS] A [SEP] B "
                f"[SEP]), but is {length}. Use longer sequences, or set data.pairs=false."
            )
        if self.training.document_mask:
            raise ConfigError(
                "`training.document_mask` must be false for pairs of segments, but is true. A pair comes from one "
                "document. Remove `training.document_mask`, or set data.pairs=false."
            )

    def _check_task(self) -> None:
        if not self.model.solves_task:
            return
        for name, plain in (("document_mask", False), ("z_loss", 0.0)):
            if (value := getattr(self.training, name)) != plain:
                raise ConfigError(
                    f'`training.{name}` must be {shown(plain)} for a model with `model.head` = "{self.model.head}", '
                    f"but is {shown(value)}. This setting is for models that predict tokens. Remove "
                    f"`training.{name}`."
                )

    def _check_sequence(self) -> None:
        length, tensor = self.training.sequence_length, self.layout.tensor
        if length > self.model.max_sequence_length:
            raise ConfigError(
                f"`training.sequence_length` must be at most `model.max_sequence_length` "
                f"({self.model.max_sequence_length}), but is {length}. Use shorter sequences, or raise "
                "`model.max_sequence_length`."
            )
        if self.layout.sequence_parallel and length % tensor:
            raise LayoutError(
                f"`training.sequence_length` must be a multiple of `layout.tensor` ({tensor}) under sequence "
                f"parallelism, but is {length}. Try {listed(_multiples_around(length, tensor))}."
            )

    def _check_rotary(self) -> None:
        if self.model.rotary_scaling is RotaryScaling.DYNAMIC and self.training.document_mask:
            raise ConfigError(
                '`training.document_mask` must be false with `model.rotary_scaling` = "dynamic", but is true. The '
                "frequencies depend on the length of a whole sequence, and a document must not depend on the others. "
                'Set model.rotary_scaling="yarn", or remove `training.document_mask`.'
            )


def expected_predictions(model: ModelConfig, num_tokens: int, fraction: float) -> int:
    """Number of tokens, out of `num_tokens`, for which the head computes logits of the vocabulary. A model that
    predicts masked tokens computes logits for a `fraction` of the tokens, a model that solves a task for none, and any
    other model for all tokens.
    """
    if model.solves_task:
        return 0
    return predicted_rows(None, num_tokens, fraction) if model.predicts_masked else num_tokens


def reason_against_compiling(model: ModelConfig, layout: Layout) -> str:
    """Reason why layers cannot be compiled on any machine, as a clause to follow a colon. Empty if the layers can be
    compiled.
    """
    if layout.pipeline > 1 and layout.schedule is PipelineSchedule.ZERO_BUBBLE:
        return (
            "compiled code computes the gradients of weights and of activations together, and layout.schedule = "
            '"zero_bubble" separates them'
        )
    if layout.tensor > 1 and model.dropout and not layout.sequence_parallel:
        return (
            "dropout under tensor parallelism switches between two random streams, and a compiler cannot trace the "
            f"switches (`model.dropout` is {model.dropout} and `layout.tensor` is {layout.tensor}). With "
            "layout.sequence_parallel=true, each rank has only one stream"
        )
    return ""


def not_compilable(reason: str) -> str:
    """Error message for a run that must be compiled but cannot be."""
    return (
        f'`training.compile` must be "auto" or "off" for this run, but is "on": {reason}. Remove the cause, or set '
        'training.compile="auto".'
    )


def _multiples_around(number: int, divisor: int) -> list[int]:
    """Return the nearest positive multiples of `divisor` below and above `number`."""
    below = number // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple]
