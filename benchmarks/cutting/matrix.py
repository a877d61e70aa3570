"""Plans that `plan_cuts` finds for 25 families of transformers, and their proof.

    python benchmarks/cutting/matrix.py                        # all families at tensor 2 and 4
    python benchmarks/cutting/matrix.py gpt2 swin --tensor 2
    python benchmarks/cutting/matrix.py --json                 # also the reasons of all rules
    python benchmarks/cutting/matrix.py --page docs/tables/found-cuts.md

Each family is a tiny model with random weights: see `models.py`. Columns of the table:

| column | meaning |
|---|---|
| pairs | kinds of layers that are cut by rows, after layers that are cut by columns |
| packed | kinds of layers with several matrices side by side |
| gathered | other kinds of linear layers, whose outputs are gathered |
| rows | kinds of embeddings that are cut by rows |
| large matrices that stay whole | those of 1% or more of the published model's parameters |
| tensor 2, 4 | verdict of the proof in float64 |
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, markdown, print_figures, progress_bar, replace_section
from benchmarks.cutting.models import FAMILIES, build, large_matrices, pattern_of
from benchmarks.machine import machine_line
from crosscut.config import CrosscutError, Layout
from crosscut.config.errors import RankFailure
from crosscut.cutting import Plan, Style, cut, plan_cuts
from crosscut.cutting.plan import expand
from crosscut.launch import Ranks, in_ranks
from crosscut.parallel import make_mesh
from crosscut.verification.foreign.cuts import ForeignCut, prove_on_mesh
from crosscut.verification.foreign.limits import Limits

PACKAGES = ("torch", "transformers")
SECONDS = 60.0
"""Time for the proof of one plan."""
TOGETHER = 5
"""Plans that one job proves, because the start of a job takes longer than a proof."""
_WHOLE = (Style.REPLICATE, Style.REPLICATED_WITH_GRAD_ALLREDUCE)


@dataclass
class Line:
    """Plan of one family, and what the proof says."""

    family: str
    plan: Plan | None
    seconds: float
    told: str = ""
    """Error of the search."""
    verdicts: dict[int, str] = field(default_factory=dict)
    """Verdicts by numbers of ranks."""

    def kinds(self, *styles: Style) -> list[str]:
        """Names of the rules of some styles."""
        return [name for name, rule in self.plan.rules.items() if rule.style in styles] if self.plan else []

    def left_whole(self) -> dict[str, str]:
        """Large matrices that stay whole, and why."""
        if self.plan is None:
            return {}
        module = build(self.family)[0]
        modules, reasons = [name for name, _ in module.named_modules(remove_duplicate=False)], dict[str, str]()
        held: set[int] = set()
        for pattern, rule in self.plan.rules.items():
            for name in expand(pattern, modules):
                reasons[pattern_of(name)] = rule.reason
                if rule.style not in _WHOLE:
                    held |= {id(each) for each in module.get_submodule(name).parameters(recurse=False)}
        large = large_matrices(self.family)
        whole = {
            pattern_of(name)
            for name, each in module.named_parameters(remove_duplicate=False)
            if id(each) not in held and pattern_of(name) in large and pattern_of(name) not in self.plan.tables
        }
        return {f"{name} ({large[name]:.1%})": reasons.get(name.rpartition(".")[0], "") for name in sorted(whole)}


def line_of(family: str, tensor: Sequence[int]) -> Line:
    """Search a plan."""
    start = time.perf_counter()
    try:
        plan = plan_cuts(partial(build, family), tensor, prove=False)
    except CrosscutError as error:
        return Line(family, None, time.perf_counter() - start, str(error))
    return Line(family, plan, time.perf_counter() - start)


def prove_plans(told: tuple[Mapping[str, Plan], Layout, Limits], device: torch.device) -> list[str]:
    """On a rank: prove plans one after the other, and return the verdicts."""
    plans, layout, limits = told
    verdicts = []
    with limits.kept():
        mesh = make_mesh(layout, device)
        for family, plan in plans.items():
            try:
                report = prove_on_mesh(ForeignCut(partial(build, family), partial(cut, plan=plan)), mesh)
                verdicts.append("proven" if report.same else f"differs: {report.first}")
            except Exception as error:  # foreign code raises anything
                verdicts.append(f"{type(error).__name__}: {error}")
    return verdicts


def verdicts_of(plans: Mapping[str, Plan], tensor: int) -> list[str]:
    """Prove plans in one job. If the job fails, prove each plan in a job of its own."""
    layout = Layout(tensor=tensor)
    limits = Limits.on(tensor, SECONDS * len(plans))
    try:
        return in_ranks(Ranks(layout=layout, device="cpu"), prove_plans, prepare=lambda: (plans, layout, limits))
    except (CrosscutError, RankFailure) as error:
        if len(plans) == 1:
            return [str(error).strip().splitlines()[-1]]
        return [verdict for each in plans for verdict in verdicts_of({each: plans[each]}, tensor)]


def prove_lines(lines: Sequence[Line], tensor: Sequence[int], bar: Any) -> None:
    """Prove the plans of all lines."""
    found = [line for line in lines if line.plan is not None]
    task = bar.add_task("proofs", total=len(found) * len(tensor), told="")
    for size in tensor:
        for first in range(0, len(found), TOGETHER):
            some = found[first : first + TOGETHER]
            plans = {line.family: line.plan for line in some if line.plan is not None}
            for line, verdict in zip(some, verdicts_of(plans, size), strict=True):
                line.verdicts[size] = " ".join(verdict.split())[:200]
            bar.advance(task, len(some))


def table(lines: Sequence[Line], tensor: Sequence[int]) -> str:
    """Table of all lines, and a line that counts the models whose large matrices are all cut."""
    head = ["model", "pairs", "packed", "gathered", "rows", "large matrices that stay whole"]
    rows, whole = [], 0
    for line in lines:
        styles = (Style.ROWWISE,), (Style.PACKED_COLWISE,), (Style.COLWISE_GATHER_OUTPUT,), (Style.EMBEDDING_ROWWISE,)
        left = line.left_whole()
        told = line.told or "; ".join(f"`{name}`: {reason}" for name, reason in left.items()) or "none"
        proofs = [line.verdicts.get(size, "") for size in tensor]
        whole += line.plan is not None and not left and set(proofs) == {"proven"}
        rows.append([line.family, *(len(line.kinds(*each)) for each in styles), told, *proofs, f"{line.seconds:.1f}"])
    counted = f"{whole} of {len(lines)} models: all large matrices are cut, and the plan is proven."
    return f"{markdown([*head, *(f'tensor {size}' for size in tensor), 'seconds'], rows)}\n\n{counted}"


def figures_of(line: Line) -> dict[str, Any]:
    """Figures of a line for JSON."""
    rules = {name: asdict(rule) for name, rule in line.plan.rules.items()} if line.plan else {}
    shown = {"family": line.family, "seconds": round(line.seconds, 2), "told": line.told, "verdicts": line.verdicts}
    integers = {name: dict(values) for name, values in line.plan.integers.items()} if line.plan else {}
    tables = {name: each.dimension for name, each in line.plan.tables.items()} if line.plan else {}
    return {**shown, "left_whole": line.left_whole(), "rules": rules, "integers": integers, "tables": tables}


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = command_line(__doc__, figures="print")
    parser.add_argument("families", nargs="*", help="families (default: all 25)")
    parser.add_argument("--tensor", type=int, nargs="+", default=[2, 4], help="numbers of tensor ranks (default: 2 4)")
    parser.add_argument("--no-proof", action="store_true", help="only search the plans")
    parser.add_argument("--page", type=Path, help="also write the table into this page")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Search and prove all plans, and print the table."""
    options = options_of(arguments)
    families = options.families or list(FAMILIES)
    with progress_bar() as bar:
        task = bar.add_task("plans", total=len(families), told="")
        lines = []
        for family in families:
            lines.append(line_of(family, options.tensor))
            bar.advance(task)
        if not options.no_proof:
            prove_lines(lines, options.tensor, bar)
    if not print_figures(options, PACKAGES, {"models": [figures_of(line) for line in lines]}):
        print(table(lines, options.tensor))
    if options.page:
        replace_section(options.page, "matrix", f"{table(lines, options.tensor)}\n\n{machine_line(*PACKAGES)}.")


if __name__ == "__main__":
    sys.exit(main())
