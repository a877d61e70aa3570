"""Requirements on a run and on the devices, which a search checks before it tries layouts."""

from collections.abc import Iterable, Sequence

from crosscut.config import ConfigError, Layout, LayoutError, ModelConfig, RunConfig
from crosscut.config.checks import divisors, listed
from crosscut.config.layouts.limits import tensor_limits
from crosscut.planner.hardware import Hardware
from crosscut.planner.search.reasons import reason_against_arrangement, reason_against_tensor

_MOST_RANKS = 100_000_000
"""Upper limit of `--gpus`: a hundred times the size of the largest machines."""

_MOST_COMBINATIONS = 1_250
"""Upper limit of the combinations that a search tries: about ten seconds. A usual run has a few hundred."""
_MOST_OF_EXPERTS = 4_000
"""The same limit for a model with experts, which has a layout for each number of expert ranks: about half a minute."""


def require_ranks(hardware: Hardware, num_ranks: int) -> None:
    """Raise `ConfigError` if the number of devices is out of range. If the device file has no network, the number must
    also be at most the size of a node.
    """
    if num_ranks < 1:
        raise ConfigError(f"`--gpus` must be at least 1, but is {num_ranks}. Set it to the number of devices.")
    if num_ranks > _MOST_RANKS:
        raise ConfigError(f"`--gpus` must be at most {_MOST_RANKS:,}, but is {num_ranks:,}. Use fewer devices.")
    if hardware.network is None and num_ranks > hardware.ranks_per_node:
        raise ConfigError(
            f"`--gpus` must be at most {hardware.ranks_per_node} for {hardware.name}, but is {num_ranks}. The device "
            f"file has no section [network], so it describes one node of {hardware.ranks_per_node} ranks. Use fewer "
            "devices, or add a section [network] to your own device file."
        )


def require_context_divides(run: RunConfig, num_ranks: int) -> None:
    """Raise `LayoutError` unless the run's number of context ranks divides the number of devices."""
    context = run.layout.context
    if num_ranks % context:
        raise LayoutError(
            f"`--gpus` must be a multiple of `layout.context` ({context}), but is {num_ranks}. "
            f"Try {num_ranks // context * context + context}, or change `layout.context`."
        )


def require_skew(model: ModelConfig, skew: float) -> None:
    """Raise `ConfigError` unless a load of the fullest expert rank is at least the mean, and 1 without experts."""
    if not 1 <= skew < float("inf"):
        raise ConfigError(
            f"`--expert-skew` must be at least 1 and finite, but is {skew:g}. 1 means that all expert ranks have equal "
            "loads; 1.5 means that the fullest one has one and a half times the mean."
        )
    if skew > 1 and not model.num_experts:
        raise ConfigError(
            f"`--expert-skew` must be 1 for a model without experts, but is {skew:g}. Remove `--expert-skew`."
        )


def require_few_combinations(run: RunConfig, layouts: Iterable[Layout], num_ranks: int) -> None:
    """Raise `ConfigError` if the possible layouts and their micro-batch sizes have too many combinations. `layouts` has
    one layout for each possible arrangement of the ranks and each number of expert ranks. A combination without a
    pipeline takes about as long as four with a pipeline, of which the search forecasts only a part.
    """
    name, batch = run.training.smallest_batch
    sizes: dict[int, int] = {}
    number = 0
    for layout in layouts:
        own = layout.share_of(batch)
        if own not in sizes:
            sizes[own] = len(divisors(own))
        number += sizes[own] * (4 if layout.num_stages == 1 else 1)
    most = _MOST_OF_EXPERTS if run.model.num_experts else _MOST_COMBINATIONS
    if number > most:
        raise ConfigError(
            f"`{name}` must allow at most {most:,} combinations of layouts and micro-batches, but "
            f"{batch:,} sequences on {num_ranks:,} GPUs allow {number:,}. Choose a batch size or a number of GPUs with "
            "fewer divisors."
        )


