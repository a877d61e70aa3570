"""Which runs a measured study compares: the paper's (section 5.1), as large as the ranks at hand allow.

Weak scaling (Figure 6): with the tensor ranks the model grows, so that the parameters of a rank stay about the same;
with the data ranks the batch grows. Strong scaling (Table 3): one model and one batch over more tensor ranks. Ranks are
powers of two, since the ranks that a case leaves idle are arranged like those that it uses.
"""

from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import Any, Literal, NamedTuple

from crosscut.config import ConfigError, ModelConfig, ResolvedRun
from crosscut.config.training import Device

Study = Literal["tensor", "data", "strong", "process"]
"""Weak scaling over tensor ranks; over data ranks too; strong scaling; and one process that has all cores."""

_PAPERS_RANKS = 8
"""The most tensor ranks of the paper's Figure 6 and Table 3."""

_SHAPE = {"num_layers": 4, "num_heads": 16, "dropout": 0.0}
"""A tenth of the layers of the paper's 1.2B model, with its heads."""

DEFAULT_RUNS: dict[str, dict[str, Any]] = {
    "cpu": {
        "model": {**_SHAPE, "hidden_size": 256, "vocab_size": 1024, "max_sequence_length": 128},
        "training": {"batch_size": 8, "sequence_length": 128},
    },
    "cuda": {
        "model": {**_SHAPE, "hidden_size": 1536, "vocab_size": 5120},
        "training": {"batch_size": 8, "compile": "off"},
    },
}
"""Model and batch that one rank trains where no run is given: the paper's 8 sequences of its smallest model, on a GPU
at the paper's width, on a core at a sixth of that width."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Cores or GPUs that the ranks run on."""

    kind: Literal["cpu", "cuda"]
    count: int
    """Number of cores or GPUs."""
    most: int
    """The most ranks of a case."""

    def sharing(self, num_ranks: int) -> int:
        """Ranks that share a core or a GPU; above 1 where there are more ranks than cores or GPUs."""
        return ceil(num_ranks / self.count)


class Case(NamedTuple):
    """A run and the threads that each of its ranks computes with (on a CPU)."""

    run: ResolvedRun
    threads: int


def choose_devices(name: str, ranks: int | None, *, cores: int, gpus: int) -> Devices:
    """GPUs where there are several, else cores; `name` is `training.device`, `ranks` the most that a user asks for.

    Without `ranks`: as many as there are devices, at most the paper's 8, and on cores at least 4, so that
    oversubscription is seen. Raises `ConfigError` where there are too few devices to compare.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if name == "cuda" or (name == "auto" and gpus > 1) else "cpu"
    count, what, instead = cores, "core", "Allow it more"
    if kind == "cuda":
        count, what, instead = gpus, "GPU", "Set training.device=cpu"
    if count < 2:
        raise ConfigError(
            f"`crosscut study measure` must have at least 2 {what}s to put ranks on, but has {count}. {instead}."
        )
    if ranks is None:
        most = _power_of_two(min(count, _PAPERS_RANKS))
        return Devices(kind=kind, count=count, most=most if kind == "cuda" else max(most, 4))
    if ranks < 2 or ranks != _power_of_two(ranks):
        raise ConfigError(f"`--ranks` must be a power of two above 1, but is {ranks}. Try {_power_of_two(ranks)}.")
    if kind == "cuda" and ranks > count:
        raise ConfigError(f"`--ranks` must be at most this machine's {count} GPUs, but is {ranks}.")
    return Devices(kind=kind, count=count, most=ranks)


def study_cases(run: ResolvedRun, devices: Devices) -> dict[Study, list[Case]]:
    """The cases of every study, the fewest ranks first; some stand in several.

    `run` is what one rank trains: its layout's sizes are replaced, its batch is that of one data rank. Raises
    `LayoutError` where the tensor ranks do not divide the model's heads.
    """
    sizes = [2**power for power in range(devices.most.bit_length())]
    grown = {tensor: grow(run.model, tensor) for tensor in sizes}
    layouts = sorted(
        ((tensor, data) for tensor in sizes for data in sizes if data > 1 and tensor * data <= devices.most),
        key=lambda layout: (layout[0] * layout[1], layout[0]),
    )
    studies: dict[Study, list[Case]] = {
        "tensor": [_case(run, devices, grown[tensor], tensor) for tensor in sizes],
        "data": [_case(run, devices, grown[tensor], tensor, data) for tensor, data in layouts],
        "strong": [_case(run, devices, run.model, tensor) for tensor in sizes],
    }
    if devices.kind == "cpu":
        models = (run.model, grown[whole_ranks(devices)])
        studies["process"] = [_case(run, devices, model, 1, threads=devices.count) for model in models]
    return studies


def whole_ranks(devices: Devices) -> int:
    """The most ranks that have a device each."""
    return min(devices.most, _power_of_two(devices.count))


def grow(model: ModelConfig, tensor: int) -> ModelConfig:
    """The model for so many tensor ranks, with as many parameters on each as the given one has in all.

    Width and depth share the growth as in Figure 6, the heads keeping their size: heads grow with the cube root of the
    ranks, to a multiple of them, and layers by what is left. From the 16 heads of the paper's 1.2B model come its 20,
    24 and 32.
    """
    group = model.num_heads // model.num_kv_heads
    unit = lcm(tensor, group)
    heads = model.num_heads if tensor == 1 else max(1, round(model.num_heads * tensor ** (1 / 3) / unit)) * unit
    return replace(
        model,
        num_layers=max(1, round(model.num_layers * tensor * (model.num_heads / heads) ** 2)),
        hidden_size=model.hidden_size * heads // model.num_heads,
        num_heads=heads,
        num_kv_heads=heads // group,
        mlp_size=model.mlp_size * heads // model.num_heads // heads * heads,
    )


def _case(
    run: ResolvedRun, devices: Devices, model: ModelConfig, tensor: int, data: int = 1, *, threads: int = 1
) -> Case:
    symmetric = run.layout.symmetric_memory and tensor > 1
    layout = replace(run.layout, tensor=tensor, data=data, shard_group=0, symmetric_memory=symmetric)
    batch = run.training.batch_size // run.layout.data * data
    training = replace(run.training, batch_size=batch, device=Device(devices.kind))
    return Case(run.with_config(replace(run.config, model=model, layout=layout, training=training)), threads)


def _power_of_two(number: int) -> int:
    """The largest that is not above `number`, but at least 2."""
    return 1 << max(1, number.bit_length() - 1)
