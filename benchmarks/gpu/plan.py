"""Entries of the two calls of `run.py`, the most valuable first, and the goals for the ratios of their steps.

| model or rank | source |
|---|---|
| 1.2B, vocabulary padded to 51,200 | the paper, Table 1 |
| 1.7B, 4 sequences of 4,096 tokens per GPU | Megatron-LM publishes 41% of an H100's dense peak |
| rank of eight: 8.3B, tensor 8, batch 8 | the paper, section 5.1 |
| 8 layers of 4,096 | the width of models of 8B |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from benchmarks.contenders.task import Shape, Way

CHANGED, BASE = "changed", "base"
"""Names of the code of this checkout, and of the code that it is compared with."""

Kind = Literal["card", "products", "attention", "step"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One experiment, for one process."""

    name: str
    kind: Kind
    limit: float
    """Seconds after which its process is ended. An entry should take half of it."""
    code: str = CHANGED
    """Name of the folder whose `crosscut` is imported."""
    program: str = "crosscut"
    shape: Shape = field(default_factory=Shape)
    """Model of a step, and the batch that this GPU trains on in a step."""
    micro_batch_size: int = 0
    """Sequences of a micro-batch. 0 means the whole batch."""
    compiled: bool = True
    precision: str = "bfloat16"
    overrides: tuple[str, ...] = ()
    """Further settings of a Crosscut run."""
    tensor: int = 1
    """Tensor ranks of the layout. Only rank 0 exists, and collectives do nothing."""
    loss_chunk_tokens: int = 0
    """Tokens whose logits a peer holds at once. 0 means all."""
    profiled: bool = False
    """Whether kernels and host are timed, too."""

    @property
    def expected(self) -> float:
        """Seconds that the entry should take. It starts only if they are left."""
        return self.limit / 2

    @property
    def title(self) -> str:
        """Name, with the code where it is not the changed one."""
        return self.name if self.code == CHANGED else f"{self.name} ({self.code})"

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch."""
        return self.micro_batch_size or self.shape.batch_size

    def way(self, device: str) -> Way:
        """Return the way in which the step runs. Peers have no settings of Crosscut."""
        layout = (f"layout.tensor={self.tensor}",) if self.tensor > 1 else ()
        own = (*layout, *self.overrides, f"training.micro_batch_size={self.sequences}")
        overrides = own if self.program == "crosscut" else ()
        return Way(
            compiled=self.compiled, device=device, precision=self.precision, overrides=overrides,
            loss_chunk_tokens=self.loss_chunk_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """Goal for the steps per second of one entry, as a multiple of another's, both measured in the same call."""

    least: float
    of: tuple[str, str]
    """Name and code of an entry."""
    over: tuple[str, str]


CHUNK_TOKENS = 4096
"""Tokens whose logits the plain program holds at once."""
SHORT, WIDE, RANK, BROAD = "1.2B at 1024", "1.7B at 4096", "rank of eight", "8 layers of 4096"
PLAIN = "plain program with a chunked loss"
SHAPES = {
    SHORT: Shape(num_layers=40, hidden_size=1536, num_heads=16, sequence_length=1024, batch_size=32, vocab_size=51_200),
    WIDE: Shape(num_layers=24, hidden_size=2048, num_heads=16, sequence_length=4096, batch_size=4, vocab_size=131_072),
    RANK: Shape(num_layers=72, hidden_size=3072, num_heads=32, sequence_length=1024, batch_size=8, vocab_size=51_200),
    BROAD: Shape(num_layers=8, hidden_size=4096, num_heads=32, sequence_length=4096, batch_size=4, vocab_size=32_768),
}
TINY = Shape(num_layers=2, hidden_size=64, num_heads=8, sequence_length=32, batch_size=4, vocab_size=512)

GOALS = (
    Goal(1.035, (WIDE, CHANGED), (WIDE, BASE)),
    Goal(1.04, (SHORT, CHANGED), (SHORT, BASE)),
    Goal(1.4, (RANK, CHANGED), (RANK, BASE)),
    Goal(1.05, (WIDE, CHANGED), (f"{PLAIN}, {WIDE}", CHANGED)),
    Goal(1.05, (SHORT, CHANGED), (f"{PLAIN}, {SHORT}", CHANGED)),
    Goal(1.12, (f"float8, {WIDE}", CHANGED), (WIDE, CHANGED)),
    Goal(1.25, (f"float8, {BROAD}", CHANGED), (BROAD, CHANGED)),
)


def step(model: str, *, limit: float = 52.0) -> Entry:
    """Return the entry of a step of this model in bfloat16."""
    return Entry(name=model, kind="step", limit=limit, shape=SHAPES[model], tensor=8 if model == RANK else 1)


def float8(model: str) -> Entry:
    """Return the entry of a step of this model in 8 bits, whose layers take longest to compile."""
    return replace(step(model, limit=76.0), name=f"float8, {model}", precision="float8")


def plain(model: str) -> Entry:
    """Return the entry of the fair rival: one compiled graph of all layers, which takes a minute."""
    return replace(step(model, limit=150.0), name=f"{PLAIN}, {model}", program="plain", loss_chunk_tokens=CHUNK_TOKENS)


SPLIT = replace(step(RANK), name=f"{RANK}, split sequence", overrides=("layout.sequence_parallel=true",))
LLAMA = replace(step(WIDE), name=f"Llama {WIDE}", shape=replace(SHAPES[WIDE], family="Llama"))
CARD = Entry(name="card", kind="card", limit=30.0)
"""Power limit, clocks, copies, and the matrix rate. Each call begins with it, since a call may get another card."""


def first_call() -> list[Entry]:
    """List the profiles of three steps, products and attention."""
    profiles = [replace(entry, profiled=True) for entry in (step(WIDE), step(RANK), float8(WIDE), SPLIT)]
    *three, split = ([*in_turn(entry)] for entry in profiles)
    return [
        CARD,
        *(entry for pair in three for entry in pair),
        Entry(name="products", kind="products", limit=50.0),
        Entry(name="attention", kind="attention", limit=30.0),
        *split,
    ]


def second_call(states: Sequence[str] = ()) -> list[Entry]:
    """List the steps whose ratios are the goals. `states` are codes between the base and the changed code."""
    again = [entry for model in (WIDE, SHORT) for entry in in_turn(step(model), first=BASE)]
    return [
        CARD,
        *in_turn(step(WIDE)),
        *in_turn(step(SHORT)),
        step(BROAD),
        float8(BROAD),
        plain(WIDE),
        *(replace(step(WIDE), code=state) for state in states),
        *in_turn(step(RANK)),
        *in_turn(float8(WIDE)),
        *again,
        replace(float8(BROAD), code=BASE),
        plain(SHORT),
        *in_turn(SPLIT),
        *in_turn(LLAMA),
    ]


def in_turn(entry: Entry, *, first: str = CHANGED) -> Iterator[Entry]:
    """Yield the entry with the changed code and with the base, beginning with `first`."""
    for code in sorted((CHANGED, BASE), key=lambda code: code != first):
        yield replace(entry, code=code)


def tiny(entry: Entry) -> Entry:
    """Return the entry with a tiny model, in micro-batches of half the batch. A compiler for CPUs takes longer."""
    return replace(entry, shape=replace(TINY, family=entry.shape.family), micro_batch_size=2, limit=300.0)
