"""Transformer: maps token ids to hidden states through blocks, and hidden states to a loss or to scores.

The default is GPT-2 as in the paper's section 2.2: learned positions, layer norms, GeLU and tied embeddings. Llama,
BERT and similar models (`ModelConfig`) differ only in the kinds of layers. This code does not depend on the layout: on
one device, the layers of `parallel` are ordinary layers.

Shapes: B batch, S sequence, H hidden, V vocabulary, T tensor ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture import Cut, describe
from crosscut.architecture.needs import Share
from crosscut.architecture.pipeline import Stage
from crosscut.architecture.sublayers.embedding import Embedding
from crosscut.architecture.sublayers.head import Head
from crosscut.architecture.sublayers.norm import Norm
from crosscut.config import ConfigError, ModelConfig
from crosscut.config.checks import divisors, listed
from crosscut.config.model import HeadKind
from crosscut.flight import ModelPart
from crosscut.flight.places import enter, leave
from crosscut.kernels.products import ORDINARY
from crosscut.kernels.soft_cap import soft_cap
from crosscut.model.batch import Batch
from crosscut.model.block import Block
from crosscut.model.building import Builder
from crosscut.model.cache import GenerationCache, Reading, reading_kernels
from crosscut.model.documents import AttentionMask, attention_mask, document_numbers, shared_mask
from crosscut.model.heads.masked_head import MaskedPrediction, order_loss
from crosscut.model.heads.pooled_head import PooledHead
from crosscut.model.heads.task_head import build_task_head, last_places, task_logits, task_loss
from crosscut.model.running import PLAIN_RUNNERS, Runners
from crosscut.model.shared import Shared
from crosscut.model.sublayers.rotary import rotations
from crosscut.parallel import (
    LossSettings,
    ParallelMesh,
    PositionEmbedding,
    RandomStreams,
    TiedWeight,
    TokenTypeEmbedding,
    VocabParallelEmbedding,
    VocabParallelOutput,
    enter_tensor_parallel,
    gather_from_tensor_parallel,
    vocab_parallel_cross_entropy,
)
from crosscut.parallel.state.parameters import local

Scales = Mapping[str, float | Tensor]
"""Factor of each term of the loss, by the term's name (`GPT.loss_terms`). A term that is missing has the factor 1."""

SUMS: Scales = MappingProxyType({})
"""Factors that leave every term of the loss a sum."""


class StageInput(NamedTuple):
    """Stage of a pipeline, and its input for one micro-batch."""

    stage: Stage
    """Stage to run."""
    hidden: Tensor | None = None
    """Output of the previous stage [B, S, H]; None for the first stage."""


