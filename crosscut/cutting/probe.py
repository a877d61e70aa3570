"""Search for a plan of how a plain module can be cut, and its proof.

    plan = plan_cuts(build, tensor=(2, 4))
    write_plan(plan, Path("plan.toml"))

The search runs the module on the CPU in float64, without ranks and without its matrices: `finding.playback` says why. A
plan is a hypothesis until `prove_module` has compared a training step of the cut module with the uncut one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

import torch
from torch import nn

from crosscut.config import ConfigError, Layout, TrainingError
from crosscut.cutting.cut import cut
from crosscut.cutting.finding.playback import Draw, Subject, draw, find_matrices
from crosscut.cutting.finding.rules import Finding
from crosscut.cutting.finding.search import Search
from crosscut.cutting.finding.small import SMALL, build_lean, small_copies
from crosscut.cutting.finding.wires import find_wires, pattern_of
from crosscut.cutting.looking.states import unchanged, unchanged_random_states
from crosscut.cutting.plan import Plan
from crosscut.verification import prove_module
from crosscut.verification.foreign.cuts import Build
from crosscut.verification.foreign.wide import to_float64

NUM_DRAWS = 3


def plan_cuts(build: Build, tensor: Sequence[int] = (2, 4), *, prove: bool = True) -> Plan:
    """Find how a module can be cut over tensor ranks, and prove it.

    `build()` returns a new module, its keyword inputs, and a function that makes a scalar loss of its output, as for
    `prove_module`. `tensor` are the numbers of ranks. Layers are cut in pairs, by columns and by rows, if each rank can
    compute with its own columns from one to the other. Other linear layers are cut by columns and gathered, embeddings
    by rows. Each rule says why.

    With `prove`, ranks train the cut module for one step at each number of ranks, and the step is compared with the
    uncut one. A module of many parameters is proven on a copy with smaller sizes in its `config`, for which the same
    plan is found. Without `prove`, the plan is a hypothesis.

    Raises `ConfigError` for a module that cannot be probed, or for which no rule is found, and `TrainingError` with the
    first difference if the plan is not proven.
    """
    with unchanged_random_states():
        return _plan_cuts(build, _require_sizes(tensor), prove=prove)


def _plan_cuts(build: Build, sizes: tuple[int, ...], *, prove: bool) -> Plan:
    module, inputs, _ = build_lean(build)
    plan = find_plan(module, inputs, sizes)
    if prove:
        number = sum(parameter.numel() for parameter in module.parameters())
        build, proven = (build, plan) if number <= SMALL else _smaller(build, plan)
        for size in sizes:
            report = prove_module(build, partial(cut, plan=proven), Layout(tensor=size))
            if not report.same:
                told = report.first or ", ".join(check.name for check in report.checks if not check.same)
                raise TrainingError(
                    f"The plan that was found is wrong at {size} tensor ranks: {told}. Give `prove=False` to "
                    "get the plan, and remove the rules of this module from it."
                )
    return plan


def find_plan(module: nn.Module, inputs: Mapping[str, object], tensor: Sequence[int] = (2, 4)) -> Plan:
    """Find a plan without proof. The module stays unchanged."""
    with _probed(module):
        subject = _called(lambda: find_matrices(module, to_float64(inputs)))
        draws = [draw(subject, seed) for seed in range(NUM_DRAWS)]
        _require_alike(draws)
        wires = find_wires(draws[0])
        finding = Finding(subject, wires, Search(draws, tuple(tensor), wires))
        finding.find_cuts()
        finding.add_single()
        return finding.plan()


@contextmanager
def _probed(module: nn.Module) -> Iterator[None]:
    """Let a module compute in float64 and without dropout, on one thread, because its tensors are small. The gradients
    of all its parameters are looked at.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with unchanged(module):
            module.double().eval().requires_grad_()
            yield
    finally:
        torch.set_num_threads(threads)


def _called(find: Callable[[], Subject]) -> Subject:
    """Find the matrices. Raises `ConfigError` if the module itself raises, or has no matrices."""
    try:
        subject = find()
    except Exception as error:
        raise ConfigError(
            "`build` must return a module and inputs that the module accepts in float64 on the CPU, but the module "
            f"raised {type(error).__name__}: {str(error)[:300]}. Correct the inputs."
        ) from error
    if not subject.matrices:
        raise ConfigError(
            "The module must call linear layers or embeddings to be cut, but calls none. Write a plan by hand, or use "
            "`nn.Linear` and `nn.Embedding`."
        )
    return subject


def _require_alike(draws: Sequence[Draw]) -> None:
    """Raise `ConfigError` if the module's path depends on values."""
    for each in draws:
        if each.run.failure is not None:
            raise ConfigError(
                "The module must accept all values of its inputs and weights to be probed, but "
                f"{each.run.failure.module} raised an error on random ones: {each.run.failure.text}. Write a plan by "
                "hand."
            )
        for one, two in zip_longest(draws[0].run.calls, each.run.calls):
            if one != two:
                name = pattern_of((one or two).name)
                raise ConfigError(
                    f"The module must call its layers in an order that depends on no values, but calls `{name}` only "
                    "for some. Write a plan by hand."
                )


def _require_sizes(tensor: Sequence[int]) -> tuple[int, ...]:
    given: object = tensor
    if isinstance(given, int):
        raise ConfigError(f"`tensor` must be a sequence of numbers of ranks, but is {given}. Write ({given},).")
    sizes = tuple(sorted({*tensor}))
    if not sizes or sizes[0] < 2:
        raise ConfigError(f"`tensor` must be numbers of ranks, each at least 2, but is {tuple(tensor)}. Try (2, 4).")
    return sizes


def _smaller(build: Build, plan: Plan) -> tuple[Build, Plan]:
    """Return a function that builds a smaller copy of a large module, and the copy's plan, which has the same rules."""
    module = build_lean(build)[0]
    for copy in small_copies(build, module):
        small, inputs, _ = copy()
        try:
            found = find_plan(small, inputs, plan.tensor)
        except ConfigError:
            continue
        if _kinds(found) == _kinds(plan):
            return copy, found
    raise ConfigError(
        f"A module of more than {SMALL:,} parameters must have a `config` with sizes to be proven on a smaller copy, "
        "but no copy has the same plan. Give `prove=False`, and prove the plan on a smaller module of your own."
    )


def _kinds(plan: Plan) -> dict[str, object]:
    """Return what is the same in plans of modules of different sizes."""
    rules = {
        pattern_of(name): (rule.style, len(rule.parts), rule.units, *map(pattern_of, rule.columns))
        for name, rule in plan.rules.items()
    }
    integers = {pattern_of(name): tuple(sorted(held)) for name, held in plan.integers.items()}
    return {"rules": rules, "integers": integers, "tables": {pattern_of(name) for name in plan.tables}}
