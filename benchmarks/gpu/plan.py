"""Measurements of `run.py`, the most valuable first, and the goals for their figures.

| model or layout | source |
|---|---|
| 1.2B, vocabulary padded to 51,200 | the paper, Table 1 |
| 1.7B, 4 sequences of 4,096 tokens per GPU | Megatron-LM publishes 41% of an H100's dense peak |
| 8.3B, tensor 8, batch 8 | the paper, section 5.1 |
| 8.3B, tensor 8 x data 64, batch 512 | the paper, section 5.1 |

A peer without a GPT-2 trains a Llama with as many parameters, beside Crosscut's Llama.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.contenders.programs import PEERS_OF, is_installed
from benchmarks.contenders.task import Shape


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One contender with one model and one setting, for one process."""

    name: str
    group: str
    """`models`, `recomputation`, `precision`, `compile` or `layouts`."""
    program: str
    shape: Shape
    """Model and batch. The batch is the part that this GPU trains in a step."""
    micro_batch_size: int
    compiled: bool = True
    precision: str = "bfloat16"
    overrides: tuple[str, ...] = ()
    """Further settings of a Crosscut run."""
    tensor: int = 1
    data: int = 1
    """Data ranks of the layout. Only rank 0 exists, and collectives do nothing."""
    note: str = ""
    """Remark that is printed beside the figure."""


@dataclass(frozen=True)
class Goal:
    """Goal for the figure of a measurement."""

    text: str
    least: float
    of: str
    """Name of the measurement."""
    over: str = ""
    """Name of the measurement whose tokens/s are the divisor, or `peers` for the fastest peer on the same model.

    If empty, the goal is about the share of the dense peak.
    """


