"""Proof for the model of a run, on any layout."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from crosscut.architecture import Operation, Role, describe
from crosscut.architecture.words import model_in_words
from crosscut.config import ConfigError, EvaluationConfig, Layout, RunConfig
from crosscut.config.axes import is_folded
from crosscut.config.layout import PipelineSchedule
from crosscut.config.optimizer import OptimizerConfig, ParameterGroup, rate_field
from crosscut.config.precision import PRECISIONS, Precision
from crosscut.config.system.terminal import new_console
from crosscut.config.training import Compile, Recompute
from crosscut.launch import Ranks, in_ranks
from crosscut.launch.processes import choose_device, is_first_started, was_started
from crosscut.model import Batch
from crosscut.model.initialization import zero_padding
from crosscut.parallel import CollectiveRecorder, ParallelMesh, Sent, disturb_, make_mesh
from crosscut.parallel.collectives import gather_to_first
from crosscut.planner import Candidate, count_parameters, step_traffic
from crosscut.planner.stages import stage_sizes
from crosscut.training.optimization.muon import AMPLIFICATION
from crosscut.training.optimization.optimizer import rules_of
from crosscut.training.precision import needs_loss_scale, resolve_on, torch_dtype
from crosscut.training.requirements import require_capabilities
from crosscut.training.result import NonFiniteError
from crosscut.training.speed.compilation import compiled_modules
from crosscut.training.spikes.copies import StateCopies
from crosscut.training.step import Trainer
from crosscut.verification.averaging import compare_average, parts_of
from crosscut.verification.batches.made_up import END_OF_TEXT, made_up_batch, num_options_of
from crosscut.verification.batches.packing import compare_documents
from crosscut.verification.mixing import compare_mixture
from crosscut.verification.module import CLIP_NORM, LEARNING_RATE
from crosscut.verification.proof import Claim, prove
from crosscut.verification.recording import ParameterShard
from crosscut.verification.report import AVERAGE, AVERAGES, DRAWS, ROUNDING, LayoutReport, ReportCheck
from crosscut.verification.routing import ROUTINGS, Forced, compare_loads, force, has_experts
from crosscut.verification.scope import COMPILED
from crosscut.verification.watching import RecordedStep

SEQUENCES_PER_DATA_RANK = 2
"""Number of sequences in a micro-batch of one data rank."""
MICRO_BATCHES = 2
"""Number of micro-batches if the run accumulates gradients. Two are enough: the first creates the gradients, and the
second adds to the gradients.
"""
LONGEST_SEQUENCE = 128
"""Maximum length of a verified sequence, in tokens. Longer sequences are shortened, because a bug of a layout shows at
any length.
"""
LONGEST_IN_PIPELINE = 32
"""Maximum length of a verified sequence in a long pipeline, in tokens. In a pipeline, sequences are shorter, because a
step has more micro-batches, and the tensors of all of them are kept.
"""
SHORTEST_SEQUENCE = 2
"""Minimum length of a verified sequence, in tokens. A sequence of one token is extended, because a single token attends
only to itself, with weight 1 in every head, and bugs in the order of heads would stay hidden.
"""


STEPS = 10
"""Number of steps of the verified run. Only the first step is computed."""
MOST_WARMUP_STEPS = 2
"""Maximum number of warm-up steps of the verified run."""
MOST_DECAY_STEPS = 6
"""Maximum number of decay steps of the verified run, with the schedule `wsd`."""


def scale_down(run: RunConfig, *, num_layers: int | None, hidden_size: int | None) -> RunConfig:
    """Return the run with `num_layers` layers and the hidden size `hidden_size`. None keeps the run's own value.
    Nothing else about the model's structure changes.
    """
    model = run.model if hidden_size is None else run.model.resized(hidden_size)
    if num_layers is not None:
        model = dataclasses.replace(model, num_layers=num_layers)
    return dataclasses.replace(run, model=model)


def for_verification(run: RunConfig, layout: Layout, precision: str) -> RunConfig:
    """Return the run to verify: the same model on `layout`, with one clipped step in `precision` over a few short
    sequences.

    If the run accumulates gradients over micro-batches, the step accumulates over two micro-batches. In a pipeline, the
    step always accumulates over two micro-batches for each rank of the pipeline. Raises `LayoutError` or `ConfigError`
    for a layout that the model, the run's own precision or `precision` does not allow.
    """
    length = _verified_length(run, layout)
    model = run.with_vocabulary().model.with_windows_in(length)
    num_readers, num_owners = layout.ranks.batch.size, layout.ranks.owners.size
    accumulates = 0 < run.training.micro_batch_size * num_readers < run.training.batch_size
    accumulates |= run.training.initial_batch_size > 0  # later, larger batches are accumulated
    sequences = SEQUENCES_PER_DATA_RANK * num_options_of(model)
    number = MICRO_BATCHES if accumulates else 1
    if num_owners > 1:  # enough micro-batches that every stage alternates forward and backward passes
        accumulates, number = True, MICRO_BATCHES * num_owners
    training = dataclasses.replace(
        run.training,
        batch_size=sequences * num_readers * number,
        initial_batch_size=0,
        ramp_steps=0,
        micro_batch_size=sequences if accumulates else 0,
        sequence_length=length,
        steps=STEPS,
    )
    own = dataclasses.replace(
        run,
        model=model,
        layout=layout,
        training=training,
        optimizer=_optimizer_for_verification(run.optimizer, count_parameters(model)),
        evaluation=EvaluationConfig(),  # the run's evaluation windows may be longer than the shortened sequences
    )
    try:
        return dataclasses.replace(own, training=dataclasses.replace(training, precision=Precision(precision)))
    except ConfigError as error:
        raise ConfigError(f"{error} `crosscut verify` takes the precision from `--precision`.") from error


def _verified_length(run: RunConfig, layout: Layout) -> int:
    """Return the length of the verified sequences: short, and a multiple of what the layout needs."""
    longest = max(LONGEST_SEQUENCE // layout.ranks.owners.size, LONGEST_IN_PIPELINE)  # all micro-batches are kept
    shortest = min(SHORTEST_SEQUENCE, run.model.max_sequence_length)
    length = max(min(run.training.sequence_length, longest), shortest)
    return max(length // layout.length_divisor, 1) * layout.length_divisor


def _optimizer_for_verification(optimizer: OptimizerConfig, num_parameters: int) -> OptimizerConfig:
    """Return the optimizer of the verified step. The learning rates of the parameter groups keep the ratios that they
    have in the run.
    """
    factors = {group: optimizer.rate_factor(group) for group in ParameterGroup}
    own: dict[str, Any] = {
        rate_field(group): factor * LEARNING_RATE if getattr(optimizer, rate_field(group)) else 0.0
        for group, factor in factors.items()
    }
    return dataclasses.replace(
        optimizer,
        **own,
        learning_rate=LEARNING_RATE,
        min_learning_rate=0.0,
        warmup_steps=min(optimizer.warmup_steps, MOST_WARMUP_STEPS),
        decay_steps=min(optimizer.decay_steps, MOST_DECAY_STEPS),
        epsilon=CLIP_NORM / num_parameters**0.5,
        clip_norm=CLIP_NORM,
    )


def verify_runs(runs: Sequence[RunConfig]) -> list[LayoutReport]:
    """Verify the runs one after the other, with a progress line on a terminal. Each run must be a result of
    `for_verification`.

    Starts the ranks that each layout needs, or joins the ranks that torchrun started. Returns a report for each run, in
    order; under torchrun, every rank gets the reports. Raises `LayoutError` or `ConfigError` before a rank starts, and
    `RankFailure` if a rank fails.
    """
    ranks = [_checked_ranks(run) for run in runs]
    if was_started():  # the ranks join once and verify all runs
        return in_ranks(ranks[0], _verify_all, prepare=lambda: list(runs))
    return [_verify_alone(on, run) for on, run in zip(ranks, _shown(runs), strict=True)]


def _checked_ranks(run: RunConfig) -> Ranks:
    """Return the ranks of a run, after checking that this machine can verify it."""
    ranks = Ranks(layout=run.layout, device=run.training.device)
    require_capabilities(resolve_on(run, choose_device(run.training.device)), only_to_verify=True)
    return ranks


def _shown(runs: Sequence[RunConfig]) -> Iterator[RunConfig]:
    """Yield the runs, and show on the first rank's terminal which one is being verified."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=new_console(stderr=True), transient=True, disable=not is_first_started()) as bar:
        task = bar.add_task("", total=len(runs))
        for run in runs:
            bar.update(task, description=f"verifying {run.layout}")
            yield run
            bar.advance(task)


