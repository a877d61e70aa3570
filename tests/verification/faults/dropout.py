"""Faults of dropout: what it draws, and what it does with the elements that stay. `mutations` says how a fault is
planted. Faults in what all layouts share are in the cut and the uncut model alike.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.model.sublayers import attention
from crosscut.parallel import RandomStreams, random, seed_of
from crosscut.parallel.linear import is_recomputing
from crosscut.training.memory import recomputation
from tests.verification.mutations import (
    ACCUMULATED,
    INTERLEAVED,
    STAGED_TENSOR,
    STAGES,
    TENSOR,
    Patch,
    fault,
    instead_of,
)
from tests.verification.runs import BERT, CLASSES

REPLICAS = Layout(data=4, sharding="zero2", shard_group=2)
SHARED_SEQUENCES = Layout(data=2, context=2)
WHOLE = {"recompute": "full"}
CORE = {"recompute": "selective"}


@fault("every micro-batch of a pipeline drops as the first one does", "dropout", STAGES)
@instead_of(RandomStreams, "restart")
def pipeline_drops_as_the_first(restart: Any, self: RandomStreams, *, step: int, micro_batch: int = 0) -> None:
    restart(self, step=step, micro_batch=0 if self.mesh.is_staged else micro_batch)


@fault("every micro-batch drops as the first one does", "dropout", training=ACCUMULATED)
def every_micro_batch_drops_as_the_first(patch: Patch) -> None:
    restart = RandomStreams.restart
    patch.setattr(RandomStreams, "restart", lambda self, *, step, micro_batch=0: restart(self, step=step))


def _with_layer(patch: Patch, changed: Callable[[RandomStreams, int], int]) -> None:
    enter = RandomStreams.enter_layer
    patch.setattr(RandomStreams, "enter_layer", lambda self, index: enter(self, changed(self, index)))


@fault("a stage numbers its layers from 0", "blocks.1.attention", STAGES)
def stage_numbers_from_0(patch: Patch) -> None:
    _with_layer(patch, lambda streams, index: index - streams.mesh.pipeline.rank)


@fault("the stages of a rank number their layers alike", "blocks.2.attention", INTERLEAVED, num_layers=4)
def stages_of_a_rank_number_alike(patch: Patch) -> None:
    _with_layer(patch, lambda streams, index: index % 2 if streams.mesh.is_staged else index)


@fault("a stage numbers its layers from the end", "blocks.0", STAGES)
def stage_numbers_from_the_end(patch: Patch) -> None:
    _with_layer(patch, lambda streams, index: 1 - index if streams.mesh.is_staged else index)


@fault("all layers drop as the first one does", "blocks.1.attention")
def layers_drop_as_the_first(patch: Patch) -> None:
    _with_layer(patch, lambda streams, index: 0)


@fault("the layers of a stage go on with the random stream of its start", "blocks.1.attention", STAGES)
def stages_do_not_restart(patch: Patch) -> None:
    enter = RandomStreams.enter_layer
    patch.setattr(RandomStreams, "enter_layer", lambda self, index: self.mesh.is_staged or enter(self, index))


def _own_place(patch: Patch, changed: Callable[[RandomStreams, tuple], tuple]) -> None:
    """Change the place from which the rank's own stream starts."""

    def restart(self: RandomStreams, *layer: object) -> None:
        place = (self.seed, *self._started, self.mesh.tokens.rank, *layer)
        torch.manual_seed(seed_of("per rank", *changed(self, place)))
        self._per_rank_state = self._get_state()
        torch.manual_seed(seed_of("shared", *place))

    patch.setattr(RandomStreams, "_restart", restart)


@fault("a layer's own stream on a rank is that of the next layer on the rank before", "blocks.1.attention")
def own_streams_of_neighbours(patch: Patch) -> None:
    _own_place(patch, lambda streams, place: (*place[:-1], sum(place[-1:]) + 1 - streams.mesh.tensor.rank)
               if len(place) > 4 else (*place, streams.mesh.tensor.rank))  # fmt: skip


@fault("a rank's own stream does not depend on the micro-batch", "blocks.0.attention", training=ACCUMULATED)
def own_stream_without_the_micro_batch(patch: Patch) -> None:
    _own_place(patch, lambda streams, place: (*place[:2], *place[3:], streams.mesh.tensor.rank))


@fault("a rank's own stream does not depend on the layer", "blocks.1.attention", STAGED_TENSOR)
def own_stream_without_the_layer(patch: Patch) -> None:
    _own_place(patch, lambda streams, place: (*place[:4], streams.mesh.tensor.rank))


def _tokens_rank(patch: Patch, rank_of: Callable[[RandomStreams], int]) -> None:
    def restart(self: RandomStreams, *layer: object) -> None:
        torch.manual_seed(seed_of("shared", self.seed, *self._started, rank_of(self), *layer))

    patch.setattr(RandomStreams, "_restart", restart)


@fault("data ranks of different shard groups drop alike", "dropout", REPLICAS)
def replicas_drop_alike(patch: Patch) -> None:
    _tokens_rank(patch, lambda streams: streams.mesh.data.rank % 2)


@fault("the sum of the data and the context rank selects the random stream", "dropout", SHARED_SEQUENCES)
def sum_of_ranks_selects(patch: Patch) -> None:
    _tokens_rank(patch, lambda streams: streams.mesh.data.rank + streams.mesh.context.rank)