LARGE = {
    "1.2B at 1024": Shape(
        num_layers=40, hidden_size=1536, num_heads=16, sequence_length=1024, batch_size=32, vocab_size=51_200
    ),
    "1.7B at 4096": Shape(
        num_layers=24, hidden_size=2048, num_heads=16, sequence_length=4096, batch_size=4, vocab_size=131_072
    ),
    "1.2B at 4096": Shape(
        num_layers=40, hidden_size=1536, num_heads=16, sequence_length=4096, batch_size=8, vocab_size=51_200
    ),
}
LLAMAS = {
    f"Llama {model}": replace(shape, family="Llama", num_heads=shape.hidden_size // 128)
    for model, shape in LARGE.items()
}
"""Llamas of the same sizes. Their heads have 128 elements, since some attention kernels pad heads of 96 to 128."""
PAPERS_LARGEST = Shape(
    num_layers=72, hidden_size=3072, num_heads=32, sequence_length=1024, batch_size=8, vocab_size=51_200
)
TINY = Shape(num_layers=2, hidden_size=64, num_heads=8, sequence_length=32, batch_size=4, vocab_size=512)

GOALS = (
    Goal("utilisation of the dense peak", 0.50, "crosscut, 1.2B at 1024"),
    Goal("utilisation of the dense peak", 0.50, "crosscut, 1.2B at 4096"),
    Goal("utilisation of the dense peak", 0.55, "crosscut, 1.7B at 4096"),
    *(Goal("tokens/s over the fastest peer's", 1.10, f"crosscut, {model}", "peers") for model in (*LARGE, *LLAMAS)),
    Goal("tokens/s over bfloat16's", 1.25, "float8, 1.7B at 4096", "crosscut, 1.7B at 4096"),
)

_HALF = 2

MASKED = "compiled, its attention gets a mask and cannot use the flash kernel"
"""Remark on transformers, which drops the mask only if nothing is traced (seen in 5.17)."""


def full_plan(memory: int, installed: Callable[[str], bool] = is_installed) -> list[Measurement]:
    """List all measurements for a GPU of `memory` bytes, the most valuable ones first.

    1. Crosscut, which takes half a minute for each model.
    2. The plain program, which is usually the fastest peer: eager, to have a comparison in any case, and compiled,
       because the goals about peers are judged only with a compiled peer.
    3. Llamas, if a peer that trains them is installed.
    4. The other peers eager, then compiled as a whole, which takes minutes for tens of layers. Models with fewer layers
       come first.
    5. The models again, as a second turn.

    `selective` is measured uncompiled, because a compiled layer leaves the scores to the attention kernel anyway.
    """
    peers = sorted(filter(installed, PEERS_OF["GPT-2"]), key=lambda peer: peer != "plain")
    ours = {model: _measurement("crosscut", model, shape) for model, shape in LARGE.items()}
    short, wide, long = LARGE
    compiled = [
        replace(_measurement(peer, model, LARGE[model]), note=MASKED if peer == "transformers" else "")
        for peer in peers
        for model in ((short, wide, long) if peer == "plain" else (wide, short, long))
    ]
    eager = [_eager(peer, model, shape) for peer in peers for model, shape in LARGE.items()]
    llamas = _llamas([*filter(installed, PEERS_OF["Llama"])])
    plan = [
        *ours.values(),
        _variant(ours[wide], "precision", f"float8, {wide}", precision="float8"),
        *_layouts(PAPERS_LARGEST, tensor=8, data=64),
        _recomputing(ours[long], "full"),
        _variant(ours[wide], "compile", f"eager, {wide}", compiled=False),
        _recomputing(ours[wide], "operators"),
        *(m for m in (*eager, *compiled) if m.program == "plain"),
        *llamas,
        *(m for m in (*eager, *compiled) if m.program != "plain"),
        replace(_recomputing(ours[wide], "selective"), name=f"eager, recompute selective, {wide}", compiled=False),
        *ours.values(),
        *llamas,
        *(m for model in LARGE for m in compiled if m.shape == ours[model].shape),
    ]
    return [_fitted(m, memory) for m in plan]


def tiny_plan() -> list[Measurement]:
    """List a measurement of every kind that needs no compiler, on tiny models."""
    ours = replace(_measurement("crosscut", "tiny", TINY), compiled=False, micro_batch_size=2)
    llama = replace(ours, name="crosscut, Llama tiny", shape=replace(TINY, family="Llama"))
    return [
        ours,
        *(replace(ours, name=f"{peer}, tiny", program=peer) for peer in PEERS_OF["GPT-2"] if is_installed(peer)),
        llama,
        *(replace(llama, name=f"{peer}, Llama tiny", program=peer) for peer in PEERS_OF["Llama"] if is_installed(peer)),
        _variant(ours, "precision", "float8, tiny", precision="float8"),
        *(replace(m, compiled=False) for m in _layouts(TINY, tensor=8, data=64)),
        _recomputing(ours, "full"),
        ours,
    ]


def _llamas(peers: list[str]) -> list[Measurement]:
    """List the Llamas of Crosscut and of these peers, compiled and eager. Empty without a peer."""
    pairs = [(model, shape, peer) for model, shape in LLAMAS.items() for peer in peers]
    return [
        *(_measurement("crosscut", model, shape) for model, shape in LLAMAS.items() if peers),
        *(_eager(peer, model, shape) for model, shape, peer in pairs),
        *(_measurement(peer, model, shape) for model, shape, peer in pairs),
    ]


def _measurement(program: str, model: str, shape: Shape) -> Measurement:
    return Measurement(
        name=f"{program}, {model}", group="models", program=program, shape=shape, micro_batch_size=shape.batch_size
    )


def _eager(program: str, model: str, shape: Shape) -> Measurement:
    return replace(_measurement(program, model, shape), name=f"{program} eager, {model}", compiled=False)


def _variant(measurement: Measurement, group: str, name: str, **changes: object) -> Measurement:
    return replace(measurement, group=group, name=name, **changes)  # type: ignore[arg-type]


def _recomputing(measurement: Measurement, kind: str) -> Measurement:
    name = f"recompute {kind}, {measurement.name.partition(', ')[2]}"
    return _variant(measurement, "recomputation", name, overrides=(f"training.recompute={kind}",))


def _layouts(shape: Shape, *, tensor: int, data: int) -> Iterator[Measurement]:
    for copies in (1, data):
        batch = f"training.batch_size={shape.batch_size * copies}"
        yield Measurement(
            name=f"rank 0 of {tensor * copies} ranks, {shape.num_layers} layers of {shape.hidden_size}",
            group="layouts", program="crosscut", shape=shape, micro_batch_size=shape.batch_size,
            overrides=(f"layout.tensor={tensor}", f"layout.data={copies}", batch), tensor=tensor, data=copies,
        )  # fmt: skip


def halved(measurement: Measurement) -> Measurement:
    """Return the measurement with micro-batches of half the size."""
    return replace(measurement, micro_batch_size=measurement.micro_batch_size // _HALF)


def uncompiled(measurement: Measurement) -> Measurement:
    """Return the measurement without compilation, under another name."""
    return replace(measurement, name=f"uncompiled: {measurement.name}", group="compile", compiled=False)


def _fitted(measurement: Measurement, memory: int) -> Measurement:
    """Return the measurement with the largest micro-batches that should fit into memory."""
    while measurement.micro_batch_size > 1 and _estimated_bytes(measurement) > 0.9 * memory:
        measurement = halved(measurement)
    return measurement


def _estimated_bytes(measurement: Measurement) -> float:
    """Estimate the memory of a measurement, in bytes.

    The estimate is the sum of:

    - weights, gradients and moments of AdamW: 16 bytes for each parameter;
    - activations by Korthikanti et al. 2022 with a fused attention core;
    - for the peers, three copies of the logits in float32 (torchtitan: of an eighth of the logits);
    - for transformers without compilation, three more results of 4 H elements in float32, because its GeLU is a
      sequence of operators.
    """
    shape, tensor = measurement.shape, measurement.tensor
    tokens = measurement.micro_batch_size * shape.sequence_length
    parameters = (12 * shape.num_layers * shape.hidden_size**2 + shape.vocab_size * shape.hidden_size) / tensor
    gelu = 4 * (3 * 4) if measurement.program == "transformers" and not measurement.compiled else 0
    activations = tokens * shape.num_layers * shape.hidden_size * (10 + 24 / tensor + gelu)
    logits = 3 * 4 * tokens * shape.vocab_size * {"crosscut": 0.0, "torchtitan": 1 / 8}.get(measurement.program, 1.0)
    return 16 * parameters + activations + logits