def _verify_alone(ranks: Ranks, run: RunConfig) -> LayoutReport:
    return in_ranks(ranks, _verify, prepare=lambda: run)


def _verify_all(runs: Sequence[RunConfig], device: torch.device) -> list[LayoutReport]:
    return [_verify(run, device) for run in _shown(runs)]


def _verify(run: RunConfig, device: torch.device) -> LayoutReport:
    return verify_on_mesh(run, make_mesh(run.layout, device))


def verify_on_mesh(run: RunConfig, mesh: ParallelMesh) -> LayoutReport:
    """Verify a run on existing ranks. The run must be a result of `for_verification`. Every rank must call this
    function, and every rank gets the report. A model with experts is verified with several loads of its experts; the
    report is that of the first loads that differ.
    """
    steps = _steps_of(run)
    report = _verified(run, steps, mesh, Forced.AS_CHOSEN)
    if not has_experts(run):
        return report
    for forced in (Forced.UNEVEN, Forced.COLLAPSED):
        if not report.same:
            return report
        other = _verified(run, steps, mesh, forced)
        seconds = report.seconds + other.seconds
        if other.first is not None:
            cause = f"{other.first.cause} The experts' loads were {forced}."
            report = dataclasses.replace(other, first=dataclasses.replace(other.first, cause=cause))
        report = dataclasses.replace(report, seconds=seconds)
    if not report.same:
        return report
    told = ReportCheck(ROUTINGS, None, True, f"loads of experts {'; '.join(Forced)}")
    return dataclasses.replace(report, checks=(*report.checks, told))


