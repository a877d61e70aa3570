"""One optimizer step on one layout: batch, forward, backward, reduce, clip, step."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from crosscut.architecture.optimizers.low_rank import has_low_rank
from crosscut.architecture.pipeline import Stage, stages_of_rank
from crosscut.checkpoint import AVERAGE
from crosscut.config import ResolvedRun
from crosscut.flight import RECORD, RunPhase
from crosscut.kernels.deferral import Deferral
from crosscut.model import GPT, Batch, initialize
from crosscut.model.heads.head import Scales, Teaching
from crosscut.model.running import PLAIN_LOSS, Runners
from crosscut.model.stages import Observer, StageStep
from crosscut.parallel import (
    LowRankGradients,
    ParallelMesh,
    RandomStreams,
    enable_symmetric_memory,
    make_reducer,
    measure_gradients,
    shard_model,
    sum_copies,
)
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.state.gradient_norm import clip_factor
from crosscut.planner.stages import schedule_of, separates_weights, stage_sizes
from crosscut.training.loss_scale import LossScale
from crosscut.training.memory.host_moments import InHostMemory
from crosscut.training.memory.peak import peak_bytes
from crosscut.training.optimization.averaging import WeightAverage
from crosscut.training.optimization.balance import Balance
from crosscut.training.optimization.optimizer import make_optimizer, rules_of, set_learning_rate
from crosscut.training.optimization.schedule import learning_rate
from crosscut.training.precision import needs_loss_scale, torch_dtype
from crosscut.training.result import DeviceFigures, StepResult
from crosscut.training.runners import make_runners
from crosscut.training.speed.compilation import compiled_loss, make_compiler
from crosscut.training.teachers.teacher import PARTS, Teacher, make_teacher


def in_turn(micro_batches: Sequence[Batch]) -> Iterable[tuple[int, Batch]]:
    """Micro-batches of a step with their indexes, in the order in which a rank without pipeline runs them. A dry run
    replaces this function, because it runs equal micro-batches once.
    """
    return enumerate(micro_batches)


class Trainer:
    """Model, optimizer and random streams of one rank, and the training step that uses them.

    `step` only queues work on the device. The host never waits for a result: even the decision whether the weights may
    change is a tensor on the device.
    """

    observer: Observer | None = None
    """Observer of the passes of pipeline stages, such as `profiling.passes.PassRecorder`; None by default."""
    teacher: Teacher | None
    """Teacher of the run; None without a teacher."""
    _factor: Tensor
    """Float64 scalar on the device: 1 / number of targets of the current step, over all ranks."""

    def __init__(
        self,
        run: ResolvedRun,
        mesh: ParallelMesh,
        *,
        loss_chunk_tokens: int | None = None,
        scales_loss: bool | None = None,
    ) -> None:
        """Create the model with its initial weights.

        `loss_chunk_tokens` is the number of tokens whose logits the loss holds at once; None means the device's
        default. `scales_loss` says whether the loss is scaled; None means that the run's precision decides.
        """
        self.run, self.mesh = run, mesh
        self.bytes_before = peak_bytes(mesh.device)
        """Largest memory of this rank before the model was made (`memory.peak.peak_bytes`)."""
        self.streams = RandomStreams(mesh, run.training.seed)
        self.compiler = make_compiler(run, mesh)
        self.deferral = Deferral() if separates_weights(mesh.layout) else None
        """Deferral of weight gradients, if a pipeline's schedule computes them separately; otherwise None."""
        self.model = self._make_model(loss_chunk_tokens)
        enable_symmetric_memory(mesh)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.low_rank = self._make_low_rank()
        self.reducer = make_reducer(self.model, mesh, apart=self.low_rank.errors if self.low_rank else ())
        self.optimizer = make_optimizer(
            self.model,
            run.optimizer,
            rules=rules_of(run.model, run.optimizer),
            muon_dtype=torch_dtype(run.training.numbers.muon),
            home=InHostMemory() if "optimizer" in run.training.offload else None,
        )
        self.average = WeightAverage(self.model, run.optimizer.ema_decay) if run.optimizer.ema_decay else None
        """Moving average of the weights; None without `optimizer.ema_decay`."""
        scales_loss = needs_loss_scale(run.precision) if scales_loss is None else scales_loss
        self.loss_scale = LossScale(mesh.device) if scales_loss else None
        self.balance = Balance(self.model, self.summed)
        self.teacher = make_teacher(run, mesh)
        self._held = torch.zeros((), dtype=torch.float32, device=mesh.device)
        """Float32 scalar on the device: 1 once a step has failed and no later step may change the weights, else 0."""

    def _make_model(self, loss_chunk_tokens: int | None) -> GPT:
        """Create the model, sharded over the data ranks, with its initial weights."""
        run, mesh = self.run, self.mesh
        loss_runner = PLAIN_LOSS if self.compiler is None else compiled_loss()
        runners = Runners(
            layer=make_runners(
                run.training, streams=self.streams, device=mesh.device, compiler=self.compiler, deferral=self.deferral
            ),
            loss=replace(loss_runner, chunk_tokens=loss_chunk_tokens),
            context_attention=run.config.context_attention.way,
            stages=self._stages(),
        )
        numbers = run.training.numbers
        dtypes = {"dtype": torch_dtype(numbers.accumulation), "compute_dtype": torch_dtype(numbers.compute)}
        model = GPT(run.model, mesh=mesh, streams=self.streams, runners=runners, **dtypes)
        shard_model(model, mesh, units=model.blocks, compute_dtype=dtypes["compute_dtype"], always_used=True)
        initialize(
            model, run.training.seed, spread=run.training.initial_spread, zero_outputs=run.training.zero_initial_outputs
        )
        return model

    def _make_low_rank(self) -> LowRankGradients | None:
        """Make the sums of this rank's gradients in low rank; None if all are summed whole."""
        rank, seed = self.run.optimizer.gradient_rank, self.run.training.seed
        names = {parameter.name for parameter in self.model.part.parameters() if has_low_rank(parameter, rank)}
        matrices = {name: parameter for name, parameter in self.model.named_parameters() if name in names}
        return LowRankGradients(matrices, self.mesh, rank=rank, seed=seed) if matrices else None

    def _stages(self) -> tuple[Stage, ...]:
        """Return the stages of this rank. If the pipeline has one rank, one stage holds the whole model."""
        pipeline = self.mesh.pipeline
        if pipeline.size == 1:  # the layout of the run may have more ranks than the mesh
            return (Stage(range(self.run.model.num_layers)),)
        return stages_of_rank(stage_sizes(self.run.config), rank=pipeline.rank, num_ranks=pipeline.size)

    @property
    def more_state(self) -> dict[str, dict[str, Tensor]]:
        """State that checkpoints store besides the model and the optimizer: the tensors of the loss scale under
        `loss_scale`, the memories of gradients in low rank under `low_rank`, and the average of the weights under
        `AVERAGE`. The key of what the run does not have is missing. The tensors are live, not copied.
        """
        state = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}
        if self.low_rank is not None:
            state["low_rank"] = self.low_rank.state()
        return state if self.average is None else {**state, AVERAGE: self.average.tensors}

    def step(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Run step `step`, counted from 0, on this data rank's micro-batches.

        On a GPU, the call may return before the device has finished the step.

        If the loss or the gradient norm is NaN or infinite on at least one rank, no rank changes its weights in this
        step. With a loss scale, training then continues with the next step. Without a loss scale, no later step changes
        the weights either, and reading the result raises `NonFiniteError`.
        """
        result = self.update(step, self.accumulate(step, micro_batches))
        for parameter in self.parameters:  # the optimizer's `zero_grad` takes several times as long
            parameter.grad = None
        return result

    def update(self, step: int, loss: Tensor) -> StepResult:
        """Sum the loss over all ranks, clip the summed gradients, update the weights and their average, and return the
        result of the step. `loss` is the result of `accumulate` on this rank. `step` counts from 0.

        The weights stay unchanged on all ranks if the loss or a gradient of at least one rank is not finite. The
        all-reduce of the loss also tells all ranks whether every rank's gradients are finite.
        """
        RECORD.phase(RunPhase.OPTIMIZER)
        copies = [copy.grad for copy in self.model.embedding.copies if copy.grad is not None]
        counted = self.model.embedding.counted_once(self.parameters)
        measured = measure_gradients(counted, self.mesh.owners, also=[loss, *copies])
        loss, verdict = self.summed(torch.stack([loss, measured.verdict.to(loss.dtype)])).unbind()
        norm = measured.norm + verdict
        held = self._hold(loss, norm)
        self.optimizer.clip = clip_factor(norm, self.run.optimizer.clip_norm)
        rate = learning_rate(step, config=self.run.optimizer, num_steps=self.run.training.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.found_inf = held
        if self.average is not None:
            self.average.begin()
        self.optimizer.step()
        more = {**self.balance.update(held=held), **self._parts_of_loss()}
        if self.low_rank is not None:
            self.low_rank.commit(held)
        if self.average is not None:
            self.average.update(step)
        figures = DeviceFigures(loss, norm, held, measured.own)
        result = StepResult(step, rate, figures, loss_scale=self.loss_scale, more=more, loads=self.balance.step_loads)
        if self.loss_scale is not None:
            self.loss_scale.update(held)
        return result

    def release(self) -> None:
        """Let later steps change the weights again after a step that was not finite. Call this method only after the
        state from before that step has been restored. Gradients of steps that were launched since then are dropped.
        """
        self._held = torch.zeros_like(self._held)
        for parameter in self.parameters:
            parameter.grad = None

    def accumulate(self, step: int, micro_batches: Sequence[Batch]) -> Tensor:
        """Run the forward and backward pass of all micro-batches. Return this rank's part of the mean loss, a scalar,
        and leave the summed gradients in `.grad`. `summed` turns the parts of all ranks into the mean loss.

        The mean is over the target tokens of all ranks that see different tokens (`mesh.tokens`), so the loss does not
        depend on how the batch is split. If the loss has several terms, the means of all terms are added up. In a
        pipeline, only the last stage has the terms of the head, and each stage has the terms of its layers.
        """
        RECORD.phase(RunPhase.FORWARD, step)
        scales = self._scales(micro_batches)
        self.balance.begin()
        self.reducer.begin()
        passes = self._pass_stages if self.mesh.is_staged else self._pass_all
        total = passes(step, micro_batches, scales)
        RECORD.phase(RunPhase.REDUCTION)
        self.reducer.finish()
        if self.mesh.ends is not None and self.model.embedding.is_trained_twice:  # both ranks hold the tied embedding
            sum_copies(self.model.embedding.weight, self.mesh.ends)
        if self.loss_scale is not None:
            self.loss_scale.unscale_(self.parameters)
            total = self.loss_scale.unscaled(total)
        if self.low_rank is not None:
            self.low_rank.reduce()
        return total

    def summed(self, part: Tensor) -> Tensor:
        """Sum `part` over the ranks that have different parts of the loss: all stages of a pipeline, and all ranks that
        see different tokens. Communication: one all-reduce over each of these axes.
        """
        for axis in self.mesh.owners:
            part = all_reduce(part, axis)
        return all_reduce(part, self.mesh.tokens)

    def _pass_all(self, step: int, micro_batches: Sequence[Batch], scales: Scales) -> Tensor:
        """Run the forward and backward pass of each micro-batch in turn. Return the sum of this rank's losses."""
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        for index, batch in in_turn(micro_batches):
            self.streams.restart(step=step, micro_batch=index)
            if index == len(micro_batches) - 1:
                self.reducer.arm()
            RECORD.phase(RunPhase.FORWARD)
            loss = self.model.loss(
                self._taught(batch),
                scales,
                z_loss=self.run.training.z_loss,
                sums=self.balance.sums,
                teaching=self._teaching,
            )
            RECORD.phase(RunPhase.BACKWARD)
            loss.backward()
            total = total + loss.detach()
        return total

    def _pass_stages(self, step: int, micro_batches: Sequence[Batch], scales: Scales) -> Tensor:
        """Run the forward and backward passes of all micro-batches through this rank's stages. Return the sum of the
        losses that this rank has a part of.
        """
        return StageStep(
            model=self.model,
            schedule=schedule_of(self.run.layout, len(micro_batches)),
            micro_batches=micro_batches,
            loss=partial(self._loss_of_hidden, scales),
            scales=scales,
            sums=self.balance.sums,
            begin=lambda index: self.streams.restart(step=step, micro_batch=index),
            arm=self.reducer.arm,
            deferral=self.deferral,
            observer=self.observer,
        ).run()

    def _parts_of_loss(self) -> dict[str, Tensor]:
        """Return the mean losses of the data and of the teacher, before their shares. Empty without a teacher.

        Communication: an all-reduce over the ranks that see different tokens, and one over the stages of a pipeline.
        """
        if self.teacher is None:
            return {}
        return dict(zip(PARTS, self.summed(self.teacher.taken() * self._factor), strict=True))

    def _loss_of_hidden(self, scales: Scales, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the loss of a micro-batch from the output of the last stage."""
        z_loss = self.run.training.z_loss
        return self.model.loss_of_hidden(hidden, self._taught(batch), scales, z_loss=z_loss, teaching=self._teaching)

    @property
    def _teaching(self) -> Teaching | None:
        return None if self.teacher is None else self.teacher.teaching

    def _taught(self, batch: Batch) -> Batch:
        """Return a micro-batch with the results of the teacher, if the run has one."""
        return batch if self.teacher is None else self.teacher.taught(batch)

    def _scales(self, micro_batches: Sequence[Batch]) -> Scales:
        """Return the factors that turn the terms of the loss into means over all ranks: 1 / number of rows of the
        term's field that hold something to predict, times the term's coefficient. A loss scale multiplies all factors.
        """
        terms = self.model.loss_terms
        counts = [sum(batch.count(term.field) for batch in micro_batches) for term in terms]
        summed = all_reduce(torch.stack([torch.as_tensor(count) for count in counts]), self.mesh.tokens)
        scales = 1.0 / summed.double().clamp(min=1.0)
        self._factor = scales[0]
        if self.loss_scale is not None:
            scales = self.loss_scale.scaled(scales)
        return {
            term.name: scale if term.coefficient == 1.0 else scale * term.coefficient
            for term, scale in zip(terms, scales.unbind(), strict=True)
        }

    def _hold(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1 if this step must not change the weights, else 0: a float32 scalar on the device.

        All ranks get the same value: the loss is summed over all ranks, and `norm` is NaN on all ranks if a gradient or
        a part of the loss is not finite on any rank.
        """
        finite = loss.isfinite() & norm.isfinite()
        if self.loss_scale is not None:
            return (~finite | self.loss_scale.exhausted).float()
        self._held = torch.maximum(self._held, (~finite).float())
        return self._held
