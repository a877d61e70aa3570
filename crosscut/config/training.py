"""Training of a run: the loop, the activations kept or recomputed, and the optimizer (paper, section 4.1.1)."""

from dataclasses import dataclass

from crosscut.config.checks import Choice, require_at_least, require_fraction, resolve_choices
from crosscut.config.errors import ConfigError
from crosscut.config.precision import PRECISIONS, ElementTypes, Precision, precision_on


class Recompute(Choice):
    """Values of `training.recompute`."""

    NONE = "none"
    SELECTIVE = "selective"
    OPERATORS = "operators"
    FULL = "full"


class Offload(Choice):
    """Values that `training.offload` may hold."""

    ACTIVATIONS = "activations"
    OPTIMIZER = "optimizer"


class Compile(Choice):
    """Values of `training.compile`."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Device(Choice):
    """Values of `training.device`."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The training loop (paper, section 4.1.1)."""

    steps: int = 300_000
    """Optimizer steps."""

    batch_size: int = 512
    """Sequences per step, over all data ranks."""

    micro_batch_size: int = 0
    """Sequences per forward pass of one data rank; the rest of the batch is accumulated. 0 takes all at once."""

    sequence_length: int = 1024
    """Tokens per sequence."""

    initialize_from: str = ""
    """A Hugging Face folder whose weights the run starts from (docs/pretrained.md); the model may then be left out, and
    the tokenizer of `data.text` is the folder's. Empty draws initial weights."""

    seed: int = 1234
    """Initial weights, order of the data and dropout follow from it, whatever the layout."""

    precision: Precision = Precision.AUTO
    """Element type of activations and matrix products: `float32`, `bfloat16`, `float16` (with a loss scale that follows
    overflows), `float8` (matrix products of the layers, on GPUs that have float8; the rest in bfloat16), `float64`, or
    `auto`: bfloat16 on GPUs, float16 on GPUs without bfloat16 (before Ampere), float32 on CPUs. Weights, their
    gradients' sums and the optimizer stay float32 (float64 with `float64`)."""

    recompute: Recompute = Recompute.NONE
    """Activations that the backward pass computes again instead of keeping: `none`; `selective`, the attention core
    (Korthikanti et al. 2022); `operators`, whatever is cheap: all but matrix products, attention and what was sent;
    `full`, whole layers, of which only the input is kept (the paper's)."""

    recompute_every: int = 1
    """Interval of recomputed layers: every k-th from the first; the first alone in a model of at most k layers."""

    offload: tuple[Offload, ...] = ()
    """Tensors that wait in host memory while unused: `activations`, the layer inputs that `recompute = "full"` keeps;
    `optimizer`, AdamW's moments."""

    compile: Compile = Compile.AUTO
    """Fuse each layer with `torch.compile`: `on`, `off`, or `auto`: on GPUs, where the run allows it. A run that asks
    for `on` and cannot have it does not start."""

    device: Device = Device.AUTO
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
        resolve_choices(self, "training")
        require_at_least("training.recompute_every", self.recompute_every, 1)
        if len(set(self.offload)) < len(self.offload):
            raise ConfigError(
                f"`training.offload` must name each once, but is {list(self.offload)}. Leave the repetition out."
            )
        if self.recompute_every > 1 and self.recompute == Recompute.NONE:
            raise ConfigError(
                f"`training.recompute_every` must be 1 where nothing is recomputed, but is {self.recompute_every}. Set "
                'training.recompute="full" or leave it out.'
            )
        if Offload.ACTIVATIONS in self.offload and self.recompute != Recompute.FULL:
            raise ConfigError(
                '`training.offload` may hold "activations" only with training.recompute="full", whose layer inputs '
                f"they are, but that is {self.recompute!r}. Set it or leave activations out."
            )

    @property
    def numbers(self) -> ElementTypes:
        """The element types; those of `auto` by `device`, which as long as it is `auto` itself counts as a CPU."""
        return PRECISIONS[precision_on(self.device) if self.precision == Precision.AUTO else self.precision]

    def sequences_at_once(self, data: int) -> int:
        """Sequences per forward pass of one of `data` data ranks."""
        return self.micro_batch_size or self.batch_size // data


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