def _verified(run: RunConfig, steps: Mapping[str, "_Steps"], mesh: ParallelMesh, forced: Forced) -> LayoutReport:
    """Verify a run with these loads of experts. Only the first loads are verified with the run's other checks."""
    model, exact = run.model, steps.get("exact")
    claim = Claim(
        make_step=lambda on: steps["cut"].make(on, forced),
        make_uncut=lambda on: steps["uncut"].make(on, forced),
        looks_at_draws=forced is Forced.AS_CHOSEN,
        drops=run.training.precision is Precision.FLOAT64 and model.dropout > 0,
        layout=told_layout(run),
        model=model_in_words(model, f"{count_parameters(model):,}"),
        precision=run.training.precision,
        compute_dtype=torch_dtype(run.training.numbers.compute),
        product_dtype=torch_dtype(run.training.numbers.products),
        make_exact=None if exact is None else lambda on: exact.make(on, forced),
        extra_checks=_further_checks if forced is Forced.AS_CHOSEN else _checks_of_every_step,
        amplification=dict.fromkeys(rules_of(model, run.optimizer).matrices, AMPLIFICATION),
    )
    report = prove(claim, mesh)
    if report.first is None or not (suspects := _other_suspects(run, report)):
        return report
    cause = f"{report.first.cause} Compilation or recomputation may also be the cause: verify with {suspects}, too."
    return dataclasses.replace(report, first=dataclasses.replace(report.first, cause=cause))


def told_layout(run: RunConfig) -> str:
    """Describe the run's layout with all settings that affect its step."""
    layout, more = run.layout, []
    if layout.num_stages > 1:
        is_usual = layout.schedule is PipelineSchedule.ONE_FORWARD_ONE_BACKWARD
        more += [f"schedule {layout.schedule}"] if is_usual else []
        more.append(f"stages of {' + '.join(map(str, stage_sizes(run)))} layers")
    if layout.context > 1:
        more.append(f"context attention {run.context_attention.way}")
    if layout.symmetric_memory:
        more.append("symmetric memory")
    return ", ".join([str(layout), *more])


