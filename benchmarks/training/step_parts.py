"""The parts of a training step of a small model, in Crosscut and in the plain program, at several widths.

    python benchmarks/training/step_parts.py

The recipe is that of `benchmarks/first_minutes.py` with other widths and few steps. Each program and width has a
process of its own with one thread, and the processes run in turns. A part's time is processor time of the thread that
runs the part, so other programs on the machine disturb it little. A figure is the median over the steps after the
warm-up, in the turn with the shortest step. Parts that run beside the step, such as reading the next batch, count, too.
"""

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import TINY_HELP, command_line, markdown, print_figures, run_command
from benchmarks.first_minutes import TINY, Data, Recipe, crosscut, make_data, plain

WIDTHS = (64, 128, 256)
COMMANDS = {"crosscut": crosscut, "plain": plain}
PARTS = ("batch", "forward", "backward", "clip", "optimizer", "metrics")
"""Parts in the order of the table. `rest` is the time of a step outside these parts."""
WARM_UP = 0.3
"""Share of the steps at the start that are not counted."""


class Clock:
    """Clock of the processor time of the parts of a step. It replaces functions by timed functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.starts: list[float] = []
        """Processor time of the whole process when each step began."""

    def time(self, part: str, owner: Any, name: str) -> None:
        """Time all calls of the function `name` of a class or a module as `part`."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **settings: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **settings)
            finally:
                self.seconds[part].append(time.thread_time() - began)

        setattr(owner, name, timed)

    def mark(self, owner: Any, name: str) -> None:
        """Count a call of this function as the beginning of a step."""
        function: Callable[..., Any] = getattr(owner, name)

        def marked(*arguments: Any, **settings: Any) -> Any:
            if not self.starts:
                self.seconds.clear()  # of a validation before the first step
            self.starts.append(time.process_time())
            return function(*arguments, **settings)

        setattr(owner, name, marked)

    def milliseconds(self) -> dict[str, float]:
        """Median time of each part and of the whole step."""
        steps = [after - before for before, after in zip(self.starts, self.starts[1:], strict=False)]
        first = int(WARM_UP * len(steps))
        calls = {part: round(len(seconds) / len(steps)) for part, seconds in self.seconds.items()}
        found = {part: 1e3 * median(self.seconds[part][first * calls[part] :]) * calls[part] for part in self.seconds}
        whole = 1e3 * median(steps[first:])
        return {**found, "rest": whole - sum(found.values()), "step": whole}


def run_crosscut(clock: Clock, words: list[str]) -> None:
    """Train in this process with the settings of a command line."""
    from crosscut.config import load_run
    from crosscut.model import GPT
    from crosscut.training import run_training, step
    from crosscut.training.batches import Batches
    from crosscut.training.optimization.optimizer import LocalAdamW
    from crosscut.training.tracking.metrics import Metrics

    for part, owner, name in (
        ("batch", Batches, "micro_batches"), ("forward", GPT, "loss"), ("clip", step, "measure_gradients"),
        ("optimizer", LocalAdamW, "step"), ("metrics", Metrics, "step"),
    ):  # fmt: skip
        clock.time(part, owner, name)
    clock.mark(step.Trainer, "step")
    run_training(load_run({}, words))


def run_plain(clock: Clock, words: list[str]) -> None:
    """Train in this process with the options of a command line."""
    import torch

    from benchmarks.contenders import plain_training
    from benchmarks.contenders.plain_gpt import PlainGPT

    for part, owner, name in (
        ("batch", plain_training, "windows"), ("forward", PlainGPT, "forward"),
        ("clip", torch.nn.utils, "clip_grad_norm_"), ("optimizer", torch.optim.AdamW, "step"),
    ):  # fmt: skip
        clock.time(part, owner, name)
    clock.mark(torch.optim.AdamW, "step")
    sys.argv[1:] = words
    plain_training.main()


def work(program: str, words: list[str]) -> None:
    """Run a program in this process and print the times of its parts as one line of JSON."""
    import torch

    torch.set_num_threads(1)
    clock = Clock()
    clock.time("backward", torch.Tensor, "backward")
    out, sys.stdout = sys.stdout, sys.stderr
    {"crosscut": run_crosscut, "plain": run_plain}[program](clock, words)
    print(json.dumps(clock.milliseconds()), file=out)


def measure(recipe: Recipe, widths: tuple[int, ...], turns: int) -> dict[int, dict[str, dict[str, float]]]:
    """Milliseconds of each part by width and program, in the turn with the shortest step."""
    found: dict[int, dict[str, dict[str, float]]] = {width: {} for width in widths}
    with tempfile.TemporaryDirectory() as temporary:
        data = make_data(Path(temporary), recipe)
        for turn in range(turns):
            for width in widths:
                for program in COMMANDS:
                    output = Path(temporary) / f"{program}-{width}-{turn}"
                    figures = run(program, replace(recipe, width=width), data, output)
                    found[width][program] = min(found[width].get(program, figures), figures, key=lambda f: f["step"])
    return found


def run(program: str, recipe: Recipe, data: Data, output: Path) -> dict[str, float]:
    """Milliseconds of each part of a program, which has a process and a thread of its own."""
    words, folder = COMMANDS[program](recipe, data, output)
    words = words[4:] if program == "crosscut" else words[2:]
    command = [sys.executable, __file__, "--work", program, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    printed = run_command(command, folder=folder, environment=environment)
    figures: dict[str, float] = json.loads(printed.splitlines()[-1])
    return figures


def report(found: dict[int, dict[str, dict[str, float]]]) -> None:
    """Print a table: a row for each part, and two columns for each width."""
    columns = [(width, program) for width in found for program in COMMANDS]
    rows = [[part, *(f"{found[width][program].get(part, 0.0):.2f}" for width, program in columns)]
            for part in (*PARTS, "rest", "step")]  # fmt: skip
    ratios = [found[width]["crosscut"]["step"] / found[width]["plain"]["step"] for width in found]
    rows.append(["of plain", *(cell for ratio in ratios for cell in (f"{ratio:.2f}", ""))])
    print(markdown(["ms a step", *(f"{program} {width}" for width, program in columns)], rows))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--work"]:
        work(words[1], words[2:])
        return
    parser = command_line(__doc__, tiny=TINY_HELP, figures="print")
    parser.add_argument("--turns", type=int, default=3, help="runs of each program at each width")
    parser.add_argument("--steps", type=int, default=150, help="steps of each run")
    options = parser.parse_args(words)
    recipe = replace(TINY, steps=20) if options.tiny else Recipe(steps=options.steps, warmup=20)
    # Validate one batch, and only before and after the steps.
    recipe = replace(recipe, every=10 * recipe.steps, validation=recipe.batch)
    found = measure(recipe, (TINY.width,) if options.tiny else WIDTHS, options.turns)
    if not print_figures(options, ("torch",), {"milliseconds": found}):
        report(found)


if __name__ == "__main__":
    main()