class GPT(nn.Module):
    """Transformer, a decoder or an encoder. Its weights are zero until `initialize` or a checkpoint fills them.

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
        self.loss_runner, self.context_attention = runners.loss, runners.context_attention
        self.compute_dtype = compute_dtype or dtype
        self.stages = runners.stages or (Stage(range(config.num_layers)),)
        parts = describe(config)
        self.shares, self.reads = parts.shares, parts.head.reads
        self.loss_terms = parts.head.loss_terms
        """Terms of the loss, on every stage."""
        is_first, is_last = (any(getattr(stage, end) for stage in self.stages) for end in ("is_first", "is_last"))
        self.has_copy = is_last and not is_first and parts.head.output is None and parts.head.task is None
        """Whether this rank's token embedding is a copy of the first stage's token embedding."""
        build = Builder(mesh=mesh, streams=streams, dtype=dtype, epsilon=config.norm_epsilon)
        self._build_embedding(parts.embedding, build, is_first=is_first)
        of_layers = replace(build, context_attention=runners.context_attention)
        self.blocks = nn.ModuleList()
        for i in (i for stage in self.stages for i in stage.layers):
            self.blocks.add_module(str(i), Block(parts.layers[i], replace(of_layers, runner=runners.layer(i))))
        self._build_head(parts.head if is_last else None, build)
        frozen = {parameter.name for parameter in parts.parameters() if parameter.is_frozen}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def _build_embedding(self, embedding: Embedding, build: Builder, *, is_first: bool) -> None:
        """Build the token embedding if the rank uses it, the rest of the embedding if the rank runs the first stage
        (`is_first`), and the dropout.
        """
        place: Any = {"mesh": self.mesh, "dtype": build.dtype, "output_dtype": self.compute_dtype}
        has_tokens = is_first or self.has_copy
        self.tokens = VocabParallelEmbedding(*embedding.tokens.shape, **place) if has_tokens else None
        positions = embedding.positions if is_first else None
        self.positions = None if positions is None else PositionEmbedding(*positions.shape, **place)
        kinds = embedding.token_types if is_first else None
        self.token_types = None if kinds is None else TokenTypeEmbedding(*kinds.shape, **place)
        self.embedding_norm = _norm(build, embedding.norm if is_first else None)
        self.dropout = build.dropout(embedding.dropout)

    def _build_head(self, head: Head | None, build: Builder) -> None:
        """Build the final norm and the head. `head` is None if the rank does not run the last stage."""
        norm, output = (None, None) if head is None else (head.norm, head.output)
        prediction, order, task = (None, None, None) if head is None else (head.prediction, head.order, head.task)
        self.final_norm = _norm(build, norm)
        self.output = None if output is None else VocabParallelOutput(*output.shape, mesh=self.mesh, dtype=build.dtype)
        self.prediction = None if prediction is None else MaskedPrediction(prediction, build)
        self.order = None if order is None else PooledHead(order, build)
        self.task = None if task is None else build_task_head(task, build)

    @property
    def output_weight(self) -> nn.Parameter:
        """Weight [V, H] that turns hidden states into logits. With tied embeddings, this is the weight of the token
        embedding.
        """
        if self.output is not None:
            return self.output.weight
        return self.token_weight

    @property
    def padded_rows(self) -> dict[str, int]:
        """Number of rows of each padded parameter, not counting the padding, by parameter name. Loading a checkpoint of
        another layout needs these numbers, because the padding depends on the layout.
        """
        own = {name for name, _ in self.named_parameters()}
        described = describe(self.config).root_parameters()
        padded = (parameter for parameter in described if parameter.cut is Cut.VOCABULARY)
        return {parameter.name: parameter.shape[0] for parameter in padded if parameter.name in own}

    @property
    def is_tied_over_stages(self) -> bool:
        """Whether the token embedding is tied across two stages of a pipeline, and this rank trains one of its two
        copies.
        """
        is_tied = describe(self.config).head.output is None and not self.config.solves_task
        return (
            self.mesh.pipeline is not None and is_tied and self.tokens is not None and self.token_weight.requires_grad
        )

    @property
    def token_weight(self) -> nn.Parameter:
        """Weight [V, H] of the token embedding."""
        assert self.tokens is not None, "the stage has no embedding"
        return self.tokens.weight

    @property
    def tied_copies(self) -> list[nn.Parameter]:
        """List with this rank's copy of the tied embedding; empty if the rank has no copy. Sums over all stages leave
        the copy out, because the rank with the first stage counts the original.
        """
        return [self.output_weight] if self.has_copy else []

    def counted_once(self, parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that this rank counts in sums over all stages: all except `tied_copies`."""
        copies = self.tied_copies
        return [parameter for parameter in parameters if all(parameter is not copy for copy in copies)]

    def forward(
        self,
        batch: Batch,
        *,
        num_filled: int = 0,
        reading: Reading | None = None,
        with_weight: bool = False,
        stage_input: StageInput | None = None,
    ) -> Tensor | tuple[Tensor, TiedWeight]:
        """Compute the last hidden states [B, S, H] of the tokens [B, S] of a batch. Under sequence parallelism, the
        result is [B, S/T, H].

        The last `num_filled` tokens of each sequence are padding that makes the sequence length divisible by the
        tensor-parallel size. `reading` gives the positions of tokens that continue earlier text. If context ranks share
        the sequences, S is the number of this rank's tokens. With `with_weight`, return (hidden states, weight of the
        token embedding), so that the loss can use the same weight. Raises `ConfigError` if segments are given but the
        model has no token types.

        In a pipeline, `stage_input` names the stage to run and holds its input. The result is the output of the stage.
        """
        stage, hidden = stage_input or StageInput(self.stages[0])
        tied = None
        places = batch.positions if reading is None else reading.places
        if hidden is None:
            hidden, tied = self._embed(batch, places, num_filled=num_filled, with_weight=with_weight)
        x, places = hidden, batch.places if places is None else places
        length = 0 if reading is not None else self._length(batch) - num_filled
        shared = self._shared(batch, places, length=length, dtype=x.dtype)
        draws = self.training and self.config.dropout > 0
        for place, (i, block) in enumerate(zip(stage.layers, self._blocks_of(stage), strict=True)):
            if draws:
                self.streams.enter_layer(i)
            enter(ModelPart.LAYER, i)
            x = leave(block(x, shared, None if reading is None else reading.layer(place)), ModelPart.LAYER, i)
        y: Tensor = self.final_norm(x) if stage.is_last and self.final_norm is not None else x
        return y if tied is None else (y, tied)

    def _blocks_of(self, stage: Stage) -> Sequence[nn.Module]:
        if len(self.stages) == 1:  # code that a compiler can trace
            return list(self.blocks)
        first = sum(len(other.layers) for other in self.stages[: self.stages.index(stage)])
        return list(self.blocks)[first : first + len(stage.layers)]

    def _embed(
        self, batch: Batch, places: Tensor | None, *, num_filled: int, with_weight: bool
    ) -> tuple[Tensor, TiedWeight | None]:
        """Compute the hidden states before the first layer, and, with `with_weight`, return the weight of the token
        embedding.
        """
        assert self.tokens is not None, "the stage has no embedding"
        enter(ModelPart.EMBEDDING)
        x, tied = self.tokens(batch.tokens, with_weight=True) if with_weight else (self.tokens(batch.tokens), None)
        if self.positions is not None:
            length = batch.tokens.shape[1]
            of_sequence = {"num_filled": num_filled, "places": batch.places}
            rows = self.positions(length, **of_sequence) if places is None else self.positions.at(places)
            x = x + rows
        x = self._typed(x, batch)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.dropout(x)
        if torch.is_grad_enabled() and not x.requires_grad:  # frozen embeddings: layers expect an x with a gradient
            x = x.detach().requires_grad_()
        return x, tied

    def _typed(self, x: Tensor, batch: Batch) -> Tensor:
        """Add the embeddings of the tokens' types, if the model has types."""
        if self.token_types is not None:
            types = torch.zeros_like(batch.tokens) if batch.segments is None else batch.segments
            y: Tensor = x + self.token_types(types)
            return y
        if batch.segments is not None:
            raise ConfigError(
                "A batch for a model with `model.token_types` of 0 must not have segments, but has some. Make the "
                "batch without segments."
            )
        return x

    def _length(self, batch: Batch) -> int:
        """Return the number of tokens in each whole sequence, which several context ranks may share."""
        return batch.tokens.shape[1] * (1 if batch.places is None else self.mesh.context.size)

    def _shared(self, batch: Batch, places: Tensor | None, *, length: int, dtype: torch.dtype) -> Shared:
        """Compute the tensors that the layers share. `length` is the length of the whole sequences."""
        rotation = mask = documents = None
        if self.shares & {Share.MASK, Share.DOCUMENTS}:
            documents = document_numbers(batch.documents, None if batch.places is None else self.mesh.context)
        if Share.ROTATION in self.shares:
            places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) if places is None else places
            rotation = rotations(places, self.config, dtype, length=length)
        if Share.MASK in self.shares and documents is not None:
            mask = self._mask(replace(batch, documents=documents.numbers), dtype)
        return Shared(rotation, mask, documents if Share.DOCUMENTS in self.shares else None)

    def _mask(self, batch: Batch, dtype: torch.dtype) -> AttentionMask | None:
        """Make the attention mask. `batch` has the documents of the whole sequences."""
        is_causal = self.config.is_causal
        if batch.places is None:
            return attention_mask(batch, dtype, is_causal=is_causal)
        return shared_mask(batch, dtype, is_causal=is_causal, axis=self.mesh.context, way=self.context_attention)

    def loss(self, batch: Batch, scales: Scales = SUMS, *, z_loss: float = 0.0) -> Tensor:
        """Return the sum of all terms of the loss (`loss_terms`), each times its factor in `scales`: a scalar.

        The term `tokens` is the sum of the cross entropies of the targets, the term `order` the one of the order of
        segments, if the batch has the order, and the term `task` the sum of the losses of the labels of a model that
        solves a task (`task_logits` says where padding may be). `z_loss` is the coefficient of the z-loss that is added
        to each cross entropy of a target (`parallel.cross_entropy`).

        To train on the mean, set each factor to 1 / (number of rows of the term's field that hold something to predict,
        over all data ranks), as a number or a scalar tensor on the device. Raises `ConfigError` for labels that the
        model cannot use, and if the labels of a task are missing.
        """
        self._require_terms(scales)
        self._require_labels(batch.labels)
        if batch.labels is not None:
            loss = task_loss(self._task_logits(batch, len(batch.labels)), batch.labels)
            return (scales.get("task", 1.0) * loss).to(loss.dtype)
        if self.output is None and torch.is_grad_enabled():
            hidden, tied = self(batch, with_weight=True)
            return self._loss_of_hidden(hidden, tied.tensor, batch, scales, z_loss)
        return self.loss_of_hidden(self(batch), batch, scales, z_loss=z_loss)

    def loss_of_hidden(self, hidden: Tensor, batch: Batch, scales: Scales = SUMS, *, z_loss: float = 0.0) -> Tensor:
        """Return the loss of a model that predicts tokens, from its last hidden states [B, S, H] (under sequence
        parallelism [B, S/T, H]). The other arguments are those of `loss`.
        """
        self._require_terms(scales)
        weight = local(self.output_weight, self.output_weight.dtype)
        return self._loss_of_hidden(hidden, weight, batch, scales, z_loss)

    def _loss_of_hidden(self, hidden: Tensor, weight: Tensor, batch: Batch, scales: Scales, z_loss: float) -> Tensor:
        """Return the loss of a model that predicts tokens, and possibly the order of segments."""
        assert batch.targets is not None, "the batch has no targets"
        enter(ModelPart.HEAD)
        settings = replace(self._loss_settings, scale=scales.get("tokens", 1.0), z_loss=z_loss)
        entered = enter_tensor_parallel(hidden, self.mesh)
        rows, targets, bias = self._to_predict(entered.flatten(0, 1), batch.targets.flatten(), batch.predicted)
        loss = vocab_parallel_cross_entropy(
            rows,
            weight,
            targets,
            vocab_size=self.config.vocab_size,
            axis=self.mesh.tensor,
            settings=replace(settings, bias=bias),
        )
        if self.order is None or batch.order is None:
            return loss
        of_order = scales.get("order", 1.0) * order_loss(self.order(entered[:, 0]), batch.order)
        return loss + of_order.to(loss.dtype)

    def _require_terms(self, scales: Scales) -> None:
        """Raise `ConfigError` for factors of terms that the loss does not have, which would change nothing."""
        names = [term.name for term in self.loss_terms]
        if unknown := [name for name in scales if name not in names]:
            raise ConfigError(
                f"`scales` must have only terms of the model's loss ({', '.join(names)}), but has `{unknown[0]}`. "
                "Remove it."
            )

    def _require_labels(self, labels: Tensor | None) -> None:
        of_model = f'A batch for a model with `model.head` = "{self.config.head}"'
        if (labels is None) != (self.task is None):
            must, is_, what = ("must", "none", "with") if labels is None else ("must not", "some", "without")
            raise ConfigError(f"{of_model} {must} have labels, but has {is_}. Make the batch {what} labels.")
        is_number = self.config.head is HeadKind.NUMBER
        if labels is not None and labels.is_floating_point() != is_number:
            must = "floating-point numbers" if is_number else "integers"
            raise ConfigError(f"{of_model} must have {must} as labels, but has {labels.dtype}. Convert the labels.")

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
        if self.task is None:
            raise ConfigError(
                f'`model.head` must be "classes", "number", "spans" or "choice" for the logits of a task, but is '
                f'"{self.config.head}". Choose a model that was fine-tuned for a task.'
            )
        number = len(batch.tokens)
        if number % num_choices:
            raise ConfigError(
                f"`num_choices` must divide the number of sequences ({number}), but is {num_choices}. "
                f"Try {listed(divisors(number))}."
            )
        return self._task_logits(batch, number // num_choices)

    def _task_logits(self, batch: Batch, num_labels: int) -> Tensor:
        """Return the logits of a batch with `num_labels` labels. For the head `choice`, each question has one label."""
        assert self.task is not None
        length = batch.tokens.shape[1]
        last = None
        if self.config.is_causal and self.config.head is not HeadKind.SPANS:
            last, batch = last_places(batch.mask, batch.tokens), replace(batch, mask=None)
        num_filled = self._num_filled(length)
        hidden = self(batch.padded(num_filled, hides=True), num_filled=num_filled)
        logits = task_logits(self.task, hidden, last, self.mesh)
        if self.config.head is HeadKind.SPANS:
            return logits[:, :length]
        return logits.view(num_labels, -1) if self.config.head is HeadKind.CHOICE else logits

    @property
    def _loss_settings(self) -> LossSettings:
        """Settings of the loss that are the same in every step."""
        runner = self.loss_runner
        return LossSettings(soft_cap=self.config.logit_softcap, chunk_tokens=runner.chunk_tokens, passes=runner.passes)

    def _to_predict(
        self, hidden: Tensor, targets: Tensor, predicted: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the hidden states to which the output projection is applied, their targets, and this rank's part of
        the bias of the logits. `predicted` are the indexes of the tokens to predict; None means all.
        """
        if self.prediction is None:
            return hidden, targets, None
        if predicted is not None:
            hidden, targets = hidden[predicted], targets[predicted]
        bias = self.prediction.bias
        return self.prediction(hidden), targets, local(bias, bias.dtype)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Return the last hidden states [B, S, H] of the tokens [B, S] of a batch. Every tensor rank gets all S
        positions.

        S may be any length. Under sequence parallelism, the sequence is padded at its end. The padding does not change
        the hidden states: in causal attention, a position never attends to later positions, and in bidirectional
        attention, the padding is masked.
        """
        filled, num_filled = self.filled(batch)
        hidden = self(filled, num_filled=num_filled)
        return enter_tensor_parallel(hidden, self.mesh)[:, : batch.tokens.shape[1]]

    def filled(self, batch: Batch) -> tuple[Batch, int]:
        """Pad the sequences at their ends, so that they can be split over the ranks. Return the padded batch and the
        number of padding tokens of each sequence.
        """
        num_filled = self._num_filled(batch.tokens.shape[1])
        return batch.padded(num_filled, hides=not self.config.is_causal), num_filled

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
        num_filled = self._num_filled(tokens.shape[1])
        reading = cache.begin(counts, length=tokens.shape[1] + num_filled, first_row=first_row)
        with reading_kernels(tokens.device):
            batch = Batch(tokens=F.pad(tokens, (0, num_filled)))
            hidden = enter_tensor_parallel(self(batch, reading=reading), self.mesh)
        cache.advance(counts, first_row=first_row)
        return hidden

    def hidden_form(self, tokens: Tensor) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return the shape and element type that the hidden states of `tokens` [B, S] have between two stages. The
        shape is [B, S, H] or, under sequence parallelism, [B, S/T, H].
        """
        parts = self.mesh.tensor.size if self.mesh.sequence_parallel else 1
        return (tokens.shape[0], tokens.shape[1] // parts, self.config.hidden_size), self.compute_dtype

    def _num_filled(self, length: int) -> int:
        """Number of padding tokens needed so that the sequence can be split over the ranks."""
        return -length % self.mesh.tensor.size if self.mesh.sequence_parallel else 0

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the scores [N, V] of the next tokens, or of the masked tokens, from N last hidden states [N, H]. All
        tensor ranks must hold the same hidden states, and every tensor rank gets the scores of the whole vocabulary.
        Raises `ConfigError` for a model that solves a task and predicts no tokens.
        """
        if self.task is not None:
            raise ConfigError(
                f'`model.head` must be "next_token" or "masked_tokens" for the scores of tokens, but is '
                f'"{self.config.head}". Call `task_logits` for the scores of a task.'
            )
        products = ORDINARY if self.output is None else self.output.products
        if self.prediction is not None:
            hidden = self.prediction(hidden)
        columns = products.output(hidden, local(self.output_weight, hidden.dtype))
        if self.prediction is not None:
            columns = columns + local(self.prediction.bias, hidden.dtype)
        scores = gather_from_tensor_parallel(columns, self.mesh.tensor)[:, : self.config.vocab_size]
        return soft_cap(scores, self.config.logit_softcap)


def _norm(build: Builder, norm: Norm | None) -> nn.Module | None:
    """Build a norm outside of the layers. Returns None if `norm` is None."""
    return None if norm is None else build.stream_norm(norm)
