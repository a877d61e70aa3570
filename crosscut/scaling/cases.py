"""Runs of a measured study: the paper's runs (section 5.1), as large as the available ranks allow.

For weak scaling (Figure 6), the model grows with the number of tensor ranks, so the parameters per rank stay about the
same, and the batch grows with the number of data ranks. For strong scaling (Table 3), one model and one batch are run
on more tensor ranks. The same model and batch are also run on more ranks along other axes (`STRONG_SCALING`).

The ranks are started once for all cases. For each case, the ranks are divided into groups of the size that the case
needs, and the first group runs the case. The number of ranks of a case must therefore divide the number of started
ranks. All numbers of ranks are powers of two, so they meet this condition.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal, NamedTuple

from crosscut.config import ConfigError, ModelConfig, ResolvedRun
from crosscut.config.axes import OPTIONS
from crosscut.config.checks import divisors
from crosscut.config.layouts.growth import grow
from crosscut.config.training import Device

Study = Literal["tensor", "data", "strong", "pipeline", "context", "process"]
"""Name of a study: weak scaling over tensor ranks ("tensor"), weak scaling over tensor x data ranks ("data"), the
studies in `STRONG_SCALING`, and one process with all cores ("process")."""

STRONG_SCALING: Mapping[Study, str] = {"strong": "tensor", "pipeline": "pipeline", "context": "context"}
"""Studies of strong scaling. Each study's name is mapped to the field of `Layout` that sets the study's number of
ranks."""

_PAPERS_RANKS = 8
"""Maximum number of tensor ranks in the paper's Figure 6 and Table 3."""

_MICRO_BATCHES = 4
"""Number of micro-batches per rank of a pipeline, if the batch has enough sequences. According to Huang et al. 2019
(GPipe, arXiv 1811.06965), the bubble of a pipeline is negligible with this number or more."""

_SHAPE = {"num_layers": 4, "num_heads": 16, "dropout": 0.0}
"""Shape of the default model: a tenth of the layers of the paper's 1.2B model, and the same number of heads."""

DEFAULT_RUNS: dict[str, dict[str, Any]] = {
    "cpu": {
        "model": {**_SHAPE, "hidden_size": 256, "vocab_size": 1024, "max_sequence_length": 128},
        "training": {"batch_size": 8, "sequence_length": 128},
    },
    "cuda": {
        "model": {**_SHAPE, "hidden_size": 1536, "vocab_size": 5120},
        "training": {"batch_size": 8, "sequence_length": 1024, "compile": "off"},
    },
}
"""Model and batch of one rank if the user gives no run: 8 sequences as in the paper, and a model with as many heads as
the paper's smallest model and a tenth of its layers. On a GPU, the hidden size is the paper's. On a CPU core, it is a
sixth of the paper's.
"""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """CPU cores or GPUs on which the ranks run."""

    kind: Literal["cpu", "cuda"]
    count: int
    """Number of cores or GPUs."""
    most: int
    """Maximum number of ranks in a case."""

    def sharing(self, num_ranks: int) -> int:
        """Number of ranks per core or GPU, rounded up. Above 1 if there are more ranks than cores or GPUs."""
        return ceil(num_ranks / self.count)


class Case(NamedTuple):
    """A run, and the number of threads that each rank of the run uses on a CPU."""

    run: ResolvedRun
    threads: int


class Cases(NamedTuple):
    """Cases of every study, and the numbers of ranks that the studies leave out."""

    studies: Mapping[Study, list[Case]]
    """Cases, keyed by study, in ascending order of their numbers of ranks. A case may belong to several studies."""
    left_out: Sequence[str]
    """Sentences that name the numbers of ranks that the run does not allow, with the reason. There is at most one
    sentence for each study of strong scaling."""