def _other_suspects(run: RunConfig, report: LayoutReport) -> str:
    """Return settings that a user can try in order to rule out compilation and recomputation as the cause of failed
    checks. Empty if the run uses neither, or if the failed checks do not depend on what the layers compute.
    """
    failed = {check.name for check in report.checks if not check.same}
    if failed and failed <= {DRAWS, AVERAGE, AVERAGES, *ROUNDING} and all(row.same for row in report.rows):
        return ""
    found = ['training.compile="off"'] if any(check.name == COMPILED for check in report.checks) else []
    if run.training.recompute is not Recompute.NONE:
        found.append('training.recompute="none"')
    return " and ".join(found)


def _plain(run: RunConfig) -> RunConfig:
    """Return the run without compilation, recomputation and offload. If the run is compared with this plain run, the
    proof also covers these three options.
    """
    plain = dataclasses.replace(
        run.training, compile=Compile.OFF, recompute=Recompute.NONE, recompute_every=1, offload=()
    )
    return dataclasses.replace(run, training=plain)


def _steps_of(run: RunConfig) -> dict[str, "_Steps"]:
    """Return the steps of the `cut` and the `uncut` model, and those of the `exact` one: the uncut model in the
    parameters' type, if the run's precision is another.
    """
    plain = _plain(run)
    runs = {"cut": run, "uncut": plain}
    precision = PRECISIONS[run.training.precision].accumulation
    if precision != run.training.precision:
        training = dataclasses.replace(plain.training, precision=Precision(precision))
        runs["exact"] = dataclasses.replace(plain, training=training)
    # All scale the loss as the run does, so that their gradients are comparable.
    scales_loss = needs_loss_scale(run.training.precision)
    return {name: _Steps(each, scales_loss=scales_loss) for name, each in runs.items()}


class _Steps:
    """Step of the cut model, of the uncut model or of the exact one, for each of several loads of the experts. The
    model is built once, and every step begins with its initial state.
    """

    def __init__(self, run: RunConfig, *, scales_loss: bool) -> None:
        self._run, self._scales_loss = run, scales_loss
        self._begun: tuple[_RunStep, StateCopies] | None = None

    def make(self, mesh: ParallelMesh, forced: Forced) -> RecordedStep:
        """Make the step. The mesh must always be the same."""
        if self._begun is not None:
            step, copies = self._begun
            copies.restore(0)
        else:
            step = _RunStep(self._run, mesh, scales_loss=self._scales_loss)
        if has_experts(self._run) and self._begun is None:
            self._begun = step, StateCopies(step.trainer)
            self._begun[1].keep(0)
        force(step.model, forced)
        return step


