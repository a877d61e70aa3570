"""Faults of the kinds that happened in respected code, planted one at a time: `verify` has to find each.

A fault is planted from here, by replacing a function while a verification runs; the package has no switches for it.
Where the fault would change the uncut model as well, it is planted in the cut one only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.distributed.fsdp import FSDPModule

from crosscut.architecture import GatedMLP, Layer
from crosscut.config import IGNORED, Layout, RunConfig
from crosscut.config.axes import AxisRole, role_of
from crosscut.config.model import NormPosition
from crosscut.config.parts.kinds import FeedForward
from crosscut.data import mixture
from crosscut.kernels import deferral
from crosscut.model import Batch, batch, block, gpt, initialization, stages
from crosscut.model.building import Builder
from crosscut.model.embedding import Embedding
from crosscut.model.heads import pooled_head, projection, spans_head, summary_heads
from crosscut.model.heads.head import Scales
from crosscut.model.heads.summary_heads import ChoosingHead
from crosscut.model.sublayers import attention, gated_mlp, mlp
from crosscut.parallel import (
    GradientNorm,
    GradientReducer,
    LayerNorm,
    ParallelMesh,
    RandomStreams,
    RowParallelLinear,
    TiedWeight,
    VocabParallelEmbedding,
    copy_to_tensor_parallel,
    cross_entropy,
    disturb_,
    embedding,
    fused,
    linear,
    make_mesh,
    norm,
    normal_,
    operators,
    random,
    seed_of,
    sharded_parameter,
)
from crosscut.parallel.collectives import all_gather, all_reduce, split, start_all_reduce_owned, wait
from crosscut.parallel.owners.stages import Channels
from crosscut.parallel.state import gradients, sharding, turns
from crosscut.parallel.state.gradient_norm import clip_factor
from crosscut.parallel.state.gradients import _local
from crosscut.parallel.state.parameters import cut_dim, local
from crosscut.training import step as training_step
from crosscut.training.optimization import averaging, muon
from crosscut.training.optimization.optimizer import LocalAdamW
from crosscut.training.speed import compilation
from crosscut.verification import LayoutReport, for_verification, verify_module, verify_on_mesh
from crosscut.verification.module import CLIP_NORM
from crosscut.verification.run_proof import MICRO_BATCHES
from tests.verification.runs import BERT, CHOICE, CLASSES, CPU, MASKED, SPANS, tiny_run, verify_run

Patch = pytest.MonkeyPatch

TENSOR = Layout(tensor=2)
SPLIT = Layout(tensor=2, sequence_parallel=True)
FOUR = Layout(tensor=4)
DATA = Layout(data=2)
BOTH = Layout(tensor=2, data=2)
SHARED = Layout(data=2, sharding="zero3")
STAGES = Layout(pipeline=2)
INTERLEAVED = Layout(pipeline=2, stages_per_rank=2)
DELAYED = Layout(pipeline=2, schedule="zero_bubble")
DELAYED_SHARED = Layout(pipeline=2, data=2, sharding="zero2", schedule="zero_bubble")
STAGED_DATA = Layout(pipeline=2, data=2)
STAGED_TENSOR = Layout(pipeline=2, tensor=2)
ACCUMULATED = {"micro_batch_size": 1}
MUON = {"matrices": "muon", "matrix_learning_rate": 0.02}
AVERAGED = {"ema_decay": 0.9}
AFTER = "parameters after a step"
PACKED = {"document_mask": True}
MIXED = {"mixture": [{"folder": "books", "weight": 3}, {"folder": "mail", "weight": 1}]}


@dataclass(frozen=True)
class Mutation:
    """A fault, and the module that must be named for it."""

    fault: str
    plant: Callable[[Patch], None]
    module: str
    layout: Layout
    own_module: bool = False
    """Planted in a model of the user's own, where GPT-2 has no such place."""
    options: tuple[tuple[str, Any], ...] = ()
    """Settings of the run, for a fault that needs another model than GPT-2 or other settings of the training."""


MUTATIONS: list[Mutation] = []


def row_of(mutation: Mutation, report: LayoutReport) -> str:
    """The fault's line in the page about them."""
    named, cause = (report.first.place, report.first.cause) if report.first else ("nothing", "")
    module, comma, micro_batch = named.partition(", in ")
    return f"| {mutation.fault} | {mutation.layout} | `{module}`{comma}{micro_batch} | {cause} |"


def fault(description: str, module: str, layout: Layout = TENSOR, *, own_module: bool = False, **options: Any) -> Any:
    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS.append(Mutation(description, plant, module, layout, own_module, tuple(options.items())))
        return plant

    return register


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[Patch], None]]:
    """Decorator for a fault that is one function in the place of another: of the function `name` of `owner`, which the
    decorated function gets as its first argument.
    """

    def planter(faulty: Callable[..., Any]) -> Callable[[Patch], None]:
        @wraps(faulty)
        def plant(patch: Patch) -> None:
            plain = getattr(owner, name)
            patch.setattr(owner, name, lambda *arguments, **options: faulty(plain, *arguments, **options))

        return plant

    return planter


