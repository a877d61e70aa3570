"""Settings of a run's training: the loop, and recomputation and offload of activations (paper, section 4.1.1)."""

from dataclasses import dataclass, replace

from crosscut.config.checks import (
    MOST_SEED,
    Choice,
    LocalPath,
    check_section,
    divisors,
    listed,
    require_at_least,
    require_value,
)
from crosscut.config.errors import ConfigError
from crosscut.config.hashed import HashedOnce
from crosscut.config.precision import PRECISIONS, ElementTypes, Precision, precision_on


class Recompute(Choice):
    """The choices for `training.recompute`."""

    NONE = "none"
    SELECTIVE = "selective"
    OPERATORS = "operators"
    FULL = "full"


class Offload(Choice):
    """The choices for the items of `training.offload`."""

    ACTIVATIONS = "activations"
    OPTIMIZER = "optimizer"


class Compile(Choice):
    """The choices for `training.compile`."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Device(Choice):
    """The choices for `training.device`."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class OnHang(Choice):
    """The choices for `training.on_hang`."""

    WAIT = "wait"
    STOP = "stop"
    RESTART = "restart"


class InitialSpread(Choice):
    """The choices for `training.initial_spread`."""

    PAPER = "paper"
    FAN_IN = "fan_in"


class OnSpike(Choice):
    """The choices for `training.on_spike`."""

    OFF = "off"
    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(HashedOnce):
    """The training loop (paper, section 4.1.1)."""

    __hash__ = HashedOnce.__hash__

    steps: int = 300_000
    """Number of optimizer steps."""

    batch_size: int = 512
    """Number of sequences per step, summed over all data ranks."""

    initial_batch_size: int = 0
    """Number of sequences in each of the first steps, summed over all data ranks. During the first `ramp_steps` steps,
    the batch grows to `batch_size` in increments of this number. Must divide `batch_size`. 0 means that all steps have
    `batch_size` sequences."""

    ramp_steps: int = 0
    """Number of steps after which the batch has grown from `initial_batch_size` to `batch_size`. The batch grows at
    equal intervals. Must be 0 without `initial_batch_size`."""

    micro_batch_size: int = 0
    """Number of sequences per forward pass of one data rank. Gradients are accumulated over the micro-batches of a
    step. 0 processes the whole batch of a rank at once or, with `initial_batch_size`, as many sequences as a rank has
    in the first step."""

    sequence_length: int = 1024
    """Number of tokens per sequence."""

    document_mask: bool = False
    """Whether the documents of a sequence are hidden from each other: no token attends to an earlier document, and
    positions restart at each document. The end-of-text token between two documents counts as the first token of the
    second document (docs/data.md)."""

    initialize_from: LocalPath = ""
    """Hugging Face folder with the weights from which the run starts (docs/pretrained.md). With this folder, the model
    section may be omitted, and `data.text` is tokenized with the folder's tokenizer unless `data.tokenizer` is set. If
    `model.layers` has `experts` in the place of the folder's MLPs, each expert starts as a copy of such an MLP
    (docs/experts.md). Empty starts from random weights."""

    z_loss: float = 0.0
    """Coefficient c of the z-loss, which adds c x (log Z)^2 to the loss of each token in training. Z is the sum of the
    exponentials of the token's logits. The z-loss keeps the logits small. A usual value is 1e-4. The training loss
    includes the z-loss, and validation and evaluation leave it out."""

    initial_spread: InitialSpread = InitialSpread.PAPER
    """Standard deviation of the initial weights of matrices and embeddings: `paper` is always 0.02; `fan_in` is 1 /
    sqrt(number of inputs). An embedding has one input, or `model.hidden_size` inputs if it is also the output
    projection. In both cases, the initial weights of matrices before a residual sum are divided by sqrt(2
    `model.num_layers`)."""

    zero_initial_outputs: bool = False
    """Whether the output projections of attention and of the MLP start at zero, so that at first each layer returns its
    input unchanged."""

    seed: int = 1234
    """Seed of the initial weights, the order of the data, and dropout. The initial weights and the order of the data do
    not depend on the layout."""

    precision: Precision = Precision.AUTO
    """Precision of activations and matrix products: `float32`; `bfloat16`; `float64`; `float16`, with a dynamic loss
    scale; `float8`, with float8 for the layers' matrix products and bfloat16 for all other operations, on GPUs that
    support float8; or `auto`, which means bfloat16 on GPUs, float16 on GPUs older than Ampere, and float32 on CPUs.
    Weights, gradient sums and optimizer state are in float64 with `float64`, and in float32 with every other
    precision."""

    recompute: Recompute = Recompute.NONE
    """Activations that the backward pass recomputes instead of keeping: `none` recomputes nothing; `selective`
    recomputes the attention core (Korthikanti et al. 2022) and the scans of mixers with a state; `operators` recomputes
    everything except the results of matrix products, attention, scans and communication; `full` recomputes whole layers
    and keeps only their inputs (as in the paper)."""

    recompute_every: int = 1
    """Interval between recomputed layers: k recomputes every k-th layer, starting with the first layer."""

    offload: tuple[Offload, ...] = ()
    """Tensors that are kept in host memory while they are not in use: `activations` (the layer inputs that `recompute =
    "full"` keeps) and `optimizer` (the moments of AdamW and Muon)."""

    compile: Compile = Compile.AUTO
    """Whether to compile each layer with `torch.compile`: `on`, `off`, or `auto`, which compiles on GPUs if the run's
    settings allow compilation. With `on`, a run that cannot be compiled does not start.
    """

    device: Device = Device.AUTO
    """Device: `cpu`, `cuda`, or `auto`, which uses a GPU if there is one."""

    validate_every: int = 1000
    """Number of steps between validation passes. The first and the last step always have a validation pass. With 0,
    only these two steps have one."""

    validation_sequences: int = 1024
    """Number of sequences per validation pass. All passes use the same sequences, which are spread evenly over the
    held-out documents (docs/data.md). 0 uses the whole validation set."""

    compare_replicas_every: int = 100
    """Number of steps between comparisons of the parameters that several ranks replicate. The comparison also runs
    before every checkpoint. If replicas differ, the run stops. 0 never compares."""

    idle_expert_steps: int = 100
    """Number of steps in a row in which an expert gets no token until the run names the expert in the terminal
    (docs/experts.md). It is named only if an expert with the mean load would have got 1,000 tokens in these steps. 0
    names none."""

    on_spike: OnSpike = OnSpike.OFF
    """Reaction to a spike of the loss or of the gradient norm (docs/spikes.md). `off` looks for no spikes. `stop` ends
    the run with a message. `skip` rolls back to the state before the spike, skips the batches since then, and
    continues. `skip` does the same if the loss or the gradient is not finite."""

    skips: LocalPath = ""
    """File that lists the batches that an earlier run skipped (`spikes/skips.json` in that run's folder). A new run
    with this file skips the same batches at the same steps. Empty skips no batches."""

    on_hang: OnHang = OnHang.WAIT
    """Reaction to a hang, after the report (docs/hangs.md): `wait` keeps waiting; `stop` ends the run with status 75;
    `restart` ends the ranks and starts them again from the last checkpoint (under torchrun, the ranks end as with
    `stop`). If there is no checkpoint, or at the fourth hang without a new checkpoint, `stop` and `restart` end the run
    with status 1."""

    def __post_init__(self) -> None:
        counts = {"steps": 1, "batch_size": 1, "sequence_length": 1, "initial_batch_size": 0, "ramp_steps": 0}
        others = ("micro_batch_size", "validate_every", "validation_sequences", "compare_replicas_every")
        counts |= dict.fromkeys(("idle_expert_steps", *others), 0)
        require_at_least("training.seed", self.seed, 0, maximum=MOST_SEED)
        check_section(self, "training", z_loss=0, **counts)
        self._check_ramp()
        self._check_initial_weights()
        require_at_least("training.recompute_every", self.recompute_every, 1)
        if len(set(self.offload)) < len(self.offload):
            raise ConfigError(
                f"`training.offload` must name each value once, but is {list(self.offload)}. Remove the repetition."
            )
        if self.recompute == Recompute.NONE:
            remedy = 'Set training.recompute="full" or remove `training.recompute_every`.'
            require_value("training.recompute_every", self.recompute_every, 1, "if nothing is recomputed", remedy)
        if Offload.ACTIVATIONS in self.offload and self.recompute != Recompute.FULL:
            raise ConfigError(
                '`training.offload` may contain "activations" only with training.recompute="full", but '
                f'`training.recompute` is {self.recompute!r}. Set training.recompute="full" or remove "activations".'
            )

    def _check_initial_weights(self) -> None:
        if not self.initialize_from:
            return
        for name, default in (("initial_spread", InitialSpread.PAPER), ("zero_initial_outputs", False)):
            if (value := getattr(self, name)) != default:
                raise ConfigError(
                    f"`training.{name}` must be {default!r} with `training.initialize_from`, but is "
                    f"{value!r}. The weights are read from that folder. Remove `training.{name}`."
                )

    def _check_ramp(self) -> None:
        first, last, steps = self.initial_batch_size, self.batch_size, self.ramp_steps
        if bool(first) != bool(steps):
            given, missing = ("initial_batch_size", "ramp_steps") if first else ("ramp_steps", "initial_batch_size")
            raise ConfigError(
                f"`training.{missing}` must be at least 1 if `training.{given}` is set, but is 0. Set both for a batch "
                f"that grows, or remove `training.{given}`."
            )
        if not first:
            return
        if first >= last or last % first:
            smaller = [divisor for divisor in divisors(last) if divisor < last]
            advice = (
                f"Try {listed(smaller)}."
                if smaller
                else "A batch of 1 cannot grow. Remove `training.initial_batch_size`."
            )
            raise ConfigError(
                f"`training.initial_batch_size` must be below `training.batch_size` ({last}) and divide it, but is "
                f"{first}. {advice}"
            )
        if steps >= self.steps:
            raise ConfigError(
                f"`training.ramp_steps` must be below `training.steps` ({self.steps}), but is {steps}. The batch would "
                f"never grow to `training.batch_size`. Try {max(1, self.steps // 10)}."
            )

    def batch_size_at(self, step: int) -> int:
        """Number of sequences in step `step`, counted from 0, over all data ranks."""
        return self.samples_before(step + 1) - self.samples_before(step)

    def samples_before(self, step: int) -> int:
        """Number of sequences in all steps before step `step`, counted from 0.

        With a ramp, the batch is the sum of equal parts of `initial_batch_size` sequences. Part j, counted from 0,
        belongs to the batch from step `ceil(j ramp_steps / (number of parts - 1))` on.
        """
        part = self.initial_batch_size
        if not part:
            return step * self.batch_size
        last = self.batch_size // part - 1
        return part * sum(max(0, step - -(-j * self.ramp_steps // last)) for j in range(last + 1))

    @property
    def smallest_batch(self) -> tuple[str, int]:
        """Name and value of the setting for the run's smallest batch. The layout must divide this batch evenly."""
        name = "initial_batch_size" if self.initial_batch_size else "batch_size"
        return f"training.{name}", getattr(self, name)

    def in_precision(self, precision: str) -> "TrainingConfig":
        """Return the settings with `precision` in place of `auto`. If the precision is not `auto`, the settings are
        returned unchanged.
        """
        return replace(self, precision=Precision(precision)) if self.precision is Precision.AUTO else self

    @property
    def numbers(self) -> ElementTypes:
        """Element types that belong to the run's precision. If both `precision` and `device` are "auto", the types are
        those for a CPU.
        """
        return PRECISIONS[precision_on(self.device) if self.precision == Precision.AUTO else self.precision]

    def sequences_at_once(self, data: int) -> int:
        """Number of sequences per forward pass of one data rank. `data` is the number of data ranks."""
        return self.micro_batch_size or self.smallest_batch[1] // data
