"""Data of the page `docs/alive.html`: figures of the planner, and recordings of tiny runs. The page itself is in
`docs/alive/`. `python docs/generate.py` writes it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import exp
from pathlib import Path
from statistics import fmean, median

from crosscut.architecture import Operation
from crosscut.config import PRESETS, Layout, LayoutError, ModelConfig, RunConfig, padded_vocab_size
from crosscut.config.pages.inlined import inline_page
from crosscut.config.system.records import from_json
from crosscut.config.system.wording import short
from crosscut.config.training import Recompute
from crosscut.planner import count_parameters, step_traffic
from crosscut.planner.candidate import target_of
from crosscut.planner.compute import flops_per_step
from crosscut.planner.facts import MEMORY_CATEGORIES
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.memory import forecast_memory
from crosscut.planner.messages.collective import Collective
from crosscut.planner.messages.traffic import loss_messages
from crosscut.planner.paper.runs import (
    EPOCH_STEPS,
    PAPER_EPOCHS,
    PAPER_FLOPS_PER_SECOND,
    PAPER_HEADLINE,
    PAPER_HEADS,
    PAPER_SCALING,
    PAPER_WEAK_SCALING,
    paper_epoch_days,
    paper_highest,
    paper_run,
    paper_scaling,
)
from crosscut.scaling.quality.report import FIGURES, PAPERS_SIZES, spread
from crosscut.scaling.quality.results import QualityResults

DOCS = Path(__file__).parent
DEVICE = KNOWN_HARDWARE["v100-32gb-dgx2h"]
LARGE = "megatron-8.3b"
FEWER_HEADS = "megatron-8.3b-24-heads"
VOCABULARIES = {"Llama 2": "llama2-7b", "GPT-2": LARGE, "Llama 3": "llama3-8b", "Qwen 3": "qwen3-0.6b"}
"""Preset that has the vocabulary of each name."""
SEQUENCES = (1, 2, 4, 8, 16, 32)
LENGTHS = (512, 1024, 2048, 4096, 8192)
RANKS = (2, 4, 8, 16)
DAY = 86_400
SHARES = (
    (
        "Abstract and section 1",
        f"The paper does not name the run. Ours is the highest with {', '.join(map(str, PAPER_HEADS))} heads.",
    ),
    ("Section 5.1.1, Figure 6: model parallel", "No data parallelism: only the messages of f and g."),
    ("Section 5.1.1, Figure 6: model and data parallel", "Also the messages of the gradients."),
    ("Table 4", "The days of a whole epoch, with everything between the steps. Our forecast has the steps only."),
)
"""Place in the paper of each share of scaling, and a note."""

Facts = dict[str, object]


def alive_page() -> str:
    """The whole of `docs/alive.html`."""
    return inline_page(DOCS / "alive" / "page.html", {"data": figures()})


def figures() -> Facts:
    """All data of the page, by figure."""
    recorded = json.loads((DOCS / "alive-recorded.json").read_text(encoding="utf-8"))
    measured = json.loads((DOCS / "depth-measured.json").read_text(encoding="utf-8"))
    return {
        "cut": recorded,
        "layer": layer(),
        "loss": loss(),
        "memory": memory(),
        "norms": norms(measured),
        "scaling": scaling(),
        "quality": quality(),
    }


def layer() -> Facts:
    """Messages of one layer of the 8.3B model on 8 tensor ranks, in the order of a step."""
    run = paper_run(LARGE, PAPER_SCALING[LARGE])
    run = replace(run, training=replace(run.training, recompute=Recompute.NONE))
    of_layer = [each for each in step_traffic(run) if each.count == run.model.num_layers]
    return {
        "model": sized(LARGE),
        "ranks": run.layout.tensor,
        "batch": run.training.batch_size,
        "length": run.training.sequence_length,
        "hidden": run.model.hidden_size,
        "messages": [
            {
                "phase": str(each.phase),
                "purpose": each.purpose,
                "operation": str(each.operation),
                "elements": each.elements,
                "bytes": each.wire_bytes / each.count,
            }
            for each in of_layer
        ],
    }


def loss() -> Facts:
    """Elements of the loss of a step, and the bytes that a rank sends, for each position of the controls."""
    names = {f"{name}: {PRESETS[preset]['vocab_size']:,}": preset for name, preset in VOCABULARIES.items()}
    grid = {}
    for (v, preset), (b, batch), (s, length), (t, ranks) in product(
        enumerate(names.values()), enumerate(SEQUENCES), enumerate(LENGTHS), enumerate(RANKS)
    ):
        grid[f"{v} {b} {s} {t}"] = [number for way in ways(preset, batch, length, ranks) for number in amount(way)]
    return {
        "controls": {
            "vocabulary V": list(names),
            "sequences b": [f"{number}" for number in SEQUENCES],
            "tokens of a sequence s": [f"{number:,}" for number in LENGTHS],
            "tensor ranks": [f"{number}" for number in RANKS],
        },
        "first": [1, 3, 1, 2],
        "grid": grid,
    }


def ways(preset: str, batch: int, length: int, ranks: int) -> Iterator[list[Collective]]:
    """Messages that gather the logits, the paper's b s elements, and the messages of our loss."""
    large, vocab_size = paper_run(LARGE, ranks), PRESETS[preset]["vocab_size"]
    run = RunConfig(
        model=replace(large.model, vocab_size=vocab_size, max_sequence_length=length),
        layout=Layout(tensor=ranks),
        training=replace(large.training, batch_size=batch, sequence_length=length),
    )
    ours = loss_messages(run, target_of(run, device="cuda"))
    tokens, numbers = batch * length, run.training.numbers
    gathered = {
        "operation": Operation.ALL_GATHER,
        "elements": tokens * padded_vocab_size(vocab_size, ranks),
        "element_bytes": numbers.compute_bytes,
    }
    one = replace(ours[0], count=1, elements=tokens)
    yield [replace(one, **gathered)]
    yield [one]
    yield ours


