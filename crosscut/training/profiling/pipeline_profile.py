"""Report of the recorded steps of a pipeline, for `--profile`: the bubble and the waiting time of each rank."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from crosscut.architecture.pipeline import without_messages
from crosscut.config import write_whole
from crosscut.planner.time import bubble_share
from crosscut.training.profiling.passes import PassShares, PipelineStep

PASSES_FILE = "passes.json"


class PipelineProfile:
    """Recorded steps of all pipelines of a layout."""

    def __init__(self, steps: dict[int, list[PipelineStep]]) -> None:
        """`steps` maps the number of each recorded step, counted from 1, to the step of every pipeline."""
        self.steps = steps

    def rows(self) -> list[dict[str, object]]:
        """Return one row per step, pipeline and rank for `profile.json`. The shares of a row add up to 1."""
        return [
            {
                "step": number,
                "pipeline": pipeline,
                "rank": rank,
                "stages": list(_stages(recorded, rank)),
                "seconds": recorded.seconds[rank],
                **shares._asdict(),
                "weight_gradients": sum(timed.weight_gradients for timed in recorded.timeline.ranks[rank]),
            }
            for number, pipelines in self.steps.items()
            for pipeline, recorded in enumerate(pipelines)
            for rank, shares in enumerate(recorded.shares())
        ]

    def write_passes(self, folder: Path) -> None:
        """Write the start and the end of each pass, in seconds since the start of its step, to `passes.json`: one line
        per step, pipeline and rank.
        """
        lines = [
            json.dumps({"step": number, "pipeline": pipeline, "rank": rank, "passes": passes})
            for number, pipelines in self.steps.items()
            for pipeline, recorded in enumerate(pipelines)
            for rank, timed in enumerate(recorded.timeline.ranks)
            for passes in [[[str(t.action), round(t.start, 6), round(t.end, 6)] for t in timed]]
        ]
        write_whole(folder / PASSES_FILE, "[\n" + ",\n".join(lines) + "\n]\n")

    def print(self, table: Table, console: Console) -> None:
        """Add a row to `table` for each rank of the first pipeline, with the rank's mean shares of a step's time, and
        print the table. Then print the pipeline's bubble and the published formula.
        """
        first = [pipelines[0] for pipelines in self.steps.values()]
        each = [recorded.shares() for recorded in first]
        for rank, of_steps in enumerate(zip(*each, strict=True)):
            means = PassShares(*(sum(values) / len(values) for values in zip(*of_steps, strict=True)))
            stages = ", ".join(map(str, _stages(first[0], rank)))
            table.add_row(str(rank), stages, *(f"{share:.1%}" for share in means))
        console.print(table)
        schedule = first[0].timeline.schedule
        formula = bubble_share(schedule.num_ranks, schedule.num_micro_batches, chunks=schedule.num_chunks)
        bubble, waiting = _over_computing(first)
        console.print(
            f"bubble {bubble:.3f} and waiting {waiting:.3f} of the computing time; (P - 1) / (V m) = {formula:.3f}\n"
        )


def _stages(recorded: PipelineStep, rank: int) -> range:
    """Return the numbers of the stages of a rank."""
    schedule = recorded.timeline.schedule
    return range(rank, schedule.num_stages, schedule.num_ranks)


def _over_computing(steps: Sequence[PipelineStep]) -> tuple[float, float]:
    """Return the bubble and the waiting time of all ranks together, each divided by their computing time. Both results
    are means over the steps.
    """
    bubbles = [without_messages(step.timeline).mean_bubble for step in steps]
    idle = [step.timeline.mean_bubble for step in steps]
    bubble = sum(bubbles) / len(bubbles)
    return bubble, sum(idle) / len(idle) - bubble