def verify_planted(plant: Callable[[Patch], None], run: RunConfig) -> LayoutReport:
    """On a rank: verify a run with a fault planted."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return verify_run(run)


def verify_with(
    index: int | None, layout: Layout, own_module: bool = False, *, precision: str = "float64", **options: Any
) -> LayoutReport:
    """On a rank: verify with a fault planted, or with none. `options` replace those of the fault."""
    options = ({} if index is None else dict(MUTATIONS[index].options)) | options
    with pytest.MonkeyPatch.context() as patch:
        if index is not None:
            MUTATIONS[index].plant(patch)
        mesh = make_mesh(layout, CPU)
        if own_module:
            return verify_module(OwnModule, own_loss, mesh)
        return verify_on_mesh(for_verification(tiny_run(**options), layout, precision), mesh)


def within(patch: Patch, function: type[Function], half: str, **faulty: Any) -> None:
    """Give `fused` other functions while one half, forward or backward, of one of its autograd functions runs."""
    plain = getattr(function, half)

    def with_faults(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            for name, value in faulty.items():
                inside.setattr(fused, name, value)
            return plain(*arguments)

    patch.setattr(function, half, staticmethod(with_faults))


class OwnModule(nn.Module):
    """f(a) + f(b): the sum hands both the same gradient, so that an f that works in place spoils the other's."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        place: Any = {"mesh": mesh, "dtype": torch.float64}
        self.mesh = mesh
        self.entry = LayerNorm(8, **place)
        self.one = LayerNorm(8, **place)
        self.other = LayerNorm(8, **place)
        self.rows = sharded_parameter((16, 8), mesh.tensor, dim=0, dtype=torch.float64, device=CPU)
        self.contract = RowParallelLinear(16, 8, **place)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                normal_(parameter, std=0.5, seed=1, name=name)
            else:
                disturb_(parameter, std=0.1, seed=1, name=name)

    def forward(self, x: Tensor) -> Tensor:
        h = self.entry(x)
        a, b = (copy_to_tensor_parallel(branch(h), self.mesh.tensor) for branch in (self.one, self.other))
        return self.contract(F.gelu(F.linear(a + b, local(self.rows, h.dtype)))) + h