def amount(messages: list[Collective]) -> tuple[int, int]:
    """Elements of the messages, and the bytes that a rank sends."""
    return sum(each.count * each.elements for each in messages), round(sum(each.wire_bytes for each in messages))


def memory() -> Facts:
    """Memory of a rank of the paper's models, in MB, for each number of tensor ranks that the heads allow."""
    training = paper_run(LARGE, 1).training
    return {
        "device": DEVICE.name,
        "precision": str(training.precision),
        "batch": training.batch_size,
        "limit": round(DEVICE.memory / 1e6),
        "categories": MEMORY_CATEGORIES,
        "models": [
            {"name": sized(preset), "paper": ranks, "rows": rows(preset)} for preset, ranks in PAPER_SCALING.items()
        ],
    }


def rows(preset: str) -> list[Facts]:
    """Number of tensor ranks, with the MB of each category."""
    found = []
    for tensor in PAPER_SCALING.values():
        try:
            forecast = forecast_memory(paper_run(preset, tensor), capability=DEVICE.capability)
        except LayoutError:
            continue
        found.append({"tensor": tensor, "parts": [round(getattr(forecast, name) / 1e6) for name in MEMORY_CATEGORIES]})
    return found


def norms(measured: dict) -> Facts:
    """Training losses of the recorded runs by place of the norms, layers and rate, and their validation losses."""
    named = re.compile(r"(\d+) layers, norm (\w+), rate ([\d.]+), seed \d+")
    runs: dict[str, list] = {}
    for name, run in measured["runs"].items():
        depth, place, rate = named.fullmatch(name).groups()
        runs.setdefault(f"{place} {depth} {rate}", []).append(run)
    keys = [key.split() for key in runs]
    scores = {key: sorted(run["validation_loss"] for run in of_key) for key, of_key in runs.items()}
    return {
        "machine": measured["machine"],
        "steps": measured["steps"],
        "guess": measured["frequency_loss"],
        "depths": sorted({depth for _, depth, _ in keys}, key=int),
        "rates": sorted({rate for _, _, rate in keys}, key=float),
        "losses": {key: [run["losses"] for run in of_key] for key, of_key in runs.items()},
        "scores": {key: [median(found), found[0], found[-1]] for key, found in scores.items()},
    }


