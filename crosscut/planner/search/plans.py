"""Results of a search over layouts: the layouts that fit, with their forecasts, and the rejected layouts, with the
reasons.
"""

from dataclasses import dataclass, replace

from crosscut.config import RunConfig
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Candidate
from crosscut.planner.hardware import Hardware
from crosscut.planner.memory import MemoryForecast
from crosscut.planner.memory.fullest import fullest_rank
from crosscut.planner.products import Speed
from crosscut.planner.search.proposals import kept_offload
from crosscut.planner.search.reasons import memory_of_rank, reason_against_memory
from crosscut.planner.time import StepTime, model_flops_per_second, step_time

NEAR_LIMIT = 0.9
"""Share of a rank's memory above which a layout has little margin for an error of the forecast."""

MOST_PIPELINES = 8
"""`Plans` lists a layout with a pipeline only if it is among this many fastest layouts."""

_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout that fits into memory, with its forecast."""

    candidate: Candidate
    """Settings of the layout. In a pipeline, `pipeline_rank` is the rank whose memory peaks highest."""
    memory: MemoryForecast
    """Memory of one rank; in a pipeline, of the rank whose memory peaks highest."""
    time: StepTime
    peak: float
    """FLOP/s of one device in the run's precision, as the maker states it."""

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s of one device."""
        return model_flops_per_second(self.candidate, self.time.total)

    @property
    def utilisation(self) -> float:
        """Model FLOP/s of one device as a share of the stated peak."""
        return self.flops_per_second / self.peak

    @property
    def tokens_per_day(self) -> float:
        """Tokens that all devices together train on in a day."""
        training = self.candidate.training
        return training.batch_size * training.sequence_length / self.time.total * _DAY

    def run(self, asked: RunConfig) -> RunConfig:
        """Return a copy of the run settings `asked` with the layout and the training settings of this plan."""
        mine = self.candidate.training
        training = replace(mine, device=asked.training.device, offload=kept_offload(asked.training, mine.recompute))
        layout = replace(self.candidate.layout, elastic=asked.layout.elastic)
        return replace(asked, layout=layout, training=training)


def plan_of(candidate: Candidate, memory: MemoryForecast, speed: Speed) -> Plan:
    """Return the plan of a candidate whose memory has been forecast."""
    time = step_time(candidate, speed.hardware, speed=speed)
    return Plan(candidate=candidate, memory=memory, time=time, peak=speed.stated_peak)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A layout that is impossible or does not fit into memory."""

    candidate: Candidate
    reason: str
    """Reason for the user: a sentence without the full stop."""
    needed: int = 0
    """Bytes that one rank needs; 0 if memory is not the reason for the rejection."""

    @property
    def label(self) -> str:
        """Name of the layout: its axes, stages and sharding, without recomputation and micro-batch size."""
        layout = self.candidate.layout
        experts = f", expert {layout.expert}" if layout.expert > 1 else ""
        several = f", {layout.stages_per_rank} stages per rank" if layout.stages_per_rank > 1 else ""
        shared = "" if layout.sharding == "none" else f", {layout.sharding}"
        if self.needed and layout.ranks.batch.size > 1 and not shared:
            shared = ", not sharded"
        return f"{layout.arrangement}{experts}{several}{shared}"


def forecast(candidate: Candidate, speed: Speed, *, with_time: bool = True) -> Plan | Rejected | None:
    """Forecast a candidate. The time is forecast only if the candidate fits into memory. Without `with_time`, return
    None for a candidate that fits.
    """
    hardware = speed.hardware
    rank, memory = fullest_rank(candidate, device=hardware.device, capability=hardware.capability)
    candidate = Candidate.at(candidate, rank)
    if reason := reason_against_memory(candidate, memory, hardware):
        return Rejected(candidate=candidate, reason=reason, needed=memory.total)
    return plan_of(candidate, memory, speed) if with_time else None


@dataclass(frozen=True, kw_only=True)
class Plans:
    """Result of a search: the layouts that fit, and the layouts that were rejected."""

    asked: RunConfig
    hardware: Hardware
    num_ranks: int
    expert_skew: float = 1.0
    """Load of the fullest of the ranks that share experts, as a multiple of the mean, for which the plan is made."""
    fitting: tuple[Plan, ...]
    """Layouts that fit into memory, the fastest first. All layouts without a pipeline are listed. Layouts with a
    pipeline are listed if they are among the `MOST_PIPELINES` fastest of all layouts."""
    rejected: tuple[Rejected, ...]
    """Layouts that are impossible or do not fit into memory. Layouts with a pipeline are grouped by arrangement of
    ranks. An arrangement has an entry if none of its layouts is possible or fits, and another entry if its ranks cannot
    have several stages each."""

    def is_near_limit(self, plan: Plan) -> bool:
        """Whether the plan needs more than `NEAR_LIMIT` of a rank's memory."""
        return plan.memory.total > NEAR_LIMIT * memory_of_rank(self.hardware, self.num_ranks)

    @property
    def best(self) -> Plan:
        """Fastest plan that leaves some memory free or, if none does, the fastest that fits. One must fit."""
        return next((plan for plan in self.fitting if not self.is_near_limit(plan)), self.fitting[0])

    @property
    def own(self) -> Plan | Rejected | None:
        """Forecast of the run's own layout, recomputation and micro-batches. None if the run has another number of
        ranks than the plan, or one rank without recomputation, as a run has that says nothing of its layout.
        """
        has_own = self.num_ranks > 1 or self.asked.training.recompute is not Recompute.NONE
        if not has_own or self.asked.layout.world_size != self.num_ranks:
            return None
        candidate = replace(Candidate.at(self.asked, 0), expert_skew=self.expert_skew)
        return forecast(candidate, Speed(self.hardware, self.asked.training.precision, ranks=self.num_ranks))

    @property
    def leanest(self) -> list[Rejected]:
        """Rejected layouts that come closest to fitting into memory.

        There is one entry for each combination of tensor size, pipeline size, expert size, stages per rank and sharding
        for which no layout fits: the layout that needs the fewest bytes per rank. The smallest number of bytes comes
        first. Layouts that were rejected for a reason other than memory come last. A layout with a pipeline is left out
        if another entry has the same reason.
        """
        fits = {_kind(plan.candidate) for plan in self.fitting}
        nearest: dict[tuple[object, ...], Rejected] = {}
        for rejected in self.rejected:
            kind = _kind(rejected.candidate)
            if kind not in fits and (kind not in nearest or rejected.needed < nearest[kind].needed):
                nearest[kind] = rejected
        found = sorted(nearest.values(), key=_nearness)
        first = {rejected.reason: rejected for rejected in reversed(found)}
        return [
            rejected
            for rejected in found
            if rejected.candidate.layout.num_stages == 1 or first[rejected.reason] is rejected
        ]


def _kind(candidate: Candidate) -> tuple[object, ...]:
    layout = candidate.layout
    return layout.tensor, layout.pipeline, layout.expert, layout.stages_per_rank, layout.sharding


def _nearness(rejected: Rejected) -> tuple[bool, int, bool]:
    """Sort key: the rejected layout that comes closest to fitting into memory is first."""
    return not rejected.needed, rejected.needed, rejected.candidate.layout.num_stages > 1
