"""Plans that models of transformers bring along (`tp_plan`), held against the proof of `prove_module`.

    python benchmarks/cutting/own_plans.py                             # 25 families at tensor 2 and 4: three minutes
    python benchmarks/cutting/own_plans.py llama apertus --tensor 2
    python benchmarks/cutting/own_plans.py --others --tensor 2         # a hundred other language models: ten minutes
    python benchmarks/cutting/own_plans.py --page docs/tables/own-plans.md    # also write the table into the page

A tiny model is saved, and every rank loads it by `from_pretrained` with a `DistributedConfig`, as users of the library
do. The library so cuts the model by its own plan. The proof compares its training step with that of the uncut model, in
float64.

| verdict | meaning |
|---|---|
| right | nothing differs |
| wrong | something differs; the first difference is named |
| refused | an error ends the cut or the step; the module is named |
| not built | the tiny model does not run, so nothing is known |
| no plan | the family has no `tp_plan` |

A family that groups its queries is cut at tensor 4 twice: with as many key-value heads as ranks, and with two.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, markdown, print_figures, progress_bar, replace_section
from benchmarks.cutting.models import FAMILIES, build, large_matrices, pattern_of
from benchmarks.cutting.others import build_other, others
from benchmarks.machine import machine_line
from crosscut.config import CrosscutError, Layout
from crosscut.config.errors import RankFailure
from crosscut.launch import Ranks, in_ranks
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.verification import LayoutReport
from crosscut.verification.foreign.cuts import ForeignCut, prove_on_mesh
from crosscut.verification.foreign.limits import Limits
from crosscut.verification.foreign.wide import in_float64, to_float64

PACKAGES = ("torch", "transformers")
KEY_VALUE_HEADS = "num_key_value_heads"
RAISED = "the cut model raises "
"""Words before the error in the report of a step that raised one."""
SECONDS = 60.0
"""Time for the proof of one case."""
TOGETHER = 8
"""Cases that one job proves, because the start of a job takes longer than a proof."""


@dataclass(frozen=True)
class Case:
    """Kind of model, number of tensor ranks, and other values of the tiny model's config."""

    kind: str
    tensor: int
    changes: tuple[tuple[str, int], ...] = ()
    told: str = ""
    """Addition to the title."""

    @property
    def title(self) -> str:
        """Cut, as the table names it."""
        return f"tensor {self.tensor}{self.told}"

    def build(self) -> Any:
        """Build the tiny model: see `build`."""
        make: Callable[..., Any] = build if self.kind in FAMILIES else build_other
        return make(self.kind, **dict(self.changes))


@dataclass(frozen=True)
class Finding:
    """Verdict on a case."""

    kind: str
    case: str
    verdict: str
    told: str = ""
    """First difference or error."""


def cases_of(kind: str, tensor: int) -> Iterator[Case]:
    """Cases of a kind of model at a number of ranks."""
    heads = FAMILIES[kind].tiny.get(KEY_VALUE_HEADS, tensor) if kind in FAMILIES else tensor
    if heads < tensor:
        yield Case(kind, tensor, ((KEY_VALUE_HEADS, tensor), ("num_attention_heads", 2 * tensor)))
        yield Case(kind, tensor, told=f", {heads} key-value heads")
    else:
        yield Case(kind, tensor)


# --- on the ranks -----------------------------------------------------------------------------------------------------


def cut_by_own_plan(model: Any, mesh: ParallelMesh) -> nn.Module:
    """Save the model, and load it on every rank as the library cuts it."""
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="crosscut-") as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        if mesh.tensor.rank == 0:
            model.save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(tp_size=mesh.tensor.size)
        ways = {f"{way}_implementation": getattr(model.config, f"_{way}_implementation") for way in ("attn", "experts")}
        cut = type(model).from_pretrained(shared[0], distributed_config=config, dtype=torch.float64, **ways)
        dist.barrier()
    return restore(cut, model).train()


def restore(cut: nn.Module, model: nn.Module) -> nn.Module:
    """Restore the float64 values of parameters and buffers that the library has rounded to float32."""
    cut.double()
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in (*cut.named_parameters(), *cut.named_buffers()):
            mine, right = value, values[name].detach()
            if isinstance(value, DTensor):
                right = distribute_tensor(right, value.device_mesh, value.placements, src_data_rank=None).to_local()
                mine = value.to_local()
            if mine.shape == right.shape and torch.allclose(mine, right, rtol=1e-6):
                mine.copy_(right)
    return cut


def prove_cases(told: tuple[Sequence[Case], Layout, Limits], device: torch.device) -> list[LayoutReport | str]:
    """On a rank: prove cases one after the other. Returns each report, or the error of a cut that raised one."""
    cases, layout, limits = told
    found: list[LayoutReport | str] = []
    with limits.kept():
        mesh = make_mesh(layout, device)
        for case in cases:
            try:
                found.append(prove_on_mesh(ForeignCut(case.build, cut_by_own_plan), mesh))
            except Exception as error:  # foreign code raises anything
                found.append(f"{type(error).__name__}: {error}")
    return found


# --- verdicts ---------------------------------------------------------------------------------------------------------


