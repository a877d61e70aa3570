"""A run's teacher on one rank: its weights, the shapes of its passes, and the FLOPs of a step."""

from dataclasses import replace
from functools import lru_cache

from crosscut.architecture import Decoder, Device, Target, describe, kept, layer_parameters, root_parameters
from crosscut.architecture.pipeline import Stage
from crosscut.architecture.readings import inner_products, weight_flops
from crosscut.architecture.steps import Rows, Value
from crosscut.config import Layout, ModelConfig
from crosscut.config.precision import PRECISIONS
from crosscut.config.teachers import teacher_model
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Planned

_ID_BYTES = 8


def model_of_teacher(run: Planned) -> ModelConfig:
    """Model of the run's teacher. Its vocabulary is padded like that of the run's model."""
    return replace(teacher_model(run.teacher.folder), vocab_multiple=run.model.vocab_multiple)


def learns_labels(run: Planned) -> bool:
    """Whether the run's model learns the labels of a task, and no tokens, so that the teacher's own ranks compute its
    logits.
    """
    return describe(run.model).head.vocabulary is None


def teacher_bytes(run: Planned) -> int:
    """Bytes of the teacher's weights on one rank that has the teacher, for a run whose precision is decided."""
    size = PRECISIONS[run.teacher.precision_in(run.training.precision)].compute_bytes
    return size * sum(_elements(part, tensor) for part, tensor in parts_of_teacher(run))


def parts_of_teacher(run: Planned) -> list[tuple[Decoder, int]]:
    """Parts of the teacher that a rank has, and the number of tensor ranks over which each is cut: the layers and the
    head, or the whole teacher if both are cut alike.
    """
    whole, ranks = describe(model_of_teacher(run)), run.teacher_ranks
    if not ranks.is_apart or learns_labels(run):
        return [(whole, ranks.tensor)]
    layers = len(whole.layers)
    trunk, head = Stage(range(layers), is_last=False), Stage(range(layers, layers), is_first=False)
    return [(whole.part([trunk]), ranks.tensor), (whole.part([head]), ranks.student.tensor)]


@lru_cache(maxsize=256)
def _elements(part: Decoder, tensor: int) -> int:
    """Number of parameters of a part of the teacher on one rank."""
    target = Target.of(Layout(tensor=tensor))
    layers = sum(count * sum(p.size for p in layer_parameters(layer, target)) for layer, count in part.kinds.items())
    return layers + sum(p.size for p in root_parameters(part, target))


def fields_of_teacher(run: Planned) -> tuple[str, ...]:
    """Names of the fields of a batch that the teacher reads and the run's batches have."""
    given = describe(run.model).reads(document_mask=run.training.document_mask)
    return tuple(name for name in describe(model_of_teacher(run)).reads_without_loss if name in given)


def teacher_target(run: Planned, *, device: Device = "cpu") -> Target:
    """Shapes and data types with which one rank computes the teacher for a micro-batch."""
    numbers = PRECISIONS[run.teacher.precision_in(run.training.precision)]
    return replace(
        Target.of(Layout(tensor=run.teacher_ranks.tensor)),
        sequences=run.teacher_ranks.share(run.micro_batch_size),
        length=run.training.sequence_length,
        device=device,
        compute=numbers.compute,
        compute_bytes=numbers.compute_bytes,
        sums_bytes=numbers.compute_bytes,
        document_mask="documents" in fields_of_teacher(run),
    )


def head_target(run: Planned) -> Target:
    """Shapes with which one rank computes the teacher's logits for its own tokens of a micro-batch, or for the
    sequences of its group in a task.
    """
    if learns_labels(run):
        return teacher_target(run)
    length = run.training.sequence_length // run.layout.context
    predicted = run.predicted_tokens if "predicted" in describe(run.model).head.reads else None
    numbers = PRECISIONS[run.teacher.precision_in(run.training.precision)]
    return replace(
        Target.of(Layout(tensor=run.layout.tensor)),
        sequences=run.micro_batch_size,
        length=length,
        compute=numbers.compute,
        compute_bytes=numbers.compute_bytes,
        predicted=predicted,
    )


def teacher_flops(run: Planned) -> int:
    """FLOPs of the teacher in a step on one rank that has it: one forward pass for each micro-batch."""
    trunk, *others = (part for part, _ in parts_of_teacher(run))
    target, head = teacher_target(run), (others or [trunk])[-1].head
    flops = sum(product.flops for product in head.products(head_target(run)))
    for layer, count in trunk.kinds.items():
        inner = sum(product.flops for product in inner_products(layer, target))
        flops += count * (weight_flops(layer, target) + inner)
    return run.num_micro_batches * flops


def teacher_pass_bytes(run: Planned, device: Device) -> int:
    """Bytes of activations at the peak of a forward pass of the teacher on one rank."""
    target = teacher_target(run, device=device)
    (trunk, _), *_ = parts_of_teacher(run)
    stream = target.tokens * trunk.embedding.tokens.shape[1] * target.compute_bytes
    return 2 * stream + max(part.total for layer in trunk.kinds for part in kept(layer, target, Recompute.NONE))


def teacher_results_bytes(run: Planned) -> int:
    """Bytes of the teacher's results for a micro-batch on one rank."""
    target = head_target(run)
    return result_of_teacher(run).elements(target) * target.compute_bytes


def result_of_teacher(run: Planned) -> Value:
    """Result of the teacher that the ranks exchange: its last hidden states, or its logits of a task."""
    model = model_of_teacher(run)
    if not learns_labels(run):
        return Value("last hidden states", model.hidden_size, Rows.TOKENS)
    *_, loss = describe(model).root_steps[1]
    return loss.reads[0]


def stored_logit_bytes(run: Planned) -> int:
    """Bytes of a teacher's stored logits on one rank that computes the loss: those of all micro-batches of a step, and
    of the next step, which are read ahead. 0 if the run reads no stored logits.
    """
    if not run.teacher.cache:
        return 0
    k = min(run.teacher.k, run.model.vocab_size)
    wide = 8 if run.teacher.precision_in(run.training.precision) == "float64" else 4
    tokens = run.micro_batch_size * run.training.sequence_length // run.layout.context
    return 2 * run.num_micro_batches * tokens * (4 * k + wide * (k + 1))


def teacher_logit_bytes(run: Planned, rows: int) -> float:
    """Bytes that the teacher's part in the loss holds for each token of a chunk, if a rank has `rows` rows of the
    vocabulary: the log probabilities of both models, in the accumulation type, and two or three tensors of the same
    size from which the divergence follows. Before that, stored logits are put into their columns, with an index, the
    log probabilities and a temporary tensor.
    """
    wide = run.training.numbers.accumulation_bytes
    held = (4 if run.teacher.mixed_beta in (0.0, 1.0) else 5.25) * wide * rows
    k = min(run.teacher.k, run.model.vocab_size)
    return max(held, 2 * wide * rows + (_ID_BYTES + 2 * wide) * k) if run.teacher.cache else held
