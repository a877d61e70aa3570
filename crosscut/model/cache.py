"""Cache of what the parts of a model remember of earlier tokens. With the cache, a model continues a text without
processing the earlier tokens again.

The cache is built from the description of the parts (`Sublayer.memory`): attention remembers the keys and values of a
rank's heads, latent attention the latents, a mixer with a state its last inputs and the state, and an MLP nothing.
Every row is a text with its own length. The next tokens are read as [B, S]; rows with fewer tokens, or with none, are
padded at the end. Keys of padding are stored after a row's last token. No query of that row attends to the keys of
padding, and the row's next tokens overwrite these keys.

Shapes: B rows, S tokens of each row that are read at once, C capacity in tokens, A query heads, K heads of keys and
values, D elements of a head, T tensor ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from crosscut.architecture import Target, describe
from crosscut.architecture.blocks import BlockMask
from crosscut.architecture.needs import Fixed, Memory
from crosscut.config import ConfigError, ModelConfig
from crosscut.launch.heap import return_freed_memory
from crosscut.parallel import ParallelMesh


class GenerationCache:
    """Cache for `num_rows` texts of up to `capacity` tokens each, in the element type of the activations. `GPT.read`
    fills the cache.
    """

    def __init__(
        self, config: ModelConfig, *, mesh: ParallelMesh, dtype: torch.dtype, num_rows: int, capacity: int
    ) -> None:
        self.num_rows, self.capacity = num_rows, capacity
        self.lengths = [0] * num_rows
        """Number of tokens that each row has read."""
        self.device = mesh.device
        self._last_place = config.generation_length
        self._fixed: list[Tensor] = []
        """Tensors whose sizes do not depend on the number of tokens."""
        target = Target.of(mesh.layout)
        self._layers = [
            {
                part.name: {each.name: self._make(each, dtype) for each in part.inner.memory(target)}
                for part in layer.parts
            }
            for layer in describe(config).layers
        ]

    def _make(self, memory: Memory, dtype: torch.dtype) -> Tensor:
        """Make a tensor of zeros for what a part remembers of all rows."""
        if isinstance(memory, Fixed):
            dtype = torch.promote_types(dtype, torch.float32) if memory.is_wide else dtype
            self._fixed.append(torch.zeros((self.num_rows, *memory.shape), dtype=dtype, device=self.device))
            return self._fixed[-1]
        # One index more than the capacity: padding that lies beyond the capacity is written there.
        shape = (self.num_rows, memory.before, self.capacity + 1, memory.width)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _parts(self) -> Iterator[dict[str, Tensor]]:
        return (kept for layer in self._layers for kept in layer.values())

    def shrink(self, capacity: int) -> None:
        """Reduce the capacity of every row to `capacity` tokens, if the current capacity is larger. No row may hold
        more tokens. The memory is not freed.
        """
        self.capacity = min(self.capacity, capacity)

    def set_length(self, row: int, length: int) -> None:
        """Forget the tokens of a row after the first `length` tokens. With `length` 0, the row becomes free.

        Raises `ValueError` if a part cannot forget only the last tokens, because it keeps a state.
        """
        if self._fixed and 0 < length < self.lengths[row]:
            raise ValueError(f"a state of {self.lengths[row]} tokens cannot become one of {length} tokens")
        self.lengths[row] = min(length, self.lengths[row])
        if not self.lengths[row]:
            for each in self._fixed:
                each[row] = 0.0

    def clear(self, row: int) -> None:
        """Forget all tokens of a row and overwrite all that is kept of them with zeros.

        Attention gives hidden keys the weight 0, but 0 times NaN is NaN. If a row may hold NaN, setting its length to 0
        is therefore not enough.
        """
        self.set_length(row, 0)
        for kept in self._parts():
            for each in kept.values():
                each[row] = 0.0

    def grow(self, capacity: int) -> None:
        """Increase the capacity of every row to `capacity` tokens, if the current capacity is smaller. If memory runs
        out, PyTorch's error is raised, and the cache still works with the old capacity.
        """
        if capacity > self.capacity:
            for kept in self._parts():
                for name, each in kept.items():  # one by one, so that only one tensor exists twice
                    if any(each is fixed for fixed in self._fixed):
                        continue
                    more = capacity + 1 - each.shape[2]
                    if more > 0:  # an earlier attempt that failed may have enlarged this tensor
                        kept[name] = F.pad(each, (0, 0, 0, more))
            self.capacity = capacity
            if self.device.type == "cpu":  # the larger tensors do not fit into the freed blocks
                return_freed_memory()

    def begin(self, counts: Sequence[int], *, length: int, first_row: int) -> "Reading":
        """Prepare to read `length` tokens in each of the rows from `first_row` on. `counts` gives the number of real
        tokens per row, which may be 0; the other tokens are padding.

        Raises `ConfigError` if the real tokens exceed the cache's capacity or the model's positions.
        """
        rows = slice(first_row, first_row + len(counts))
        before = self.lengths[rows]
        for row, (n, count) in enumerate(zip(before, counts, strict=True), start=first_row):
            fits = min(self.capacity, self._last_place)
            if n + count > fits:
                raise ConfigError(
                    f"A text must have at most {fits} tokens, but row {row} has {n + count}. The cache or the model's "
                    "positions allow no more. Shorten the prompt or ask for fewer tokens."
                )
        return Reading(self, rows, counts, length)

    def advance(self, counts: Sequence[int], *, first_row: int) -> None:
        """Add `counts` to the lengths of the rows from `first_row` on. Call this after the model has read the tokens
        for which `begin` was called.
        """
        for row, count in enumerate(counts, start=first_row):
            self.lengths[row] += count

    def layer(self, index: int) -> Mapping[str, Mapping[str, Tensor]]:
        """Return what the parts of one layer remember, by the name of the part and the name of the tensor: [B, K/T, C +
        1 or more, D], where index C of the third dimension is only for padding, or [B, ...] of a fixed size.
        """
        return self._layers[index]


def reading_kernels(device: torch.device) -> AbstractContextManager[object]:
    """Context in which attention uses only kernels that work with any number of keys.

    On Hopper, PyTorch prefers cuDNN's kernel, which prepares a plan for each new shape. The plan takes tens of
    milliseconds on the host, and the shape changes with every token.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class Reading:
    """Positions of the next tokens, and the keys that each of their queries may see, for one forward pass."""

    def __init__(self, cache: GenerationCache, rows: slice, counts: Sequence[int], length: int) -> None:
        before = cache.lengths[rows]
        self._cache, self._rows, self._is_every_row = cache, rows, len(before) == cache.num_rows
        self._counts, self._length, self._before = counts, length, before
        self.start = before[0] if len(set(before)) == 1 and before[0] + length <= cache.capacity + 1 else None
        """Position at which all rows continue; None if rows continue at different positions or exceed the capacity."""
        self.end = min(max(before) + length, cache.capacity + 1)
        self.sees: Tensor | None = None
        """Mask of the keys that each query may see, [B, 1, S, keys]. None if no mask is needed, because each query sees
        all keys or all keys up to its own position.
        """
        self._spans: dict[int | BlockMask, Tensor] = {}
        """Masks for layers with a sliding window, by the length of the window, and for layers with a block mask."""
        if self.start is None or (self.start > 0 and length > 1):
            keys = torch.arange(self.end, device=cache.device)
            self.sees = (keys <= self.places.unsqueeze(-1)).unsqueeze(1)

    @cached_property
    def counts(self) -> Tensor:
        """Number of real tokens of each row: [B]."""
        return torch.tensor(self._counts, device=self._cache.device)

    @cached_property
    def is_real(self) -> Tensor | None:
        """Whether each token is real: [B, S]. None if all tokens are real."""
        if min(self._counts) == self._length:
            return None
        return torch.arange(self._length, device=self._cache.device) < self.counts.unsqueeze(1)

    @cached_property
    def places(self) -> Tensor:
        """Positions of the tokens in their texts: [B, S]."""
        device = self._cache.device
        if self.start is not None:
            return torch.arange(self.start, self.end, device=device).expand(len(self._before), -1)
        return torch.tensor(self._before, device=device).unsqueeze(1) + torch.arange(self._length, device=device)

    @cached_property
    def slots(self) -> Tensor:
        """Indexes of the tokens in the cache: [B, S]."""
        return self.places.clamp(max=self._cache.capacity)

    def seen(self, span: int | BlockMask) -> tuple[Tensor | None, int]:
        """Return the mask of the keys that each query may see, as `sees`, and the position of the first of these keys.
        A `span` above 0 limits each query to the last `span` keys, or to the blocks of a block mask.
        """
        if isinstance(span, int):
            if not 0 < span < self.end:
                return self.sees, 0
            if self.start is not None and self.places.shape[1] == 1:
                return None, self.end - span
        if span not in self._spans:
            places = self.places.clamp(max=self.end - 1).unsqueeze(-1)  # so that padding sees a key, too
            keys = torch.arange(self.end, device=places.device)
            near = keys > places - span if isinstance(span, int) else self._in_blocks(places, keys, span)
            self._spans[span] = ((keys <= places) & near).unsqueeze(1)
        return self._spans[span], 0

    def _in_blocks(self, places: Tensor, keys: Tensor, blocks: BlockMask) -> Tensor:
        """Return a mask [B, S, keys] of the keys in the blocks that the queries at `places` [B, S, 1] see."""
        size, num_blocks = blocks.block_size, blocks.num_blocks(self.end)
        shown = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
        for block in range(min(self._before) // size, num_blocks):
            shown[block, list(blocks.keys_of(block, num_blocks))] = True
        return shown.to(places.device)[places // size, keys // size]

    def layer(self, index: int) -> "LayerMemory":
        """Return what the parts of the layer at `index` remember. They read and extend it during the forward pass."""
        return {
            part: PartMemory(
                self, kept if self._is_every_row else {name: each[self._rows] for name, each in kept.items()}
            )
            for part, kept in self._cache.layer(index).items()
        }


class PartMemory(NamedTuple):
    """Memory of one part of a layer during a forward pass."""

    reading: Reading
    kept: Mapping[str, Tensor]
    """Tensors by their names."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, span: int | BlockMask = 0, scale: float | None = None
    ) -> Tensor:
        """Store the keys `k` and values `v`, each [B, K/T, S, D]. Let each query of `q` [B, A/T, S, D] attend to all
        keys that this query may see, or, with a `span` above 0, to the last `span` of these, or to the blocks of a
        block mask. `scale` is the factor of the products of queries and keys; None means 1 / sqrt(D).
        """
        keys, values = self.extended("keys", k), self.extended("values", v)
        sees, first = self.reading.seen(span)
        if first:
            keys, values = keys[:, :, first:], values[:, :, first:]
        num_groups = q.shape[1] // k.shape[1]
        if q.shape[2] == 1:  # treat the queries of a group, which see the same keys, like several positions
            grouped = q.reshape(*k.shape[:2], num_groups, -1)
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=sees, scale=scale).reshape(q.shape)
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=sees, is_causal=sees is None, scale=scale, enable_gqa=num_groups > 1
        )

    def joined(self, name: str, new: Tensor) -> tuple[Tensor, int]:
        """Return the values [B, n, D] that a part keeps of each row's last n tokens, followed by `new` [B, S, D], and
        the number n. From now on, the part keeps the values of the last n real tokens.
        """
        kept, counts = self.kept[name], self.reading.counts
        joined, before = torch.cat((kept, new), 1), kept.shape[1]
        if self.reading.is_real is None:
            kept.copy_(joined[:, new.shape[1] :])
        else:
            last = counts.unsqueeze(1) + torch.arange(before, device=counts.device)
            kept.copy_(joined.gather(1, last.unsqueeze(-1).expand(-1, -1, joined.shape[-1])))
        return joined, before

    def extended(self, name: str, new: Tensor) -> Tensor:
        """Store `new` [B, K/T, S, D] after each row's last token, and return the values of all tokens [B, K/T, tokens,
        D].
        """
        kept, reading = self.kept[name], self.reading
        if reading.start is not None:
            kept.narrow(2, reading.start, reading.end - reading.start).copy_(new)
        else:
            rows = torch.arange(new.shape[0], device=new.device).unsqueeze(1)
            kept[rows, :, reading.slots] = new.transpose(1, 2)
        return kept.narrow(2, 0, reading.end)


LayerMemory = Mapping[str, PartMemory]
"""Memory of the parts of one layer, by the name of the part."""