def judge(cases: Sequence[Case], done: Callable[[int], object]) -> Iterator[Finding]:
    """Judge cases at one number of ranks, and call `done` with the number of cases that were judged."""
    proven: list[Case] = []
    for case in cases:
        if finding := without_proof(case):
            done(1)
            yield finding
        else:
            proven.append(case)
    for first in range(0, len(proven), TOGETHER):
        some = proven[first : first + TOGETHER]
        yield from map(finding_of, some, outcomes(some))
        done(len(some))


def without_proof(case: Case) -> Finding | None:
    """Return the verdict on a case that has nothing to prove."""
    try:
        torch.manual_seed(0)
        model, inputs, loss_of = case.build()
        if not model.tp_plan:
            return Finding(case.kind, case.title, "no plan")
        with in_float64():
            loss_of(model.double()(**to_float64(inputs))).backward()
    except Exception as error:  # foreign code raises anything
        return Finding(case.kind, case.title, "not built", one_line_of(f"{type(error).__name__}: {error}"))
    return None


def outcomes(cases: Sequence[Case]) -> list[LayoutReport | str]:
    """Prove cases in one job. If the job fails, prove each case in a job of its own."""
    layout = Layout(tensor=cases[0].tensor)
    limits = Limits.on(layout.world_size, SECONDS * len(cases))
    try:
        return in_ranks(Ranks(layout=layout, device="cpu"), prove_cases, prepare=lambda: (cases, layout, limits))
    except (CrosscutError, RankFailure) as error:
        if len(cases) == 1:
            return [str(error).strip().splitlines()[-1]]
        return [outcome for case in cases for outcome in outcomes([case])]


def finding_of(case: Case, outcome: LayoutReport | str) -> Finding:
    """Verdict on a proof."""
    tell = partial(Finding, case.kind, case.title)
    if isinstance(outcome, str):
        return tell("refused", one_line_of(outcome))
    if outcome.same:
        return tell("right")
    if outcome.first is None:
        return tell("wrong", ", ".join(check.name for check in outcome.checks if not check.same))
    _, raised, error = outcome.first.cause.partition(RAISED)
    if raised:
        return tell("refused", f"`{outcome.first.module}`: {one_line_of(error.partition('. Check ')[0])}")
    return tell("wrong", f"`{outcome.first.module}`, {outcome.first.direction}: {one_line_of(outcome.first.cause)}")


def one_line_of(text: str) -> str:
    """Return a text as one line of at most 160 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def left_whole(kind: str) -> list[str]:
    """Large matrices that the plan of a family leaves whole: see `large_matrices`."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    model: Any = build(kind)[0]
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    whole = TensorParallelLayer.shard_param
    cut = {name for name, style in plan.items() if type(ALL_PARALLEL_STYLES[style]).shard_param is not whole}
    return sorted(set(large_matrices(kind)) - {pattern_of(name) for name in cut})


# --- tables -----------------------------------------------------------------------------------------------------------


def table(findings: Sequence[Finding], whole: dict[str, list[str]]) -> str:
    """Table of the models that are cut, and lines with the others and with the number of each verdict."""
    listed = [each for each in findings if each.verdict not in {"no plan", "not built"}]
    if not whole:  # a hundred models: the table lists those that are not right
        listed = [each for each in listed if each.verdict != "right"]
    head = [
        "model",
        "cut",
        "verdict",
        "first difference or error",
        *(["large matrices that stay whole"] if whole else []),
    ]
    rows = []
    for each in listed:
        row = [each.kind, each.case, each.verdict, each.told.replace("|", "\\|")]
        rows.append([*row, ", ".join(f"`{name}`" for name in whole.get(each.kind, [])) or "none"] if whole else row)
    texts = [markdown(head, rows)]
    for verdict in ("right", "not built", "no plan"):
        found = dict.fromkeys(each.kind for each in findings if each.verdict == verdict)
        if found and (verdict != "right" or not whole):
            texts.append(f"{verdict.capitalize()} ({len(found)}): {', '.join(found)}.")
    return "\n\n".join(texts)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = command_line(__doc__, figures="print")
    parser.add_argument("kinds", nargs="*", help="families, or other kinds of models (default: the 25 families)")
    parser.add_argument("--others", action="store_true", help="all other language models that have a plan")
    parser.add_argument("--tensor", type=int, nargs="+", default=[2, 4], help="numbers of tensor ranks (default: 2 4)")
    parser.add_argument("--page", type=Path, help="also write the table into this page")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Judge all cases, and print the table."""
    options = options_of(arguments)
    kinds = others() if options.others else options.kinds or list(FAMILIES)
    cases = {tensor: [case for kind in kinds for case in cases_of(kind, tensor)] for tensor in options.tensor}
    with progress_bar() as bar:
        task = bar.add_task("cases", total=sum(map(len, cases.values())), told="")
        findings = [each for some in cases.values() for each in judge(some, partial(bar.advance, task))]
    findings.sort(key=lambda each: kinds.index(each.kind))
    planned = [each.kind for each in findings if each.kind in FAMILIES and each.verdict != "no plan"]
    whole = {kind: left_whole(kind) for kind in dict.fromkeys(planned)}
    if not print_figures(options, PACKAGES, {"findings": [asdict(each) for each in findings], "left_whole": whole}):
        print(table(findings, whole))
    if options.page:
        name = "others" if options.others else "families"
        replace_section(options.page, name, f"{table(findings, whole)}\n\n{machine_line(*PACKAGES)}.")


if __name__ == "__main__":
    sys.exit(main())
