"""Text of the page `docs/paper.md`: where each part of the paper is in Crosscut, from the rows of `docs/paper.toml`."""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean

from crosscut.architecture import Operation
from crosscut.config import PRESETS, ModelConfig
from crosscut.config.system.records import from_json
from crosscut.config.system.wording import markdown_table, short
from crosscut.config.training import Recompute
from crosscut.planner import count_parameters, step_traffic
from crosscut.planner.compute import flops_per_step
from crosscut.planner.paper.account import V100
from crosscut.planner.paper.runs import (
    EPOCH_STEPS,
    PAPER_EPOCHS,
    PAPER_FLOPS_PER_SECOND,
    PAPER_HEADLINE,
    PAPER_HEADS,
    PAPER_SCALING,
    PAPER_SPEED_UPS,
    paper_epoch_days,
    paper_highest,
    paper_run,
    paper_scaling,
    paper_seconds,
    paper_speed_up,
)
from crosscut.planner.paper.sections import percent, points
from crosscut.planner.program import PAPER_PROGRAM
from crosscut.planner.time import step_time
from crosscut.scaling.quality.results import QualityResults

ROWS = Path(__file__).with_suffix(".toml")
QUALITY = Path(__file__).with_name("quality-measured.json")
STEPS = 300_000
"""Steps of the paper's trainings (section 4.1.1)."""

EPOCH = ("megatron-8.3b-24-heads", 8)
"""The 8.3B model of Table 4, and its tensor ranks."""
DAY = 86_400

INTRODUCTION = """\
<!-- Written by `python docs/generate.py` from `docs/paper.toml`, with figures of the planner. Change them there. -->

# The paper, place by place

This page says where each part of the Megatron-LM paper ([arXiv 1909.08053v1](https://arxiv.org/abs/1909.08053v1)) is in
Crosscut, with a command that shows it and our figure. Places are those of its first version. Later versions, which
arXiv shows first, number sections, figures and tables differently; of them, only the settings of the BERTs were at
hand. A figure that is called a forecast comes from the planner, which [scaling.md](scaling.md) compares with the paper
row by row. [alive.html](alive.html), to be opened in a browser, shows the cuts, f and g, the loss, the memory, the
norms and the scaling with numbers that move.

On two cores, forecasts take seconds, proofs and the short runs of this page minutes, and `crosscut study quality` and
`crosscut study rate` half an hour each. Some commands need what does not come with Crosscut: your own text in place of
`book.txt`, the test files `wiki.test.tokens` and `lambada_test.jsonl`, the folder `squad`, the files that
`examples/corpus.toml` or `examples/gpt2-small.toml` names, or a BERT trained in `runs/bert`. `runs/demo` is the run of
`make demo`.
"""


def paper_page() -> str:
    """The whole of `docs/paper.md`."""
    parts = [INTRODUCTION]
    for part in tomllib.loads(ROWS.read_text(encoding="utf-8"))["part"]:
        rows = [
            (row["place"], row["paper"], ", ".join(map(link, row["code"])), f"`{row['command']}`", row["ours"])
            for row in part["row"]
        ]
        table = markdown_table(("place", "in the paper", "code", "command", "our figure, and what differs"), rows)
        parts += [f"## {part['title']}", "", *table, ""]
    return "\n".join(parts).format(**computed())


def link(code: str) -> str:
    """Link to the file of a function or a class, `FILE:NAME`."""
    file, name = code.split(":")
    return f"[`{name}`](../crosscut/{file})"


def computed() -> dict[str, str]:
    """The figures that the rows name."""
    large = paper_run(*EPOCH, 64)
    layers = large.model.num_layers
    kept = replace(large, training=replace(large.training, recompute=Recompute.NONE))
    in_layers = [each for each in step_traffic(kept) if each.count == layers and each.operation is Operation.ALL_REDUCE]
    quality = from_json(QualityResults, json.loads(QUALITY.read_text(encoding="utf-8")))
    perplexities = (mean(size.figures("validation")) for size in quality.sizes)
    linear = 512 * PAPER_FLOPS_PER_SECOND
    work = EPOCH_STEPS * flops_per_step(large, recompute=True) / DAY / linear
    own, of_program = (step_time(large, V100, program=program).total for program in (None, PAPER_PROGRAM))
    heads = [paper_scaling(paper_run("megatron-8.3b", 8, num_heads=number)) for number in PAPER_HEADS]
    return {
        "without": f"{STEPS * flops_per_step(large) / 1e21:.2f}",
        "zettaflops": f"{STEPS * flops_per_step(large, recompute=True) / 1e21:.1f}",
        "days": f"{STEPS / EPOCH_STEPS * PAPER_EPOCHS[EPOCH]:.1f}",
        "all_reduces": str(len(in_layers)),
        "parameters": listed(f"{count_parameters(ModelConfig(**PRESETS[name])) / 1e9:.2f}" for name in PAPER_SCALING),
        "weak_8": f"{paper_scaling(paper_run('megatron-8.3b', 8)):.1%}",
        "weak_512": f"{paper_scaling(paper_run('megatron-8.3b', 8, 64)):.1%}",
        "heads": listed(f"{share:.1%}" for share in heads),
        "speed_ups": listed(f"{paper_speed_up(tensor):.2f}" for tensor in PAPER_SPEED_UPS),
        "own_step": f"{own:.2f}",
        "paper_step": f"{paper_seconds(large):.2f}",
        "unfused": f"{of_program - own:.2f}",
        "account": f"{paper_seconds(large) - of_program:.2f}",
        "quality": f"Validation perplexity {listed(f'{one:.1f}' for one in perplexities)}",
        "tokens": short(quality.steps * quality.batch_size * quality.sequence_length),
        "sizes": listed(short(size.parameters) for size in quality.sizes),
        "rates": listed(f"{size.learning_rate:g}" for size in quality.sizes),
        "headline": percent(paper_highest()),
        "headline_more": points(paper_highest() - PAPER_HEADLINE / linear).removeprefix("+"),
        "epoch_more": points(work / paper_epoch_days(*EPOCH) - work / PAPER_EPOCHS[EPOCH]).removeprefix("+"),
        "epochs": listed(f"{paper_epoch_days(*one):.2f}" for one in PAPER_EPOCHS),
    }


def listed(figures: Iterable[str]) -> str:
    """Figures as a phrase: "1, 2 and 3"."""
    *most, last = figures
    return f"{', '.join(most)} and {last}"
