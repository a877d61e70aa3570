"""Config of a whole run: model, layout, data, training, optimizer, checkpoints, evaluation and output.

Each section checks its own fields. `RunConfig` checks the conditions that involve two sections, for example that the
tensor ranks divide the heads.
"""

from dataclasses import dataclass, field, replace

from crosscut.config.checks import Choice, LocalPath, check_section, require_value
from crosscut.config.conventions import CHECKPOINTS_FOLDER, TOKENS_FOLDER
from crosscut.config.data import SHORTEST_PAIR, DataConfig, Objective
from crosscut.config.errors import ConfigError
from crosscut.config.evaluation import EvaluationConfig
from crosscut.config.layout import Layout
from crosscut.config.layouts.compilation import require_compilable
from crosscut.config.layouts.context import require_context
from crosscut.config.layouts.divisibility import require_batch, require_float8, require_sequence, require_stages
from crosscut.config.layouts.limits import require_expert_axis, require_tensor_axis
from crosscut.config.layouts.step import StepShape
from crosscut.config.model import Biases, ModelConfig
from crosscut.config.optimizer import OptimizerConfig
from crosscut.config.parts.head import HeadKind
from crosscut.config.parts.kinds import Mixer
from crosscut.config.parts.rotary import RotaryScaling
from crosscut.config.teachers import TeacherConfig
from crosscut.config.training import TrainingConfig


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
        check_section(self, "checkpoint", keep=1, every=0, keep_every=0, in_memory=0)
        if self.every and self.keep_every % self.every:
            raise ConfigError(
                f"`checkpoint.keep_every` must be a multiple of `checkpoint.every` ({self.every}), but is "
                f"{self.keep_every}. Try {self.every * max(1, round(self.keep_every / self.every))}."
            )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Output of the run."""

    folder: LocalPath = "runs/default"
    """Folder of the run, for the config, metrics, plots and checkpoints."""

    trackers: tuple[str, ...] = ("tensorboard",)
    """Programs that get the figures, in addition to the files in the folder: `tensorboard`, `trackio` or `wandb`. Their
    packages must be installed."""

    sample_prompt: str = ""
    """Prompt of a second sample at the end of the run. The first sample is a new document. An empty prompt gives only
    the first sample."""

    sample_tokens: int = 120
    """Number of tokens of each sample at the end of the run. 0 samples no text."""

    sample_every: int = 0
    """Number of steps between samples during the run, which the file `samples.jsonl` in the run's folder collects. 0
    samples no text before the end of the run."""

    sample_temperature: float = 0.8
    """Sampling temperature of the samples at the end of the run. A low temperature suits a small model, whose unlikely
    tokens are noise. 0 always takes the likeliest token."""

    sample_repetition_penalty: float = 1.0
    """Repetition penalty of the samples. A small model at a low temperature repeats itself; a value above 1 makes
    tokens of the text so far less likely."""

    def __post_init__(self) -> None:
        if not self.folder:
            raise ConfigError("`output.folder` must name a folder, but is empty.")
        least = {"sample_tokens": 0, "sample_every": 0, "sample_temperature": 0, "sample_repetition_penalty": 1}
        check_section(self, "output", **least)
        if self.sample_every and not self.sample_tokens:
            raise ConfigError(
                f"`output.sample_tokens` must be at least 1 if `output.sample_every` is {self.sample_every}, but is 0. "
                "Set `output.sample_tokens`, or remove `output.sample_every`."
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig(StepShape):
    """Complete description of a run, sufficient to repeat the run."""

    model: ModelConfig
    layout: Layout = field(default_factory=Layout)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    recipe: str = field(default="", compare=False)
    """Name of the recipe that gave the settings which the run left out. The settings of a resolved run no longer depend
    on it. Empty if the run gave all settings."""

    def __post_init__(self) -> None:
        model, layout, training = self.model, self.layout, self.training
        require_tensor_axis(model, layout.tensor)
        require_expert_axis(model, layout)
        require_batch(layout, training)
        require_stages(model, layout, training)
        require_sequence(model, layout, training)
        require_documents(model, training)
        require_context(model, layout)
        _require_pairs(self.data, training)
        _require_task(model, training, self.teacher)
        _require_warm_up(self.optimizer, training)
        _require_rates(model, self.optimizer)
        _require_whole_gradients(layout, self.optimizer)
        require_float8(model, layout, training)
        require_compilable(model, layout, training)
        if self.teacher.is_computed and layout.world_size > 1:  # one rank may stand for a layout that is chosen later
            self.teacher_ranks.require_possible()
        _require_samples(model, layout, self.output)
        if self.evaluation.has_tasks:
            self.evaluation.window_for(training.sequence_length)

    @property
    def mask_fraction(self) -> float:
        """Fraction of the tokens that a masked language model predicts."""
        return self.data.mask_fraction

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

    def require_objective(self) -> None:
        """Raise `ConfigError` if the data do not fit the model's kind of prediction, or if a token would attend to the
        token that it has to predict.
        """
        model, objective = self.model, objective_of(self.model)
        masked = self.data.objective is Objective.MASKED
        if model.solves_task:
            raise ConfigError(
                f'`model.head` must be "next_token" or "masked_tokens" for training on texts, but is "{model.head}". '
                'Set model.head="next_token", or use `crosscut finetune` to train on a task with labels.'
            )
        if self.data.objective != objective:
            head = "masked_tokens" if masked else "next_token"
            raise ConfigError(
                f'`data.objective` must be "{objective}" for a model with `model.head` = "{model.head}", but is '
                f'"{self.data.objective}". Set data.objective="{objective}", or model.head="{head}".'
            )
        if not (masked or model.is_causal):
            raise ConfigError(
                '`model.attention` must be "causal" for training on the next token, but is "bidirectional". Every '
                'token would see the token that it has to predict. Set model.attention="causal".'
            )
        if model.sentence_order and not self.data.pairs:
            raise ConfigError(
                "`data.pairs` must be true for a model that predicts the order of segments, but is false. Set "
                "data.pairs=true, or model.sentence_order=false."
            )
        if masked and self.data.pairs and model.token_types == 1:
            raise ConfigError(
                "`model.token_types` must be 0 or at least 2 for pairs of segments, but is 1. Set model.token_types=2."
            )
        if masked:
            self.evaluation.require_masked()


def objective_of(model: ModelConfig) -> Objective:
    """Kind of prediction that a model with this head makes for texts."""
    return Objective.MASKED if model.predicts_masked else Objective.CAUSAL


def _require_warm_up(optimizer: OptimizerConfig, training: TrainingConfig) -> None:
    """Raise `ConfigError` if the learning rate has too few steps to rise and to fall."""
    warm_up, steps = optimizer.warmup_steps, training.steps
    if warm_up >= steps:
        raise ConfigError(
            f"`optimizer.warmup_steps` must be below `training.steps` ({steps}), but is {warm_up}. The run would "
            f"never reach its maximum learning rate. Try {steps // 10}."
        )
    if (decay := optimizer.decay_steps) > steps - warm_up:
        raise ConfigError(
            f"`optimizer.decay_steps` must be at most {steps - warm_up}, the number of steps after the warm-up "
            f"(`training.steps` {steps} - `optimizer.warmup_steps` {warm_up}), but is {decay}. "
            f"Try {max(1, steps // 10)}."
        )


def _require_rates(model: ModelConfig, optimizer: OptimizerConfig) -> None:
    """Raise `ConfigError` for the learning rate of a group that has no parameters."""
    if model.tied and not model.solves_task:
        when = "for a model whose output projection shares the weight of the embedding"
        remedy = "Set `optimizer.embedding_learning_rate`, or set model.tied=false."
        require_value("optimizer.head_learning_rate", optimizer.head_learning_rate, 0, when, remedy)
    if not model.norm_affine and model.biases is Biases.NONE:
        when = "for a model whose matrices have no biases and whose norms have no parameters"
        remedy = "Remove `optimizer.scalar_learning_rate`, or set model.norm_affine=true."
        require_value("optimizer.scalar_learning_rate", optimizer.scalar_learning_rate, 0, when, remedy)


def _require_whole_gradients(layout: Layout, optimizer: OptimizerConfig) -> None:
    """Raise `ConfigError` if gradients in low rank would need gradients that no rank holds whole."""
    if layout.is_sharded:
        remedy = (
            "Data ranks that share one copy scatter the gradients, so no rank has one to approximate. Remove "
            '`optimizer.gradient_rank`, or set layout.sharding="none".'
        )
        when = f'with layout.sharding="{layout.sharding}"'
        require_value("optimizer.gradient_rank", optimizer.gradient_rank, 0, when, remedy)


def _require_pairs(data: DataConfig, training: TrainingConfig) -> None:
    """Raise `ConfigError` if sequences cannot hold pairs of segments."""
    if data.objective is Objective.CAUSAL or not data.pairs:
        return
    if (length := training.sequence_length) < SHORTEST_PAIR:
        raise ConfigError(
            f"`training.sequence_length` must be at least {SHORTEST_PAIR} for pairs of segments ([CLS] A [SEP] B "
            f"[SEP]), but is {length}. Use longer sequences, or set data.pairs=false."
        )
    remedy = "A pair comes from one document. Remove `training.document_mask`, or set data.pairs=false."
    require_value("training.document_mask", training.document_mask, False, "for pairs of segments", remedy)


def _require_task(model: ModelConfig, training: TrainingConfig, teacher: TeacherConfig) -> None:
    """Raise `ConfigError` for settings that a model for tasks does not have."""
    if not model.solves_task:
        return
    when = f'for a model with `model.head` = "{model.head}"'
    for name, plain in (("document_mask", False), ("z_loss", 0.0)):
        remedy = f"This setting is for models that predict tokens. Remove `training.{name}`."
        require_value(f"training.{name}", getattr(training, name), plain, when, remedy)
    remedy = "Only logits of tokens can be stored. Set `teacher.folder`, and remove `teacher.cache`."
    require_value("teacher.cache", teacher.cache, "", when, remedy)
    if model.head is HeadKind.NUMBER:
        remedy = "A number has no distribution to learn. Remove the section `teacher`."
        require_value("teacher.folder", teacher.folder, "", when, remedy)


def _require_samples(model: ModelConfig, layout: Layout, output: OutputConfig) -> None:
    """Raise `ConfigError` for samples during a run that can write no text."""
    if layout.num_stages > 1:
        remedy = "The stages of a pipeline write no text. Remove `output.sample_every`, or set layout.pipeline=1."
        require_value("output.sample_every", output.sample_every, 0, "in a pipeline", remedy)
    if model.predicts_masked or model.solves_task:
        remedy = "Such a model writes no text. Remove `output.sample_every`."
        require_value("output.sample_every", output.sample_every, 0, f'for `model.head` = "{model.head}"', remedy)


def require_documents(model: ModelConfig, training: TrainingConfig, *, of: str = "", other: str = "") -> None:
    """Raise `ConfigError` if rotary frequencies or a block mask would make a document depend on others. For another
    model than the run's own, `of` are the words that follow its settings, and `other` is the remedy.
    """
    blocks = (
        "with `sparse_attention` in `model.layers`",
        "Blocks are counted from the start of the sequence, and a document must not depend on the documents before it.",
        "Choose other layers",
    )
    frequencies = (
        'with `model.rotary_scaling` = "dynamic"',
        "The frequencies depend on the length of a whole sequence, and a document must not depend on the others.",
        'Set model.rotary_scaling="yarn"',
    )
    has_blocks = Mixer.SPARSE_ATTENTION in model.kinds
    if not has_blocks and model.rotary_scaling is not RotaryScaling.DYNAMIC:
        return
    when, why, remedy = blocks if has_blocks else frequencies
    do = f"{why} {other or remedy}, or remove `training.document_mask`."
    require_value("training.document_mask", training.document_mask, False, when + of, do)