def own_loss(model: nn.Module, mesh: ParallelMesh) -> Tensor:
    x = torch.randn(4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model(x.chunk(mesh.data.size)[mesh.data.rank]).square().sum() / 96


# --- f and g ---------------------------------------------------------------------------------------------------------


@fault("f without its backward all-reduce", "blocks.1.mlp.expand")
def f_without_backward(patch: Patch) -> None:
    within(patch, fused._EnterAndMultiply, "backward", start_sum=lambda product, mesh, **_: product)


@fault("f without its backward all-reduce, before the loss", "loss")
def f_missing_at_the_loss(patch: Patch) -> None:
    patch.setattr(projection, "enter_tensor_parallel", lambda x, mesh: x)


@fault("f in place: beside another use of its gradient", "OwnModule", own_module=True)
def f_in_place(patch: Patch) -> None:
    patch.setattr(operators, "all_reduce", lambda x, axis: wait(start_all_reduce_owned(x, axis), axis))


@fault("g missing", "blocks.0.attention.output")
def g_missing(patch: Patch) -> None:
    within(patch, fused._MultiplyAndLeave, "forward", start_sum=lambda product, mesh, **_: product)


@fault("g missing after the embedding", "tokens")
def g_missing_after_the_embedding(patch: Patch) -> None:
    patch.setattr(embedding, "leave_tensor_parallel", lambda x, mesh: x)


@fault("g twice", "blocks.0.attention.output")
def g_twice(patch: Patch) -> None:
    g = fused.start_sum

    def again(product: Tensor, mesh: ParallelMesh, **how: bool) -> Tensor:
        return start_all_reduce_owned(wait(g(product, mesh, **how), mesh.tensor), mesh.tensor)

    within(patch, fused._MultiplyAndLeave, "forward", start_sum=again)


@fault("the gathered sequence's gradient is split, not reduce-scattered", "blocks.1.mlp.expand", SPLIT)
def gather_without_sum(patch: Patch) -> None:
    def own(product: Tensor, mesh: ParallelMesh, *, in_parts: bool) -> Tensor:
        return split(product, mesh.tensor, 0 if in_parts else 1)

    within(patch, fused._EnterAndMultiply, "backward", start_sum=own)


@fault("an all-reduce more than planned, that changes nothing", "collectives")
def an_all_reduce_more(patch: Patch) -> None:
    f = fused.start_gather

    def send(x: Tensor, mesh: ParallelMesh) -> Tensor:
        all_reduce(x, mesh.tensor)
        return f(x, mesh)

    within(patch, fused._EnterAndMultiply, "forward", start_gather=send)


# --- weights and biases ----------------------------------------------------------------------------------------------


@fault("row bias added once per rank", "blocks.0.attention.output")
def row_bias_per_rank(patch: Patch) -> None:
    class BiasFirst(fused._MultiplyAndLeave):
        @staticmethod
        def forward(ctx: Any, x: Tensor, mesh: ParallelMesh, products: Any, *others: Tensor) -> Tensor:
            weight, bias, *_ = others
            ctx.save_for_backward(x, weight, None, None)
            ctx.mesh, ctx.products, ctx.has_bias, ctx.in_parts = mesh, products, True, False
            return wait(fused.start_sum(F.linear(x, weight, bias), mesh), mesh.tensor)

    patch.setattr(fused, "_MultiplyAndLeave", BiasFirst)


@fault("column bias not sliced: every rank takes the first part", "blocks.0.attention.qkv")
@instead_of(linear, "local")
def column_bias_not_sliced(own: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    mine = own(parameter, dtype)
    if mine.dim() > 1:
        return mine
    return mine + (all_gather(mine.detach(), _axis_of(parameter), 0)[: mine.shape[0]] - mine.detach())


def _axis_of(parameter: Tensor) -> Any:
    from crosscut.parallel import Axis

    line = parameter.device_mesh
    return Axis("tensor", line, line.get_local_rank(), line.size(), line.get_group().group_name)


@fault("heads interleaved wrongly in the fused keys and values", "blocks.0.attention")
@instead_of(attention.SelfAttention, "forward")
def heads_interleaved_wrongly(_plain: Any, self: attention.SelfAttention, x: Tensor, *_: Any) -> Tensor:
    query, key_value = self.qkv(x)
    k, v = key_value.unflatten(-1, (2, -1, self.head_size)).unbind(-3)
    q = query.unflatten(-1, (-1, self.head_size))
    heads = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return self.output(heads.transpose(1, 2).flatten(2))


@fault("a replicated parameter starts from a seed of each rank's own", "positions")
@instead_of(random, "seed_of")
def positions_start_apart(original: Any, *parts: object) -> int:
    rank = torch.distributed.get_rank() if "positions.weight" in parts else 0
    return original(*parts, rank)


@fault(
    "initial spread by the fan-in of a rank's own rows",
    "blocks.0.attention.output",
    training={"initial_spread": "fan_in"},
)
@instead_of(initialization, "normal_")
def fan_in_of_own_rows(draw: Any, parameter: Tensor, *, std: float, **names: Any) -> None:
    inputs = parameter.shape[-1] / _local(parameter).shape[-1]
    draw(parameter, std=std * inputs**0.5, **names)


@fault("gradients of a head of keys and values that ranks share not summed", "blocks.1.attention.qkv", num_kv_heads=1)
def shared_head_not_summed(patch: Patch) -> None:
    patch.setattr(linear, "local_inside", local)


@fault("ranks that share heads of keys and values take the wrong ones", "blocks.0.attention.qkv", FOUR, num_kv_heads=2)
@instead_of(linear, "rows_of_block")
def wrong_shared_head(own: Any, out_features: int, num_blocks: int | None, axis: Any) -> slice | None:
    if num_blocks is None or own(out_features, num_blocks, axis) is None:
        return None
    width, block = out_features // num_blocks, axis.rank % num_blocks
    return slice(block * width, (block + 1) * width)


@fault("gradients of the heads' norms not summed", "blocks.1.attention.key_norm", qk_norm=True)
def head_norm_not_summed(patch: Patch) -> None:
    patch.setattr(norm, "local_inside", local)


# --- documents that do not see each other ----------------------------------------------------------------------------


@fault("a document's border off by one", "documents", training=PACKED)
@instead_of(batch, "find_documents")
def border_off_by_one(
    found: Any, tokens: Tensor, *, end_of_text: int
) -> Any:  # as if the end of text still belonged to its document
    return found(tokens.roll(1, dims=1), end_of_text=end_of_text)  # the end of text belongs to its document


@fault("positions that do not restart at a document", "documents", SPLIT, training=PACKED)
@instead_of(batch, "find_documents")
def positions_do_not_restart(found: Any, tokens: Tensor, *, end_of_text: int) -> Any:
    places = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return found(tokens, end_of_text=end_of_text)._replace(positions=places)


# --- the data --------------------------------------------------------------------------------------------------------


@fault("mixture weights by files instead of tokens", "mixture", DATA, data=MIXED)
@instead_of(mixture.MixedSampler, "__init__")
def weights_by_files(make: Any, self: mixture.MixedSampler, samplers: Any, weights: Any, *, seed: int) -> None:
    counted = [weight * len(sampler._shards) for sampler, weight in zip(samplers, weights, strict=True)]
    make(self, samplers, counted, seed=seed)


# --- the vocabulary --------------------------------------------------------------------------------------------------


@fault("vocabulary mask off by one", "tokens")
@instead_of(VocabParallelEmbedding, "_own_index")
def vocabulary_mask_off_by_one(_plain: Any, self: VocabParallelEmbedding, tokens: Tensor) -> tuple[Tensor, Tensor]:
    elsewhere = (tokens < self.first) | (tokens > self.first + self.local_size)
    return tokens.remainder(self.local_size), elsewhere


@fault("padded vocabulary entries in the softmax", "loss")
@instead_of(cross_entropy, "_compare")
def padding_in_the_softmax(compare: Any, logits: Tensor, targets: Tensor, part: Any) -> Any:
    return compare(logits, targets, part._replace(num_real=logits.shape[1]))


@fault("target logit not reduced", "loss")
@instead_of(cross_entropy, "all_reduce")
def target_logit_not_reduced(reduce: Any, x: Tensor, axis: Any, operation: str = "sum") -> Tensor:
    reduced = reduce(x, axis, operation)
    return torch.stack([reduced[0], x[1]]) if operation == "sum" else reduced


@fault("the softmax's largest logit not reduced", "loss")
@instead_of(cross_entropy, "all_reduce")
def largest_logit_not_reduced(reduce: Any, x: Tensor, axis: Any, operation: str = "sum") -> Tensor:
    return x if operation == "max" else reduce(x, axis, operation)


@fault("z-loss of a rank's own part of the vocabulary", "loss", training={"z_loss": 0.1})
@instead_of(cross_entropy, "_compare")
def z_loss_of_own_part(compare: Any, logits: Tensor, targets: Tensor, part: Any) -> Any:
    own = logits[:, : part.num_real].logsumexp(1)
    log_p, losses, _ = compare(logits, targets, part)
    return log_p, losses, own


@fault("the derivatives of the soft cap are left out", "loss", logit_softcap=0.3)
@instead_of(cross_entropy, "_losses_of_chunk")
def soft_cap_without_derivatives(
    losses_of_chunk: Any, hidden: Tensor, rows: Tensor, targets: Tensor, plan: Any, buffers: Any
) -> Any:
    kept = buffers if plan.part.axis.size == 1 else buffers._replace(slopes=None)
    return losses_of_chunk(hidden, rows, targets, plan, kept)


@fault("tied embedding gradient from one end only", "tokens")
@instead_of(VocabParallelEmbedding, "forward")
def tied_gradient_from_one_end(
    look_up: Any, self: VocabParallelEmbedding, tokens: Tensor, *, with_weight: bool = False
) -> Any:
    found = look_up(self, tokens, with_weight=with_weight)
    if with_weight and self.mesh.tensor.size > 1:
        hidden, tied = found
        return hidden, TiedWeight(tied.tensor.detach())
    return found


# --- sequence parallelism --------------------------------------------------------------------------------------------


@fault("layer-norm gradients not summed under sequence parallelism", "final_norm", SPLIT)
def norm_gradients_not_summed(patch: Patch) -> None:
    patch.setattr(norm, "local_on_sequence", lambda parameter, mesh, dtype: local(parameter, dtype))


@fault(
    "gradients of the embedding's norm not summed under sequence parallelism",
    "embedding_norm",
    SPLIT,
    embedding_norm=True,
)
@instead_of(Builder, "stream_norm")
def embedding_norm_gradients_not_summed(build: Any, self: Builder, part: Any) -> nn.Module:
    module = build(self, part)
    if part.parameters[0].name.startswith("embedding_norm"):
        module.mesh = replace(self.mesh, sequence_parallel=False)
    return module


@fault("row bias gradients not summed under sequence parallelism", "blocks.1.mlp.contract", SPLIT)
def row_bias_gradients_not_summed(patch: Patch) -> None:
    patch.setattr(linear, "local_on_sequence", lambda parameter, mesh, dtype: local(parameter, dtype))


@fault("position embeddings scattered wrongly: parts of the sequence in reverse", "positions", SPLIT)
@instead_of(embedding, "part_of_sequence")
def positions_scattered_wrongly(_plain: Any, x: Tensor, mesh: ParallelMesh, dim: int) -> Tensor:
    size = mesh.tensor.size
    return x.chunk(size, dim)[size - 1 - mesh.tensor.rank] if mesh.sequence_parallel else x


# --- bidirectional models: segments, padding, norms after the sums ---------------------------------------------------


@fault("gradients of the token types not summed under sequence parallelism", "token_types", SPLIT, **BERT)
@instead_of(embedding, "local_on_sequence")
def token_types_not_summed(plain: Any, parameter: Tensor, mesh: ParallelMesh, dtype: torch.dtype) -> Tensor:
    is_of_types = parameter.shape[0] == BERT["token_types"]
    return local(parameter, dtype) if is_of_types else plain(parameter, mesh, dtype)


@fault("every part of a split sequence has the segments of the first", "token_types", SPLIT, **BERT)
@instead_of(embedding, "part_of_sequence")
def segments_of_the_first_part(part: Any, x: Tensor, mesh: ParallelMesh, dim: int) -> Tensor:
    return part(x, mesh, dim) if x.is_floating_point() else x.chunk(mesh.tensor.size, dim)[0]


@fault("padding that leaks: every token sees it", "blocks.0.attention", **BERT)
@instead_of(gpt.GPT, "forward")
def padding_leaks(forward: Any, self: gpt.GPT, own: Batch, **how: Any) -> Any:
    return forward(self, replace(own, mask=None) if self.mesh.tensor.size > 1 else own, **how)


@fault("the mask of padding is that of the parts in reverse", "blocks.0.attention", SPLIT, **BERT)
@instead_of(gpt.GPT, "forward")
def padding_of_other_parts(forward: Any, self: gpt.GPT, own: Batch, **how: Any) -> Any:
    parts = own.mask.chunk(self.mesh.tensor.size, dim=1)
    return forward(self, replace(own, mask=torch.cat(parts[::-1], 1)), **how)


@fault("norms in the other place", "blocks.0.attention.qkv", **BERT)
@instead_of(block.Block, "__init__")
def norms_in_the_other_place(make: Any, self: block.Block, part: Layer, build: Builder) -> None:
    is_cut = build.mesh.tensor.size > 1
    parts = tuple(replace(each, norm_place=NormPosition.BEFORE) for each in part.parts)
    make(self, replace(part, parts=parts) if is_cut else part, build)


# --- heads for masked tokens and the order of segments ---------------------------------------------------------------


@fault("every rank adds the first part of the vocabulary's bias", "loss", **BERT, **MASKED)
@instead_of(projection, "vocab_parallel_cross_entropy")
def first_part_of_the_bias(loss: Any, *hidden: Tensor, axis: Any, settings: Any, **how: Any) -> Tensor:
    bias = settings.bias
    first = all_gather(bias.detach(), axis, 0)[: len(bias)]
    wrong = replace(settings, bias=bias + (first - bias.detach()))
    return loss(*hidden, axis=axis, settings=wrong, **how)


@fault("gradients of the head's norm not summed", "prediction.norm", **BERT, **MASKED)
def norm_of_the_head_not_summed(patch: Patch) -> None:
    patch.setattr(norm, "local_inside", local)


@fault("gradients of the head's dense layer not summed", "prediction.dense", SPLIT, **BERT, **MASKED)
def dense_of_the_head_not_summed(patch: Patch) -> None:
    patch.setattr(linear, "local_inside", local)


@fault("the pooler takes the first token of a rank's part of the sequence", "order", SPLIT, **BERT, **MASKED)
def pooler_of_own_part(patch: Patch) -> None:
    enter, forward, own = projection.enter_tensor_parallel, pooled_head.PooledHead.forward, []

    def noted(x: Tensor, mesh: ParallelMesh) -> Tensor:
        own.append(x)
        return enter(x, mesh)

    patch.setattr(projection, "enter_tensor_parallel", noted)
    patch.setattr(pooled_head.PooledHead, "forward", lambda self, _first: forward(self, own.pop()[:, 0]))


@fault("the logits of the order not summed", "order", **BERT, **MASKED)
def orders_not_summed(patch: Patch) -> None:
    patch.setattr(pooled_head, "reduce_from_tensor_parallel", lambda x, axis: x)


@fault("the bias of the order added once per rank", "order", **BERT, **MASKED)
@instead_of(pooled_head, "local")
def bias_of_the_order_per_rank(plain: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    mine = plain(parameter, dtype)
    return mine * parameter.device_mesh.size() if parameter.dim() == 1 else mine


@fault("masked loss normalised by a rank's own masked tokens", "loss", DATA, **BERT, **MASKED)
def own_masked_tokens(patch: Patch) -> None:
    _own_count(patch, 0)


@fault("loss of the order normalised by a rank's own pairs", "loss", DATA, **BERT, **MASKED)
def own_pairs(patch: Patch) -> None:
    _own_count(patch, 1)


def _own_count(patch: Patch, which: int) -> None:
    reduce = training_step.all_reduce

    def own(x: Tensor, axis: Any) -> Tensor:
        summed = reduce(x, axis)
        if not x.is_floating_point():
            summed[which] = x[which] * axis.size
        return summed

    patch.setattr(training_step, "all_reduce", own)


@fault("the summary is the first token of every rank's part of the sequence", "loss", SPLIT, **BERT, **CLASSES)
def summary_of_own_part(patch: Patch) -> None:
    patch.setattr(pooled_head, "take_summaries", lambda hidden, _last, _mesh: hidden[:, 0])


@fault("the last token is counted in a rank's own part of the sequence", "loss", SPLIT, **CLASSES)
@instead_of(summary_heads, "take_summaries")
def last_token_of_own_part(_plain: Any, hidden: Tensor, last: Tensor, _mesh: ParallelMesh) -> Tensor:
    return hidden[torch.arange(len(hidden)), last.clamp(max=hidden.shape[1] - 1)]


@fault("the logits of the classes not summed", "task", **BERT, **CLASSES)
def classes_not_summed(patch: Patch) -> None:
    patch.setattr(pooled_head, "reduce_from_tensor_parallel", lambda x, axis: x)


@fault("gradients of the summaries not summed", "loss", **BERT, **CLASSES)
def summaries_not_summed(patch: Patch) -> None:
    patch.setattr(pooled_head, "copy_to_tensor_parallel", lambda x, axis: x)


@fault("dropout of the pooled vector from the stream that ranks share", "task.dropout", **BERT, **CLASSES)
@instead_of(random.Dropout, "forward")
def pooled_dropout_shared(_plain: Any, self: random.Dropout, x: Tensor) -> Tensor:
    if not self.training or not self.probability:
        return x
    with self.streams.between_regions():
        return F.dropout(x, self.probability)


@fault("loss of a task normalised by a rank's own labels", "loss", DATA, **BERT, **CLASSES)
def own_labels(patch: Patch) -> None:
    _own_count(patch, 0)


@fault("the softmax of a choice runs over all questions of a data rank", "loss", DATA, **BERT, **CHOICE)
@instead_of(ChoosingHead, "loss_of")
def choice_over_all_questions(plain: Any, self: ChoosingHead, logits: Tensor, labels: Tensor) -> Tensor:
    places = labels + torch.arange(len(labels)) * logits.shape[1]
    return plain(self, logits.view(1, -1).expand(len(labels), -1), places.where(labels != IGNORED, IGNORED))


@fault("the options of a question are spread over the batch", "loss", DATA, **BERT, **CHOICE)
@instead_of(ChoosingHead, "loss_of")
def options_not_beside_each_other(plain: Any, self: ChoosingHead, logits: Tensor, labels: Tensor) -> Tensor:
    return plain(self, logits.flatten().view(-1, len(labels)).t(), labels)


@fault("logits of spans are another rank's part of the sequence", "task", SPLIT, **BERT, **SPANS)
def spans_of_another_rank(patch: Patch) -> None:
    join = spans_head.join_from_sequence_parallel
    patch.setattr(
        spans_head, "join_from_sequence_parallel", lambda x, axis: torch.cat(join(x, axis).chunk(axis.size, 1)[::-1], 1)
    )


@fault("gradients of the logits of spans are summed over the ranks", "task", SPLIT, **BERT, **SPANS)
def spans_summed(patch: Patch) -> None:
    patch.setattr(spans_head, "join_from_sequence_parallel", operators.gather_from_sequence_parallel)


@fault("gradients of the classifier of spans not summed", "task.classifier", SPLIT, **BERT, **SPANS)
def classifier_of_spans_not_summed(patch: Patch) -> None:
    patch.setattr(spans_head, "local_on_sequence", lambda parameter, _mesh, dtype: local(parameter, dtype))


# --- norm, clipping, normalisation -----------------------------------------------------------------------------------


@fault("gradient norm counts replicated parameters T times", "gradient norm")
@instead_of(training_step, "measure_gradients")
def replicated_counted_by_every_rank(_plain: Any, parameters: Any, _owners: Any, **_: Any) -> GradientNorm:
    squares = sum(_local(p.grad).square().sum() for p in parameters)
    return GradientNorm(all_reduce(squares, _axis_of(parameters[0])).sqrt(), squares)


@fault("gradient norm of one rank's own parameters", "gradient norm")
@instead_of(training_step, "measure_gradients")
def norm_of_own_parameters(_plain: Any, parameters: Any, _owners: Any, **_: Any) -> GradientNorm:
    squares = torch.stack([_local(p.grad).square().sum() for p in parameters]).sum()
    return GradientNorm(squares.sqrt(), squares)


@instead_of(LocalAdamW, "step")
def clip_by_own_norm(step: Any, self: LocalAdamW) -> None:
    gradients = [_local(p.grad) for group in self.param_groups for p in group["params"]]
    self.clip = clip_factor(torch.stack([g.square().sum() for g in gradients]).sum().sqrt(), CLIP_NORM)
    step(self)


fault("clip by the local norm", "clipped gradients")(clip_by_own_norm)


@fault("loss normalised by local tokens", "loss", DATA)
@instead_of(training_step, "all_reduce")
def normalised_by_local_tokens(reduce: Any, x: Tensor, axis: Any) -> Tensor:
    return reduce(x, axis) if x.is_floating_point() else x * axis.size


@fault("data-parallel gradient averaged twice", "gradient reduction", DATA)
@instead_of(GradientReducer, "_receive")
def averaged_twice(receive: Any, self: GradientReducer, bucket: Any) -> None:
    receive(self, bucket)
    for parameter in bucket.parameters:
        _local(parameter.grad).div_(self.mesh.data.size)


@fault("data-parallel gradient not summed", "gradient reduction", BOTH)
def not_summed_over_data(patch: Patch) -> None:
    patch.setattr(gradients, "start_all_reduce_owned", lambda flat, axis: flat)


@fault("a micro-batch's gradients take the place of those before", "gradient reduction", training=ACCUMULATED)
@instead_of(gpt.GPT, "loss")
def not_added_to_earlier(loss: Any, self: gpt.GPT, *own: Any, **how: Any) -> Tensor:
    if self.mesh.tensor.size > 1:
        self.zero_grad()
    return loss(self, *own, **how)


@fault(
    "gradients of earlier micro-batches summed over data ranks again", "gradient reduction", DATA, training=ACCUMULATED
)
@instead_of(gpt.GPT, "loss")
def summed_after_every_micro_batch(loss: Any, self: gpt.GPT, *own: Any, **how: Any) -> Tensor:
    for parameter in self.parameters():
        if parameter.grad is not None:
            _local(parameter.grad).copy_(all_reduce(_local(parameter.grad), self.mesh.data))
    return loss(self, *own, **how)


@fault("loss normalised by each micro-batch's own tokens", "loss", DATA, training=ACCUMULATED)
@instead_of(gpt.GPT, "loss")
def normalised_by_a_micro_batch(loss: Any, self: gpt.GPT, own: Batch, scales: Scales, **how: Any) -> Tensor:
    if self.mesh.data.size > 1:
        count = all_reduce(own.num_targets, self.mesh.data)
        scales = {**scales, "tokens": 1.0 / (MICRO_BATCHES * count.double())}
    return loss(self, own, scales, **how)


@fault("gradient averaged over the ranks that share a copy", "gradient reduction", SHARED)
def averaged_over_shares(patch: Patch) -> None:
    divide = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, _: divide(self, 2.0))


@fault("every share starts from the first one's weights", "tokens", SHARED)
def shares_drawn_alike(patch: Patch) -> None:
    patch.setattr(random, "local_offsets", lambda tensor: [0] * tensor.dim())


# --- Muon ------------------------------------------------------------------------------------------------------------
# In the cut model only: the uncut one gathers nothing.


@fault("a rank orthogonalizes only its own part of a matrix", AFTER, optimizer=MUON)
def own_part_orthogonalized(patch: Patch) -> None:
    _of_own_part(patch, AxisRole.CUTS)


@fault("a data rank orthogonalizes only its own shard of a matrix", AFTER, SHARED, optimizer=MUON)
def own_shard_orthogonalized(patch: Patch) -> None:
    _of_own_part(patch, AxisRole.TOKENS)


def _of_own_part(patch: Patch, role: AxisRole) -> None:
    """Leave out what the other ranks of the axes with this role have sent."""
    plain = turns._Level._joined

    def alone(self: Any, parts: Tensor) -> Tensor:
        if role_of(self.axis.name) is role:
            own = parts[self.axis.rank].clone()
            parts = torch.zeros_like(parts)
            parts[self.axis.rank] = own
        return plain(self, parts)

    patch.setattr(turns._Level, "_joined", alone)


@fault("a rank takes the update of another rank's turn", AFTER, optimizer=MUON)
@instead_of(muon, "given_back")
def turns_mixed_up(plain: Any, whole: Tensor | None, like: Any, number: int, dtype: torch.dtype) -> list[Tensor]:
    back = plain(whole, like, number, dtype)
    return back[::-1]


@fault("keys and values orthogonalized as one matrix", AFTER, optimizer=MUON)
@instead_of(muon.Muon, "_orthogonal")
def keys_and_values_as_one(plain: Any, self: muon.Muon, whole: Tensor, weight: Tensor) -> Tensor:
    if cut_dim(weight) is None or weight.device_mesh.size() == 1:
        return plain(self, whole, weight)
    return muon.scaled(muon.orthogonalized(whole))


@fault("Muon's scale from the shape of a rank's part", AFTER, optimizer=MUON)
@instead_of(muon.Muon, "_orthogonal")
def scale_of_own_part(plain: Any, self: muon.Muon, whole: Tensor, weight: Tensor) -> Tensor:
    rows, columns = weight.to_local().shape
    wrong = max(1.0, rows / columns) / max(1.0, weight.shape[0] / weight.shape[1])
    return plain(self, whole, weight) * wrong**0.5


@fault("Muon's momentum from a data rank's own gradient", AFTER, DATA, optimizer=MUON)
def momentum_not_summed(patch: Patch) -> None:
    send, receive, update = GradientReducer._send, GradientReducer._receive, muon.Muon.update
    own: dict[Tensor, Tensor] = {}

    def noted(self: GradientReducer, bucket: Any) -> None:
        own.update((parameter, _local(parameter.grad).clone()) for parameter in bucket.parameters)
        send(self, bucket)

    def compared(self: GradientReducer, bucket: Any) -> None:
        receive(self, bucket)
        for parameter in bucket.parameters:
            own[parameter] /= _local(parameter.grad).norm()  # so that clipping scales it too

    def of_own(self: muon.Muon, weights: list[Tensor], momenta: list[Tensor], **how: Any) -> None:
        for weight, momentum in zip(weights, momenta, strict=True):
            if weight in own:
                gradient = _local(weight.grad)
                instead = own[weight] * gradient.norm() - gradient
                momentum.add_(instead, alpha=(1 - muon.MOMENTUM) / muon.MOMENTUM)  # the update adds the summed gradient
        update(self, weights, momenta, **how)

    patch.setattr(GradientReducer, "_send", noted)
    patch.setattr(GradientReducer, "_receive", compared)
    patch.setattr(muon.Muon, "update", of_own)


# --- the moving average of the weights -------------------------------------------------------------------------------
# Faults of its formula are in the cut and the uncut model alike.


@fault("the average takes the weights before the optimizer's step", "formula of the average", optimizer=AVERAGED)
def average_before_the_step(patch: Patch) -> None:
    begin, update = averaging.WeightAverage.begin, averaging.WeightAverage.update
    patch.setattr(averaging.WeightAverage, "update", lambda _self, _step: None)

    def with_update(self: averaging.WeightAverage) -> None:
        begin(self)
        update(self, 0)

    patch.setattr(averaging.WeightAverage, "begin", with_update)


@fault("the decay of the average has no warm-up", "formula of the average", DATA, optimizer=AVERAGED)
def decay_without_warmup(patch: Patch) -> None:
    patch.setattr(averaging, "decay_after", lambda _step, decay: decay)


@fault("the average and the weights change their shares", "formula of the average", optimizer=AVERAGED)
def shares_exchanged(patch: Patch) -> None:
    decay = averaging.decay_after
    patch.setattr(averaging, "decay_after", lambda step, highest: 1 - decay(step, highest))


@fault("only the first shard of each parameter is averaged", "averaged weights", SHARED, optimizer=AVERAGED)
def first_shard_averaged(patch: Patch) -> None:
    _average_only_on_the_first_rank(patch)


@fault("only the first rank averages its part of the weights", "averaged weights", optimizer=AVERAGED)
def first_part_averaged(patch: Patch) -> None:
    _average_only_on_the_first_rank(patch)


def _average_only_on_the_first_rank(patch: Patch) -> None:
    update = averaging.WeightAverage.update

    def on_the_first(self: averaging.WeightAverage, step: int) -> None:
        if torch.distributed.get_rank() == 0:
            update(self, step)

    patch.setattr(averaging.WeightAverage, "update", on_the_first)


# --- what layers become ----------------------------------------------------------------------------------------------
# In the cut model and on one rank alike: the uncut one has layers as they are written.


@fault("a recomputed layer has another activation", "blocks.1.mlp.contract", training={"recompute": "full"})
def recomputed_otherwise(patch: Patch) -> None:
    gelu = mlp.ACTIVATIONS[FeedForward.GELU]
    otherwise = {FeedForward.GELU: lambda x: F.relu(x) if linear.is_recomputing() else gelu(x)}
    patch.setattr(mlp, "ACTIVATIONS", otherwise)


# --- layers that differ, and parts of their own ----------------------------------------------------------------------


@fault("a layer runs its first MLP twice", "blocks.0.mlp", layers=["attention gelu gelu"])
@instead_of(block.Block, "_run")
def first_mlp_twice(run: Any, self: block.Block, name: str, *tensors: Any) -> Tensor:
    is_cut = self.attention.streams.mesh.tensor.size > 1
    return run(self, "mlp" if is_cut and name == "mlp_2" else name, *tensors)


@fault("the parts of a layer change places", "blocks.0.attention_norm", layers=["attention gelu"])
def parts_change_places(patch: Patch) -> None:
    make = block.Block.__init__

    def turned(self: block.Block, layer: Layer, build: Builder) -> None:
        make(self, layer, build)
        if build.mesh.tensor.size > 1:
            self.parts.reverse()

    patch.setattr(block.Block, "__init__", turned)


@fault("a gate has another layer's activation", "blocks.1.mlp", layers=("attention swiglu", "attention geglu"))
def gate_of_another_layer(patch: Patch) -> None:
    def of_first_layer(part: GatedMLP, build: Builder) -> nn.Module:
        is_cut = build.mesh.tensor.size > 1
        return gated_mlp.GatedMLP(replace(part, kind=FeedForward.SWIGLU) if is_cut else part, build)

    patch.setitem(block.MODULES, GatedMLP, of_first_layer)


@fault(
    "a layer norm of heads takes its gradient for whole",
    "blocks.1.attention.key_norm",
    qk_norm=True,
    qk_norm_kind="layer",
)
def head_norm_taken_for_whole(patch: Patch) -> None:
    patch.setattr(norm, "local_inside", local)


@fault("a compiled layer has another activation", "blocks.0", SPLIT, training={"compile": "on"})
@instead_of(compilation, "BACKEND")
def compiled_otherwise(_plain: Any, graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
    for node in graph.graph.nodes:
        if node.target is F.gelu:
            node.target, node.kwargs = F.relu, {}
    graph.recompile()
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


# --- random numbers --------------------------------------------------------------------------------------------------


def _restart_with(
    patch: Patch, shared: Callable[[ParallelMesh], tuple], per_rank: Callable[[ParallelMesh], tuple]
) -> None:
    def restart(self: RandomStreams, *layer: object) -> None:
        place = (self.seed, *self._started, *layer)
        torch.manual_seed(seed_of("per rank", *place, *per_rank(self.mesh)))
        self._per_rank_state = self._get_state()
        torch.manual_seed(seed_of("shared", *place, *shared(self.mesh)))

    patch.setattr(RandomStreams, "_restart", restart)


@fault("the same dropout stream on all ranks", "blocks.0.attention")
def same_stream_on_all_ranks(patch: Patch) -> None:
    _restart_with(patch, lambda mesh: (mesh.data.rank,), lambda mesh: (mesh.data.rank,))


@fault("different residual streams", "dropout")
def different_residual_streams(patch: Patch) -> None:
    _restart_with(
        patch, lambda mesh: (mesh.data.rank, mesh.tensor.rank), lambda mesh: (mesh.data.rank, mesh.tensor.rank)
    )


@fault("the same dropout on all data ranks", "dropout", DATA)
def same_stream_on_data_ranks(patch: Patch) -> None:
    _restart_with(patch, lambda mesh: (), lambda mesh: (mesh.tensor.rank,))


@fault("parts of a split sequence drop alike", "dropout", SPLIT)
def split_sequence_drops_alike(patch: Patch) -> None:
    _restart_with(patch, lambda mesh: (mesh.data.rank,), lambda mesh: (mesh.data.rank,))


# --- stages of a pipeline --------------------------------------------------------------------------------------------


def _is_last_stage(step: Any) -> bool:
    return step.step.model.stages[-1].is_last


@fault("micro-batches in the wrong order on the last stage", "loss", STAGES)
@instead_of(stages._Step, "_forward")
def micro_batches_in_the_wrong_order(forward: Any, self: Any, action: Any, hidden: Tensor | None) -> Tensor:
    if not _is_last_stage(self):
        return forward(self, action, hidden)
    own, batches = self.step.loss, list(self.step.micro_batches)
    other = batches[len(batches) - 1 - action.micro_batch]
    self.step = replace(self.step, loss=lambda y, _: own(y, other))
    try:
        return forward(self, action, hidden)
    finally:
        self.step = replace(self.step, loss=own)


@fault("the tied gradient is summed twice over the stages", "tokens", STAGES)
@instead_of(training_step, "sum_copies")
def tied_gradient_summed_twice(sum_once: Any, parameter: nn.Parameter, ends: Any) -> None:
    sum_once(parameter, ends)
    sum_once(parameter, ends)


@fault("the tied gradient is not summed over the stages", "tokens", STAGES)
def tied_gradient_not_summed(patch: Patch) -> None:
    patch.setattr(training_step, "sum_copies", lambda parameter, ends: None)


@fault("a stage skips its last backward pass", "blocks.0", STAGES)
@instead_of(stages._Step, "_backward")
def last_micro_batch_skipped(backward: Any, self: Any, action: Any, gradient: Tensor | None) -> Tensor | None:
    is_last = action.micro_batch == len(self.step.micro_batches) - 1
    return None if is_last and not _is_last_stage(self) else backward(self, action, gradient)


@fault("each micro-batch is normalised by its own targets", "loss", STAGES)
@instead_of(gpt.GPT, "loss_of_hidden")
def own_targets_of_a_micro_batch(
    loss: Any, self: gpt.GPT, hidden: Tensor, own: Batch, scales: Scales, **how: Any
) -> Tensor:
    return loss(self, hidden, own, {**scales, "tokens": 1.0 / own.num_targets}, **how)


@fault("the stages of data ranks count only their own targets", "loss", STAGED_DATA)
def own_targets_of_stages(patch: Patch) -> None:
    normalised_by_local_tokens(patch)


@fault("the verdict whether a step is finite is not sent", "collectives", STAGED_DATA)
@instead_of(training_step.Trainer, "summed")
def verdict_not_sent(summed: Any, self: training_step.Trainer, part: Tensor) -> Tensor:
    return torch.stack([summed(self, part[0]), part[1]])


@fault("the gradient norm counts the tied weight twice", "gradient norm", STAGES)
def norm_counts_the_tied_weight_twice(patch: Patch) -> None:
    patch.setattr(Embedding, "counted_once", lambda self, parameters: list(parameters))


@fault("each stage clips by the norm of its own gradients", "gradient norm", STAGES)
def norm_of_one_stage(patch: Patch) -> None:
    norm = training_step.measure_gradients
    patch.setattr(training_step, "measure_gradients", lambda parameters, owners, **also: norm(parameters, **also))


@fault("hidden states are sent in float32", "blocks.1", STAGES)
def hidden_states_rounded(patch: Patch) -> None:
    send = Channels.send
    patch.setattr(Channels, "send", lambda self, message, x: send(self, message, x.float().to(x.dtype)))


@fault("a stage sends no gradient back", "blocks.0", STAGES)
@instead_of(stages._Step, "_backward")
def no_gradient_sent_back(backward: Any, self: Any, action: Any, gradient: Tensor | None) -> Tensor | None:
    own = backward(self, action, gradient)
    return None if own is None else torch.zeros_like(own)


@fault("the stages of a rank run in the wrong order", "blocks.0", INTERLEAVED, num_layers=4)
@instead_of(gpt.GPT, "_blocks_of")
def stages_in_the_wrong_order(own: Any, self: gpt.GPT, stage: Any) -> Any:
    return own(self, self.stages[len(self.stages) - 1 - self.stages.index(stage)])


@fault("delayed weight gradients of the last micro-batch are lost", "blocks.1.mlp.contract", DELAYED)
def delayed_gradients_lost(patch: Patch) -> None:
    compute = deferral.Deferred.compute
    calls = []

    def forgetting(self: deferral.Deferred) -> None:
        calls.append(self)
        if len(calls) % 4:
            compute(self)

    patch.setattr(deferral.Deferred, "compute", forgetting)


@fault("ZeRO sums gradients at each backward pass, before the delayed ones", "blocks.1.mlp.contract", DELAYED_SHARED)
def sharded_sum_at_each_backward(patch: Patch) -> None:
    def begin(self: sharding.ShardedStageReducer) -> None:
        self._set_last(True)

    def reduced(self: sharding.ShardedStageReducer) -> None:
        self._reducer.finish()

    patch.setattr(sharding.ShardedStageReducer, "begin", begin)
    patch.setattr(sharding.ShardedStageReducer, "finish", reduced)


@fault("delayed weight gradients are also computed in the backward pass", "blocks.1.mlp.contract", DELAYED)
@instead_of(deferral.Deferral, "defer")
def delayed_gradients_twice(defer: Any, self: deferral.Deferral, compute: Callable[[], Tensor], weight: Tensor) -> bool:
    defer(self, compute, weight)
    return False


@fault("tensor ranks of a stage drop other elements of the residual stream", "blocks.0.dropout", STAGED_TENSOR)
@instead_of(RandomStreams, "enter_layer")
def stages_drop_otherwise(_plain: Any, self: RandomStreams, index: int) -> None:
    torch.manual_seed(seed_of(self.seed, index, self.mesh.tensor.rank))


for _of in (
    "attention_kinds",
    "context",
    "dropout",
    "latents",
    "scans",
    "blocks",
    "selective_scans",
    "deltas",
    "experts",
    "schedule",
    "sharding",
    "low_rank",
    "teachers",
):  # they register their faults after those above
    import_module(f"tests.verification.faults.{_of}")
