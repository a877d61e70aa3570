"""Choose a layout for a number of ranks that differs from the run's own layout (`layout.elastic`).

With `data`, the numbers of tensor, pipeline and context ranks stay the same, and the number of data ranks D' follows
from the number of ranks. The batch B also stays the same, so each data rank gets B / D' sequences, and D' must divide
B. If the largest possible D' does not divide B, the next smaller D' that divides B is used, and the remaining ranks are
idle: an idle rank costs less than a run that stops until a machine is repaired. With `all`, the search over layouts
chooses.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from crosscut.config import ConfigError, LayoutError, RunConfig
from crosscut.config.checks import divisors
from crosscut.config.layout import Elastic
from crosscut.planner.hardware import Hardware
from crosscut.planner.search.layouts import search_layouts


def run_on(run: RunConfig, num_ranks: int, hardware: Hardware | None) -> RunConfig:
    """Return the run with a layout for at most `num_ranks` ranks. The batch and the order of the data stay the same. A
    run whose layout has `num_ranks` ranks is returned unchanged, and so is a run with `layout.elastic = "off"`.

    `hardware` is only needed with "all"; None means that the planner does not know the device. Raises `LayoutError` if
    no layout works on `num_ranks` ranks, or if the device is unknown but needed.
    """
    if run.layout.elastic is Elastic.OFF or run.layout.world_size == num_ranks:
        return run
    if run.layout.elastic is Elastic.DATA:
        return _with_other_data_ranks(run, num_ranks)
    if hardware is None:
        raise LayoutError(
            '`layout.elastic` must be "data" on a device that the planner does not know, but is "all". Set '
            'layout.elastic="data".'
        )
    return _fastest(run, num_ranks, hardware)


def _with_other_data_ranks(run: RunConfig, num_ranks: int) -> RunConfig:
    """Return the run with as many data ranks as the number of ranks and the batch allow."""
    layout = run.layout
    fixed = layout.world_size // layout.data
    if num_ranks < fixed:
        names = " x ".join(f"`layout.{name}`" for name in reversed(layout.axes) if name != "data")
        raise LayoutError(
            f"{names or 'The layout'} must be at most the number of processes ({num_ranks}), but is {fixed}. With "
            f'layout.elastic="data", only the number of data ranks changes. Start at least {fixed} processes, or set '
            'layout.elastic="all".'
        )
    for data in range(num_ranks // fixed, 0, -1):
        if fitted := next(_with_data_ranks(run, data), None):
            return fitted
    raise LayoutError(  # one data rank divides every batch, but not every teacher
        f"`teacher.tensor` must divide the number of ranks that are left (at most {num_ranks}), but is "
        f"{run.teacher.tensor}. Start more processes, or choose a smaller teacher.tensor."
    )


def _with_data_ranks(run: RunConfig, data: int) -> Iterator[RunConfig]:
    """Yield runs with `data` data ranks, starting with the largest micro-batch. A micro-batch has at most as many
    sequences as in `run`, so that its activations still fit into memory. As many ranks share experts as possible, but
    at most as many as in `run`.
    """
    (_, batch), group = run.training.smallest_batch, run.layout.shard_group
    if batch % data:
        return
    expert = gcd(run.layout.expert, data * run.layout.context)
    layout = replace(run.layout, data=data, expert=expert, shard_group=group if group and data % group == 0 else 0)
    for micro in reversed(divisors(batch // data)):
        if micro > run.micro_batch_size:
            continue
        try:  # a pipeline with several stages per rank does not allow every number of micro-batches
            yield replace(run, layout=layout, training=replace(run.training, micro_batch_size=micro))
        except ConfigError:
            continue


def _fastest(run: RunConfig, num_ranks: int, hardware: Hardware) -> RunConfig:
    """Return the run with the fastest layout that fits into memory, on as many of the ranks as possible."""
    reason = ""
    for number in range(num_ranks, 0, -1):
        try:
            plans = search_layouts(run, hardware, number)
        except ConfigError as error:
            reason = reason or str(error)
            continue
        if plans.fitting:
            return plans.fitting[0].run(run)
    raise LayoutError(
        f"The run must fit on the {num_ranks} processes that were started, but no layout fits"
        f"{f': {reason}' if reason else ' into their memory.'} Start more processes; `crosscut plan` lists what fits."
    )
