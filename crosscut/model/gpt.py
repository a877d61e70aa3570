"""Transformer: maps token ids to hidden states through blocks, and hidden states to a loss or to scores.

The default is GPT-2 as in the paper's section 2.2: learned positions, layer norms, GeLU and tied embeddings. Llama,
BERT and similar models (`ModelConfig`) differ only in the kinds of layers. This code does not depend on the layout: on
one device, the layers of `parallel` are ordinary layers.

Shapes: B batch, S sequence, H hidden, V vocabulary, T tensor ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture import Cut, describe
from crosscut.architecture.pipeline import Stage
from crosscut.config import ModelConfig
from crosscut.flight import ModelPart
from crosscut.flight.places import enter, leave
from crosscut.kernels.soft_cap import soft_cap
from crosscut.model.batch import Batch
from crosscut.model.block import Block
from crosscut.model.building import Builder
from crosscut.model.cache import GenerationCache, Reading, reading_kernels
from crosscut.model.embedding import Embedding
from crosscut.model.heads.head import SUMS, Head, HeadBuilder, Scales, Teaching
from crosscut.model.heads.table import build_head
from crosscut.model.running import PLAIN_RUNNERS, Runners
from crosscut.model.shared import Shared
from crosscut.model.sharing import Sharing
from crosscut.model.sums import LayerSums
from crosscut.parallel import (
    ParallelMesh,
    RandomStreams,
    TiedWeight,
    enter_tensor_parallel,
    gather_from_tensor_parallel,
)


class StageInput(NamedTuple):
    """Stage of a pipeline, and its input for one micro-batch."""

    stage: Stage
    """Stage to run."""
    hidden: Tensor | None = None
    """Output of the previous stage [B, S, H]; None for the first stage."""


class GPT(nn.Module):
    """Transformer, a decoder or an encoder: an embedding, layers and a head. Its weights are zero until `initialize` or
    a checkpoint fills them.

    Parameters are stored in `dtype`; activations and products use `compute_dtype` (default: the same type). `runners`
    call the layers and the loss, and name the stages of this rank.

    In a pipeline, each rank builds only its stages (default: one stage, the whole model). Modules of other stages are
    missing, and parameters have the same names as in the whole model. If the embedding is tied, the rank with the last
    stage has a copy of the token embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        mesh: ParallelMesh,
        streams: RandomStreams,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        runners: Runners = PLAIN_RUNNERS,
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.streams = config, mesh, streams
        self.loss_runner, self.compute_dtype = runners.loss, compute_dtype or dtype
        self.stages = runners.stages or (Stage(range(config.num_layers)),)
        whole = describe(config)
        self.part = whole.part(self.stages)
        """Description of the rank's stages."""
        self.reads, self.loss_terms, self.layer_terms = whole.head.reads, whole.loss_terms, whole.layer_terms
        """Fields of a batch that the head reads, all terms of the loss, and the terms of the layers, on every stage."""
        self.sharing = Sharing(whole, config, mesh, runners.context_attention)
        build = Builder(mesh=mesh, streams=streams, dtype=dtype, epsilon=config.norm_epsilon)
        self.embedding = Embedding(self.part, build, self.compute_dtype)
        self._add(self.embedding.modules)
        of_layers = replace(build, context_attention=runners.context_attention)
        self.blocks = nn.ModuleList()
        for i, layer in zip(self.part.indexes, self.part.layers, strict=True):
            self.blocks.add_module(str(i), Block(layer, replace(of_layers, runner=runners.layer(i))))
        norm = whole.head.norm if self.part.is_last else None
        self.final_norm = None if norm is None else build.stream_norm(norm)
        self._head: Head[Any] | None = None
        if self.part.is_last:
            self._head = build_head(whole.head, HeadBuilder(config, build, self.embedding.tokens, runners.loss))
            self._add(self._head.modules)
        frozen = {parameter.name for parameter in whole.parameters() if parameter.is_frozen}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def _add(self, modules: Mapping[str, nn.Module | None]) -> None:
        """Register modules of the embedding or of the head."""
        for name, module in modules.items():
            self.add_module(name, module)

    @property
    def head(self) -> Head[Any]:
        """Head of the model, which only the rank with the last stage has."""
        assert self._head is not None, "the stage has no head"
        return self._head

    @property
    def padded_rows(self) -> dict[str, int]:
        """Number of rows of each padded parameter, not counting the padding, by parameter name. Loading a checkpoint of
        another layout needs these numbers, because the padding depends on the layout.
        """
        padded = (parameter for parameter in self.part.root_parameters() if parameter.cut is Cut.VOCABULARY)
        return {parameter.name: parameter.shape[0] for parameter in padded}

    def forward(
        self,
        batch: Batch,
        *,
        num_filled: int = 0,
        reading: Reading | None = None,
        with_weight: bool = False,
        stage_input: StageInput | None = None,
        sums: LayerSums | None = None,
    ) -> Tensor | tuple[Tensor, TiedWeight]:
        """Compute the last hidden states [B, S, H] of the tokens [B, S] of a batch. Under sequence parallelism, the
        result is [B, S/T, H]. They are divided by `model.logit_divisor`.

        The last `num_filled` tokens of each sequence are padding that makes the sequence length divisible by the
        tensor-parallel size. `reading` gives the positions of tokens that continue earlier text. If context ranks share
        the sequences, S is the number of this rank's tokens. With `with_weight`, return (hidden states, weight of the
        token embedding), so that the loss can use the same weight. Raises `ConfigError` if segments are given but the
        model has no token types.

        In a pipeline, `stage_input` names the stage to run and holds its input. The result is the output of the stage.
        If `sums` is given, the sums that the layers return beside the residual stream are added to it.
        """
        stage, hidden = stage_input or StageInput(self.stages[0])
        tied = None
        places = batch.positions if reading is None else reading.places
        if hidden is None:
            hidden, tied = self.embedding.embed(batch, places, num_filled=num_filled, with_weight=with_weight)
        x, places = hidden, batch.places if places is None else places
        length = 0 if reading is not None else self.sharing.whole_length(batch) - num_filled
        shared = self.sharing.of(batch, places, length=length, dtype=x.dtype)
        x = self._layers_of(stage, x, shared, reading, LayerSums() if sums is None else sums)
        y = self.ended(x) if stage.is_last else x
        return y if tied is None else (y, tied)

    def ended(self, x: Tensor) -> Tensor:
        """Return the last hidden states, given the output of the last layer, on a rank with the last stage."""
        y: Tensor = x if self.final_norm is None else self.final_norm(x)
        divisor = self.config.logit_divisor  # the logits are linear in the hidden states
        return y if divisor == 1.0 else y / divisor

    def _layers_of(self, stage: Stage, x: Tensor, shared: Shared, reading: Reading | None, sums: LayerSums) -> Tensor:
        """Run the layers of a stage, and add what they return beside the residual stream to `sums`."""
        draws = self.training and self.config.dropout > 0
        for place, (i, block) in enumerate(zip(stage.layers, self._blocks_of(stage), strict=True)):
            if draws:
                self.streams.enter_layer(i)
            enter(ModelPart.LAYER, i)
            x, of_layer = block(x, shared, None if reading is None else reading.layer(place))
            x = leave(x, ModelPart.LAYER, i)
            sums.add(i, of_layer)
        return x

    def _blocks_of(self, stage: Stage) -> Sequence[nn.Module]:
        if len(self.stages) == 1:  # code that a compiler can trace
            return list(self.blocks)
        first = sum(len(other.layers) for other in self.stages[: self.stages.index(stage)])
        return list(self.blocks)[first : first + len(stage.layers)]

    def loss(
        self,
        batch: Batch,
        scales: Scales = SUMS,
        *,
        z_loss: float = 0.0,
        sums: LayerSums | None = None,
        teaching: Teaching | None = None,
    ) -> Tensor:
        """Return the sum of all terms of the loss (`loss_terms`), each times its factor in `scales`: a scalar.

        The term `tokens` is the sum of the cross entropies of the targets, the term `order` the one of the order of
        segments, if the batch has the order, and the term `task` the sum of the losses of the labels of a model that
        solves a task (`task_logits` says where padding may be). `z_loss` is the coefficient of the z-loss that is added
        to each cross entropy of a target (`parallel.cross_entropy`). With `teaching`, a teacher has a share of the term
        `tokens` or `task`, and the batch has the teacher's results.

        Terms of the layers count only if `scales` has their factors, and `sums` is given, to which they are added.

        To train on the mean, set each factor to 1 / (number of rows of the term's field that hold something to predict,
        over all data ranks), as a number or a scalar tensor on the device. Raises `ConfigError` for labels that the
        model cannot use, and if the labels of a task are missing.
        """
        weights = self.head.weights(self._of_head(scales), z_loss, teaching)
        self.head.require(batch)
        read, num_filled = self.head.inputs(batch, self.sharing.num_filled(batch.tokens.shape[1]))
        if self.part.head.uses_embedding and torch.is_grad_enabled():
            hidden, tied = self(read, num_filled=num_filled, with_weight=True, sums=sums)
            loss = self.head.loss(hidden, batch, weights, tied.tensor)
        else:
            loss = self.head.loss(self(read, num_filled=num_filled, sums=sums), batch, weights)
        more = None if sums is None else sums.taken(self.layer_terms, scales)
        return loss if more is None else loss + more.to(loss.dtype)

    @contextmanager
    def without_layer_terms(self) -> Iterator[None]:
        """Context in which the loss has only the terms of the head."""
        kept = self.loss_terms, self.layer_terms
        self.loss_terms, self.layer_terms = self.part.head.loss_terms, ()
        try:
            yield
        finally:
            self.loss_terms, self.layer_terms = kept

    def _of_head(self, scales: Scales) -> Scales:
        """Return the factors of terms that do not belong to the layers."""
        of_layers = {term.name for term in self.layer_terms}
        return {name: scale for name, scale in scales.items() if name not in of_layers}

    def loss_of_hidden(
        self,
        hidden: Tensor,
        batch: Batch,
        scales: Scales = SUMS,
        *,
        z_loss: float = 0.0,
        teaching: Teaching | None = None,
    ) -> Tensor:
        """Return the loss of a model that predicts tokens, from its last hidden states [B, S, H] (under sequence
        parallelism [B, S/T, H]), without the terms of the layers. The other arguments are those of `loss`.
        """
        return self.head.loss(hidden, batch, self.head.weights(self._of_head(scales), z_loss, teaching))

    def task_logits(self, batch: Batch, *, num_choices: int = 1) -> Tensor:
        """Return the logits of the model's task, the same on all tensor ranks. Their shape is [B, classes] for the head
        `classes`, [B, 1] for `number` (the number itself), [B, S, 2] for `spans` (logits of the first and of the last
        token), or [B / C, C] for `choice`.
        `num_choices` is C, the number of texts of each question for `choice`; the texts of a question are successive
        sequences.

        The sequences may have any length S. The logits of spans include padding. For `classes` and `choice` of a model
        with causal attention, padding must be at the ends of the sequences. No other token attends to such padding, so
        attention needs no mask. Raises `ConfigError` if the model solves no task, or if `num_choices` does not divide
        B.
        """
        self.head.require_task(len(batch.tokens), num_choices)
        read, num_filled = self.head.inputs(batch, self.sharing.num_filled(batch.tokens.shape[1]))
        return self.head.task_logits(self(read, num_filled=num_filled), batch, num_choices)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Return the last hidden states [B, S, H] of the tokens [B, S] of a batch. Every tensor rank gets all S
        positions.

        S may be any length. Under sequence parallelism, the sequence is padded at its end. The padding does not change
        the hidden states: in causal attention, a position never attends to later positions, and in bidirectional
        attention, the padding is masked.
        """
        filled, num_filled = self.sharing.filled(batch)
        hidden = self(filled, num_filled=num_filled)
        return enter_tensor_parallel(hidden, self.mesh)[:, : batch.tokens.shape[1]]

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the scores [B, V] of the next token after `tokens` [B, S]. All ranks get the same scores. S may be any
        length.
        """
        return self.logits_of(self.hidden_states(Batch(tokens=tokens))[:, -1])

    @torch.no_grad()
    def read(self, tokens: Tensor, cache: GenerationCache, *, counts: Sequence[int], first_row: int = 0) -> Tensor:
        """Run the model on `tokens` [B, S], which continue the texts in the cache. Return the last hidden states [B,
        S', H], where S' is S plus the padding that sequence parallelism needs.

        The tokens of the B texts belong to the cache's rows from `first_row` on. In row b, the first `counts[b]` tokens
        are real (possibly none), and the other tokens are padding. All tensor ranks get the same result; `logits_of`
        turns hidden states into scores. Raises `ConfigError` if a text would exceed the cache or the model's positions.
        """
        num_filled = self.sharing.num_filled(tokens.shape[1])
        reading = cache.begin(counts, length=tokens.shape[1] + num_filled, first_row=first_row)
        with reading_kernels(tokens.device):
            batch = Batch(tokens=F.pad(tokens, (0, num_filled)) if num_filled else tokens)
            hidden = enter_tensor_parallel(self(batch, reading=reading), self.mesh)
        cache.advance(counts, first_row=first_row)
        return hidden

    def hidden_form(self, tokens: Tensor) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return the shape and element type that the hidden states of `tokens` [B, S] have between two stages. The
        shape is [B, S, H] or, under sequence parallelism, [B, S/T, H].
        """
        parts = self.mesh.tensor.size if self.mesh.sequence_parallel else 1
        return (tokens.shape[0], tokens.shape[1] // parts, self.config.hidden_size), self.compute_dtype

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the scores [N, V] of the next tokens, or of the masked tokens, from N last hidden states [N, H]. All
        tensor ranks must hold the same hidden states, and every tensor rank gets the scores of the whole vocabulary.
        Raises `ConfigError` for a model that solves a task and predicts no tokens.
        """
        rows, weight, settings, products = self.head.operands(hidden)
        columns = products.output(rows, weight)
        if settings.bias is not None:
            columns = columns + settings.bias
        scores = gather_from_tensor_parallel(columns, self.mesh.tensor)[:, : self.config.vocab_size]
        return soft_cap(scores, settings.soft_cap)