# --- the elements that stay ------------------------------------------------------------------------------------------


@fault("tensor ranks do not scale up the elements of the residual stream that stay", "dropout")
@instead_of(random.Dropout, "forward")
def residual_not_scaled(forward: Any, self: random.Dropout, x: Tensor) -> Tensor:
    drops = self.training and self.streams.mesh.tensor.size > 1
    return forward(self, x) * ((1 - self.probability) if drops else 1)


@fault("tensor ranks do not scale up the weights of attention that stay", "blocks.0.attention")
@instead_of(attention.SelfAttention, "_attend_here")
def attention_not_scaled(attend: Any, self: attention.SelfAttention, *operands: Any) -> Tensor:
    drops = self.training and self.streams.mesh.tensor.size > 1
    return attend(self, *operands) * ((1 - self.dropout) if drops else 1)


@fault("a head does not scale up the elements that stay", "task.dropout", **BERT, **CLASSES)
@instead_of(random.Dropout, "forward")
def head_not_scaled(forward: Any, self: random.Dropout, x: Tensor) -> Tensor:
    drops = self.training and self.inside and self.streams.mesh.tensor.size > 1
    return forward(self, x) * ((1 - self.probability) if drops else 1)


@fault("dropout's backward pass does not scale", "blocks.1.dropout, call 2")
@instead_of(random.Dropout, "forward")
def backward_not_scaled(forward: Any, self: random.Dropout, x: Tensor) -> Tensor:
    y = forward(self, x)
    if not self.training or self.streams.mesh.tensor.size == 1:
        return y
    unscaled = y * (1 - self.probability)
    return unscaled + (y - unscaled).detach()


@fault("tensor ranks drop with another probability in attention", "blocks.0.attention")
@instead_of(attention.SelfAttention, "__init__")
def other_probability(make: Any, self: attention.SelfAttention, part: Any, build: Any) -> None:
    make(self, part, build)
    self.dropout *= 2 if build.mesh.tensor.size > 1 else 1


@fault("tensor ranks do not drop in attention", "blocks.0.attention")
@instead_of(attention.SelfAttention, "__init__")
def attention_without_dropout(make: Any, self: attention.SelfAttention, part: Any, build: Any) -> None:
    make(self, part, build)
    self.dropout *= build.mesh.tensor.size == 1


# --- recomputation ---------------------------------------------------------------------------------------------------


def _repeat(patch: Patch, changed: Callable[[RandomStreams, tuple], tuple]) -> None:
    repeated = RandomStreams.repeated_from
    patch.setattr(RandomStreams, "repeated_from", lambda self, place: repeated(self, changed(self, place)))


@fault("recomputation goes on with the rank's own stream", "blocks.1.attention", training=WHOLE)
def own_stream_goes_on(patch: Patch) -> None:
    _repeat(patch, lambda streams, place: (place[0], streams._per_rank_state))


@fault("recomputation restarts the rank's own stream from the shared one", "blocks.1.attention", training=WHOLE)
def own_stream_from_the_shared(patch: Patch) -> None:
    _repeat(patch, lambda streams, place: (place[0], place[0]))


@fault("recomputation goes on with the shared stream", "blocks.1.dropout", training=WHOLE)
def shared_stream_goes_on(patch: Patch) -> None:
    _repeat(patch, lambda streams, place: (streams._get_state(), place[1]))


@fault("recomputed attention draws from where the streams stand", "blocks.1.attention", training=CORE)
def attention_draws_on(patch: Patch) -> None:
    _repeat(patch, lambda streams, place: streams.place())


@fault("recomputation in a stage draws as the newest micro-batch", "blocks.0.attention", STAGES, training=WHOLE)
def stage_recomputes_the_newest(patch: Patch) -> None:
    same = recomputation._SameNumbers
    make, enter, newest = same.__init__, same.__enter__, {}

    def noted(self: Any, streams: RandomStreams) -> None:
        make(self, streams)
        newest[streams] = self._place

    def of_newest(self: Any) -> None:
        self._place = newest[self._streams]
        enter(self)

    patch.setattr(same, "__init__", noted)
    patch.setattr(same, "__enter__", of_newest)


@fault("a recomputed layer drops with another probability", "blocks.1.dropout", training=WHOLE)
def recomputed_with_another_probability(patch: Patch) -> None:
    forward = random.Dropout.forward

    def other(self: random.Dropout, x: Tensor) -> Tensor:
        with patch.context() as inside:
            if is_recomputing():
                inside.setattr(self, "probability", 0.2)
            return forward(self, x)

    patch.setattr(random.Dropout, "forward", other)


@fault("recomputed attention drops with another probability", "blocks.1.attention", training=CORE)
def recomputed_attention_with_another_probability(patch: Patch) -> None:
    attend = attention.SelfAttention._attend_here

    def other(self: attention.SelfAttention, *operands: Any) -> Tensor:
        with patch.context() as inside:
            if is_recomputing():
                inside.setattr(self, "dropout", 0.2)
            return attend(self, *operands)

    patch.setattr(attention.SelfAttention, "_attend_here", other)


@contextmanager
def _nothing(*_: Any) -> Any:
    yield


@fault("attention draws from the stream that tensor ranks share", "blocks.0.attention", TENSOR)
def attention_from_the_shared_stream(patch: Patch) -> None:
    patch.setattr(RandomStreams, "per_rank", _nothing)