class _RunStep:
    """Step 0 of a `Trainer`, on one generated batch."""

    def __init__(self, run: RunConfig, mesh: ParallelMesh, *, scales_loss: bool) -> None:
        self.run, self.mesh = run, mesh
        self.trainer = Trainer(resolve_on(run, mesh.device), mesh, scales_loss=scales_loss)
        self.model, self.teacher = self.trainer.model, self.trainer.teacher
        if self.teacher is not None:
            self.teacher.initialize(run.training.seed + 1)
        zero = zero_matrices(run)
        for name, parameter in self.model.named_parameters():
            # A parameter of zeros, or a norm's weight of ones, would hide bugs in its use.
            if parameter.dim() == 1 or name in zero:
                disturb_(parameter, std=0.1, seed=run.training.seed, name=name)
        zero_padding(self.model)
        if self.trainer.low_rank is not None:  # a memory of zeros would hide bugs in its use
            errors = self.trainer.low_rank.errors
            for name, error in errors.items():
                disturb_(error, std=0.01, seed=run.training.seed, name=f"{name} error")
            zero_padding(self.model, errors)
        self.sent: Counter[Sent] = Counter()
        self.before: dict[str, Tensor] = {}
        """This rank's parts of the parameters before the step, if the run averages the weights."""
        self.after: dict[str, Tensor] = {}
        """This rank's parts of the parameters after the step, if the run averages the weights."""

    shard_of = staticmethod(ParameterShard.of)
    may_fail = False
    is_copied = False

    @property
    def averages(self) -> Mapping[str, Tensor]:
        return {} if self.trainer.average is None else self.trainer.average.tensors

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        return {}

    def accumulate(self) -> Tensor:
        self.trainer.optimizer.zero_grad()
        self.sent.clear()
        with self._recorded():
            return self.trainer.accumulate(0, self.micro_batches())

    def update(self, loss: Tensor) -> tuple[float, float]:
        self.before = parts_of(self.model) if self.averages else {}
        with self._recorded():
            result = self.trainer.update(0, loss)
        self.after = parts_of(self.model) if self.averages else {}
        try:
            return result.loss, result.gradient_norm
        except NonFiniteError as error:  # a difference like any other, unless the uncut step is not finite either
            return error.loss, error.norm

    def micro_batches(self) -> list[Batch]:
        """Return this rank's part of each micro-batch. Every layout gets the same sequences, so that steps can be
        compared.
        """
        return [batch.part_of_rank(self.mesh.context) for batch in self.whole_batches()]

    def whole_batches(self) -> list[Batch]:
        """Return the whole sequences of this data rank's micro-batches."""
        reader, count = self.mesh.reader, self.run.num_micro_batches
        batch = made_up_batch(self.run)
        if self.run.training.document_mask:
            batch = batch.with_documents(END_OF_TEXT)
        parts = (part.chunk(reader.size)[reader.rank] for part in batch.chunk(count))
        if "predicted" in describe(self.run.model).head.reads:
            parts = (self._with_predicted(part) for part in parts)
        return [part.to_device(self.mesh.device) for part in parts]

    def _with_predicted(self, batch: Batch) -> Batch:
        """Add the indexes of the tokens to predict. Each data rank of the layout fills its own number of indexes up.
        The uncut model takes the indexes of all data ranks, one rank after the other, so that the rows are the same.
        """
        parts = batch.chunk(self.run.layout.ranks.batch.size // self.mesh.reader.size)
        chosen = [part.with_predicted(self.run.mask_fraction).predicted for part in parts]
        offsets = range(0, batch.tokens.numel(), batch.tokens.numel() // len(parts))
        predicted = [part + offset for part, offset in zip(chosen, offsets, strict=True) if part is not None]
        return dataclasses.replace(batch, predicted=torch.cat(predicted))

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        more = () if self.teacher is None else self.teacher.axes
        with CollectiveRecorder(self.mesh, more=more) as recorder:
            yield
        self.sent.update(recorder.sent)


def zero_matrices(run: RunConfig) -> set[str]:
    """Names of the matrices that start at zero: the second matrices of adapters, and the output projections if
    `training.zero_initial_outputs` is set.
    """
    roles = {Role.UP, Role.BEFORE_RESIDUAL} if run.training.zero_initial_outputs else {Role.UP}
    return {parameter.name for parameter in describe(run.model).parameters() if parameter.role in roles}


def _further_checks(step: RecordedStep, tolerance: float) -> list[ReportCheck]:
    assert isinstance(step, _RunStep)
    checks = _checks_of_every_step(step, tolerance)
    if step.run.training.document_mask and step.run.layout.stages_per_rank == 1:
        batches = step.whole_batches()
        checks += compare_documents(step.trainer, batches, end_of_text=END_OF_TEXT, tolerance=tolerance)
    if decay := step.run.optimizer.ema_decay:
        checks += compare_average(step.averages, before=step.before, after=step.after, decay=decay)
    if mixture := step.run.data.mixture:
        checks += compare_mixture([part.weight for part in mixture], step.mesh, seed=step.run.training.seed)
    return checks


def _checks_of_every_step(step: RecordedStep, _tolerance: float) -> list[ReportCheck]:
    assert isinstance(step, _RunStep)
    checks = [*_compare_collectives(step), *_tell_compiled(step)]
    if has_experts(step.run):
        tokens = step.run.training.batch_size * step.run.training.sequence_length
        checks += compare_loads(step.trainer.balance.loads, tokens * step.run.model.experts.per_token)
    return checks


def _compare_collectives(step: _RunStep) -> list[ReportCheck]:
    """Check that every rank sent exactly the messages that the planner counts for the step."""
    layout, compiled = step.run.layout, bool(compiled_modules(step.model))
    of_ranks = [_planned(step.run, rank, compiled=compiled) for rank in range(layout.ranks.owners.size)]
    every = gather_to_first(step.sent)
    even = [_without_exchanges(sent) for sent in every or []]
    if every and (told := _told_exchanges(every, of_ranks, layout)):
        return [ReportCheck("collectives", None, False, told)]
    of_ranks = [_without_exchanges(planned) for planned in of_ranks]
    for rank, sent in enumerate(even):
        planned = of_ranks[layout.ranks.owners.place_of(rank)]
        if sent != planned:
            wrong = filter(None, [_told(sent - planned, "more"), _told(planned - sent, "fewer")])
            told = f"rank {rank} sent {' and '.join(wrong)} than planned"
            return [ReportCheck("collectives", None, False, told)]
    totals = sorted({planned.total() for planned in of_ranks})
    number = f"{totals[0]} to {totals[-1]}" if len(totals) > 1 else str(totals[0])
    return [ReportCheck("collectives", None, True, f"{number} on each rank, as planned")]


def _without_exchanges(sent: Counter[Sent]) -> Counter[Sent]:
    """Messages except exchanges between ranks that share experts, whose sizes depend on the loads of the experts."""
    return Counter({each: count for each, count in sent.items() if not _is_exchange(each)})


def _is_exchange(sent: Sent) -> bool:
    return is_folded(sent.axis) and sent.operation == Operation.ALL_TO_ALL


def _told_exchanges(every: list[Counter[Sent]], of_owners: list[Counter[Sent]], layout: Layout) -> str:
    """Compare the exchanges between ranks that share experts: their number, and the sum of their elements over all
    ranks, which does not depend on the loads. Returns a description of the difference; empty if there is none.
    """
    planned = [of_owners[layout.ranks.owners.place_of(rank)] for rank in range(len(every))]
    totals = []
    for messages in (every, planned):
        found = [
            (count, each.elements) for of_rank in messages for each, count in of_rank.items() if _is_exchange(each)
        ]
        totals.append((sum(count for count, _ in found), sum(count * elements for count, elements in found)))
    if totals[0] == totals[1]:
        return ""
    (number, elements), (of_plan, planned_elements) = totals
    return (
        f"all ranks together exchanged rows of experts in {number} messages of {elements:,} elements, and not in "
        f"{of_plan} messages of {planned_elements:,} elements as planned"
    )


def _planned(run: RunConfig, pipeline_rank: int, *, compiled: bool) -> Counter[Sent]:
    """Number of messages that the planner counts for one rank of a pipeline, keyed by operation, axis and number of
    elements.
    """
    planned: Counter[Sent] = Counter()
    for collective in step_traffic(Candidate.at(run, pipeline_rank), compiled=compiled):
        planned[Sent(collective.operation, collective.axis, collective.elements)] += collective.count
    return planned


def _tell_compiled(step: RecordedStep) -> list[ReportCheck]:
    """Return a check that says how compiled layers were compared; empty if no layer was compiled."""
    num_compiled = len(compiled_modules(step.model))
    return [ReportCheck(COMPILED, None, True, f"{num_compiled}, each compared as a whole")] if num_compiled else []


def _told(collectives: Counter[Sent], word: str) -> str:
    kinds = [f"{count} x {name} of {size:,} over {axis}" for (name, axis, size), count in collectives.items()]
    return f"{', '.join(kinds)} {word}" if kinds else ""
