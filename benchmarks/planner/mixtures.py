"""Plans of published mixtures of experts, beside the published rates of other programs.

    python benchmarks/planner/mixtures.py            # half a minute
    python benchmarks/planner/mixtures.py --tiny     # only the smaller model

For each model, the plan searches the layouts of Crosscut on as many H100s as in the published run. The fastest layout
and the fastest one with expert ranks are shown. `crosscut study scaling` forecasts the published layouts themselves.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, markdown
from benchmarks.machine import print_machine
from crosscut.config import ModelConfig, RunConfig, TrainingConfig
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.paper.mixtures import MIXTURE_ROWS, MODELS, MixtureRow
from crosscut.planner.search import Plan, Plans, search_layouts

H100, LENGTH = KNOWN_HARDWARE["h100-sxm"], 4096
PUBLISHED = (MIXTURE_ROWS[4], MIXTURE_ROWS[2])
"""Qwen3-30B-A3B on 16 H100s, and DeepSeek-V3 on 1,024."""


def planned(row: MixtureRow) -> Plans:
    """Plan the model of a row on as many devices, with as many sequences."""
    training = TrainingConfig(batch_size=row.batch_size, sequence_length=LENGTH, precision="bfloat16")
    run = RunConfig(model=ModelConfig(**MODELS[row.model]), training=training)
    return search_layouts(run, H100, row.layout.world_size)


def line(row: MixtureRow, plan: Plan) -> list[object]:
    """Cells of a layout in the table."""
    chosen, size = plan.candidate, row.layout.world_size
    rate = row.batch_size * LENGTH / plan.time.total / size
    settings = f"{chosen.layout}, recompute {chosen.training.recompute}, micro-batch {chosen.micro_batch_size}"
    figures = (f"{plan.memory.total / 1e9:.1f}", f"{rate:,.0f}", f"{row.tokens_per_second:,.0f}")
    return [f"{row.model} on {size:,}", settings, *figures]


def main() -> None:
    options = command_line(__doc__, tiny="plan only the smaller model").parse_args()
    print_machine()
    rows, seconds = [], []
    for row in PUBLISHED[: 1 if options.tiny else None]:
        began = time.process_time()
        plans = planned(row)
        seconds.append(f"{row.model} {time.process_time() - began:.0f} s")
        with_experts = next(plan for plan in plans.fitting if plan.candidate.layout.expert > 1)
        rows += [line(row, plan) for plan in dict.fromkeys((plans.fitting[0], with_experts))]
    head = ("model and GPUs", "layout", "GB", "tokens/s a GPU, planned", "published, on another layout")
    print(f"\n{markdown(head, rows)}\n\nProcessor time of the searches: {', '.join(seconds)}.")


if __name__ == "__main__":
    main()