def nothing_cuts(model: ModelConfig, hardware: Hardware, num_ranks: int) -> str:
    """Return the error message for a model that does not fit on one rank and cannot use several tensor ranks. The
    message names the setting that prevents several tensor ranks.
    """
    limits, allowed, before = (
        tensor_limits(model),
        [d for d in divisors(num_ranks) if d > 1],
        [f"`--gpus` ({num_ranks})"],
    )
    for limit in limits:
        fitting = [d for d in allowed if limit.allows(d)]
        if not fitting:
            break
        allowed, before = fitting, [*before, limit.name]
    others = " and ".join(before)
    what = f"have a divisor above 1 in common with {others}"
    if limit.may_share:
        what = f"divide or be a multiple of a tensor size that {others} allow ({listed(allowed)})"
    possible = [
        d
        for d in divisors(limits[0].number)
        if d > 1 and not reason_against_tensor(model, d) and (hardware.network or d <= hardware.ranks_per_node)
    ]
    advice = f"{listed(possible)} GPUs" if possible else "another value, or a GPU with more memory"
    return (
        f"`{limit.setting}` must {what}, but is {limit.number}. The model does not fit on one GPU, so several tensor "
        f"ranks must share it. Try {advice}."
    )


def require_precision(run: RunConfig, hardware: Hardware) -> None:
    """Raise `ConfigError` unless the device file states FLOP/s for the run's precision."""
    precision = run.training.precision
    if precision not in hardware.flops:
        first, *others = sorted(hardware.flops.keys() - {"tf32"}, key=lambda name: -hardware.flops[name])
        has = listed([f'"{first}"{" (the fastest)" if others else ""}', *(f'"{name}"' for name in others)])
        raise ConfigError(
            f"`training.precision` must be a precision of {hardware.name}, but is {precision!r}. Choose {has}."
        )


def require_device(run: RunConfig, hardware: Hardware) -> None:
    """Raise `ConfigError` if `training.device` and `hardware` are different kinds of device (CPU and GPU)."""
    if run.training.device not in ("auto", hardware.device):
        raise ConfigError(
            f'`training.device` must be "auto" or "{hardware.device}" on {hardware.name}, but is '
            f'"{run.training.device}". Set training.device=auto.'
        )


def require_symmetric_memory(run: RunConfig, hardware: Hardware) -> None:
    """Raise `LayoutError` if the run sets `layout.symmetric_memory` on a CPU."""
    if run.layout.symmetric_memory and hardware.device == "cpu":
        raise LayoutError(
            f"`layout.symmetric_memory` must be false for {hardware.name}, but is true. Symmetric memory needs GPUs: "
            "remove the setting."
        )


def require_batch(run: RunConfig, layouts: Sequence[Layout], most_tensor: int) -> None:
    """Raise `LayoutError` if no layout can divide the batch. `layouts` has one layout for each arrangement of the ranks
    along the axes, and `most_tensor` is the largest possible number of tensor ranks.
    """
    num_ranks = layouts[0].world_size // run.layout.context
    (name, batch), least_data = run.training.smallest_batch, num_ranks // most_tensor
    if batch < least_data:
        raise LayoutError(
            f"`{name}` must be at least {least_data}, but is {batch}. A step needs one sequence for each stage of "
            f"each data rank, and {num_ranks} GPUs with at most {most_tensor} tensor ranks have at least "
            f"{least_data} such stages. Raise the batch size, or use at most {batch * most_tensor} GPUs."
        )
    divides = (layout for layout in layouts if layout.divides(batch))
    if all(reason_against_arrangement(run, layout) for layout in divides):
        raise LayoutError(
            f"`{name}` must be divisible by the number of data ranks, but is {batch}. No possible layout "
            f"of {num_ranks} GPUs has a number of data ranks that divides {batch}. Try "
            f"{-(-batch // least_data) * least_data}."
        )