def scaling() -> list[Facts]:
    """Shares of the paper: the place, what is divided by what, the paper's share, our forecast, and a note."""
    eight, many, fewer = paper_run(LARGE, 8), paper_run(LARGE, 8, 64), paper_run(FEWER_HEADS, 8, 64)
    gpus, name = many.layout.world_size, f"the {sized(LARGE)} model"
    linear = gpus * PAPER_FLOPS_PER_SECOND
    single = f"{gpus} times the {PAPER_FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s of one GPU"
    work = EPOCH_STEPS * flops_per_step(fewer, recompute=True) / DAY / linear
    heads, fewer_heads = many.model.num_heads, fewer.model.num_heads
    shares = (
        (
            f"highest rate of {gpus} GPUs, {PAPER_HEADLINE / 1e15:.1f} PFLOP/s",
            single,
            PAPER_HEADLINE / linear,
            paper_highest(),
        ),
        (f"rate of {name} on 8 GPUs", "8 times that of one GPU", PAPER_WEAK_SCALING[8, 1], paper_scaling(eight)),
        (
            f"rate of {name}, {heads} heads, on 8 x 64 GPUs",
            f"{gpus} times that of one GPU",
            PAPER_WEAK_SCALING[8, 64],
            paper_scaling(many),
        ),
        (
            f"rate over an epoch of {name}, {fewer_heads} heads, on 8 x 64 GPUs",
            single,
            work / PAPER_EPOCHS[FEWER_HEADS, 8],
            work / paper_epoch_days(FEWER_HEADS, 8),
        ),
    )
    return [
        {"place": place, "of": of, "by": by, "paper": paper, "ours": ours, "note": note}
        for (place, note), (of, by, paper, ours) in zip(SHARES, shares, strict=True)
    ]


def quality() -> Facts:
    """Curves of the measured sizes, and their scores after the last step beside the paper's."""
    measured = json.loads((DOCS / "quality-measured.json").read_text(encoding="utf-8"))
    results = from_json(QualityResults, measured)
    told = [one for one in FIGURES if all(size.figures(one.name) for size in results.sizes)]
    tokens = results.steps * results.batch_size * results.sequence_length
    return {
        "words": f"Validation perplexity of models that read {short(tokens)} tokens, a line for each of "
        f"{len(results.sizes[0].runs)} seeds, {results.machine['date']}, {results.machine['device']}. The bars are "
        "means over the seeds, with their range. The paper's models have another vocabulary and other data, so that "
        "only the order of its figures can be compared.",
        "steps": results.steps,
        "papers": PAPERS_SIZES,
        "sizes": [
            {
                "name": size.name,
                "parameters": short(size.parameters),
                "curve": f"{size.curve()[-1][1]:.1f}",
                "curves": [[[step, round(exp(loss), 2)] for step, loss in run.validation] for run in size.runs],
            }
            for size in results.sizes
        ],
        "figures": [
            {
                "title": one.title,
                "paper": [one.shown(value) for value in one.paper],
                "values": [[fmean(of), min(of), max(of)] for of in (size.figures(one.name) for size in results.sizes)],
                "words": [spread(one, size.figures(one.name)) for size in results.sizes],
            }
            for one in told
        ],
    }


def sized(preset: str) -> str:
    """Size of a model: 8.3B."""
    return f"{count_parameters(ModelConfig(**PRESETS[preset])) / 1e9:.1f}B"