def choose_devices(name: str, ranks: int | None, *, cores: int, gpus: int) -> Devices:
    """Choose GPUs if there are several, and CPU cores in all other cases. `name` is the value of `training.device`;
    "cpu" or "cuda" forces the choice. `ranks` is the user's maximum number of ranks.

    If `ranks` is None, the maximum is the number of devices, but at most 8, as in the paper. On cores the maximum is at
    least 4, so that the study shows the effect of oversubscription. Raises `ConfigError` if there are fewer than 2
    devices, if `ranks` is not a power of two above 1, or if there are fewer GPUs than `ranks`.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if name == "cuda" or (name == "auto" and gpus > 1) else "cpu"
    count, what, instead = cores, "core", "Give the process more cores"
    if kind == "cuda":
        count, what, instead = gpus, "GPU", "Set training.device=cpu"
    if count < 2:
        raise ConfigError(
            f"`crosscut study measure` must have at least 2 {what}s for its ranks, but has {count}. {instead}."
        )
    if ranks is None:
        most = _power_of_two(min(count, _PAPERS_RANKS))
        return Devices(kind=kind, count=count, most=most if kind == "cuda" else max(most, 4))
    if ranks < 2 or ranks != _power_of_two(ranks):
        raise ConfigError(f"`--ranks` must be a power of two above 1, but is {ranks}. Try {_power_of_two(ranks)}.")
    if kind == "cuda" and ranks > count:
        raise ConfigError(
            f"`--ranks` must be at most {count}, the number of this machine's GPUs, but is {ranks}. Choose a smaller "
            "power of two."
        )
    return Devices(kind=kind, count=count, most=ranks)


def study_cases(run: ResolvedRun, devices: Devices) -> Cases:
    """Choose the cases of every study.

    `run` gives the model for one rank and the batch for one data rank. The numbers of ranks in the run's layout are
    replaced. A study of strong scaling ends before the first number of ranks that the run does not allow, for example a
    number of pipeline ranks above the number of layers. Raises `ConfigError` if the run does not allow a case of weak
    scaling.
    """
    sizes = [2**power for power in range(devices.most.bit_length())]
    grown = {tensor: grow(run.model, tensor) for tensor in sizes}
    layouts = sorted(
        ((tensor, data) for tensor in sizes for data in sizes if data > 1 and tensor * data <= devices.most),
        key=lambda layout: (layout[0] * layout[1], layout[0]),
    )
    studies: dict[Study, list[Case]] = {
        "tensor": [_case(run, devices, grown[tensor], tensor=tensor) for tensor in sizes],
        "data": [_case(run, devices, grown[tensor], tensor=tensor, data=data) for tensor, data in layouts],
    }
    left_out: list[str] = []
    for study, axis in STRONG_SCALING.items():
        studies[study], reasons = _strong_scaling(run, devices, axis, sizes)
        left_out.extend(reasons)
    if devices.kind == "cpu":
        models = (run.model, grown[whole_ranks(devices)])
        studies["process"] = [_case(run, devices, model)._replace(threads=devices.count) for model in models]
    return Cases(studies, left_out)


def _strong_scaling(
    run: ResolvedRun, devices: Devices, axis: str, sizes: Sequence[int]
) -> tuple[list[Case], list[str]]:
    """Return the cases of strong scaling along an axis. If the run does not allow one of the sizes, also return a
    sentence with the reason.
    """
    cases: list[Case] = []
    for size in sizes:
        try:
            cases.append(_case(run, devices, run.model, **{axis: size}))
        except ConfigError as error:
            return cases, [f"Strong scaling has no row with {size} or more {axis} ranks: {error}"]
    return cases, []


def whole_ranks(devices: Devices) -> int:
    """Return the largest number of ranks that is a power of two and gives each rank a core or GPU of its own."""
    return min(devices.most, _power_of_two(devices.count))


def _case(run: ResolvedRun, devices: Devices, model: ModelConfig, **sizes: int) -> Case:
    """Return a case with one thread per rank. `sizes` maps fields of `Layout` to numbers of ranks. All other axes have
    one rank.
    """
    ranks: dict[str, Any] = dict.fromkeys(OPTIONS, 1) | sizes
    asked, batch = run.layout, run.layout.share_of(run.training.batch_size)
    layout = replace(
        asked,
        **ranks,
        shard_group=0,
        symmetric_memory=asked.symmetric_memory and ranks["tensor"] > 1,
        stages=(),
        stages_per_rank=asked.stages_per_rank if ranks["pipeline"] > 1 else 1,
    )
    training = replace(
        run.training,
        batch_size=batch * ranks["data"],
        micro_batch_size=_micro_batch_size(batch, run.training.micro_batch_size, ranks["pipeline"]),
        device=Device(devices.kind),
    )
    return Case(run.with_config(replace(run.config, model=model, layout=layout, training=training)), threads=1)


def _micro_batch_size(batch: int, asked: int, pipeline: int) -> int:
    """Return the number of sequences per micro-batch of a case with `pipeline` pipeline ranks.

    `batch` is the number of sequences per data rank, and `asked` is the run's own micro-batch size, or 0 if the run has
    none. Without a pipeline, the result is `asked`. With a pipeline, the result is small enough that a step has at
    least `_MICRO_BATCHES` micro-batches for each rank, if the batch has enough sequences. The result is never larger
    than an `asked` above 0.
    """
    if pipeline == 1:
        return asked
    most = min(asked or batch, max(1, batch // (_MICRO_BATCHES * pipeline)))
    return max(size for size in divisors(batch) if size <= most)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`, but at least 2."""
    return 1 << max(1, number.bit_length() - 1)
