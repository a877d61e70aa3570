"""Cache of keys and values. With the cache, a model continues a text without processing the earlier tokens again.

Each rank keeps keys and values of its own heads. Every row is a text with its own length. The next tokens are read as
[B, S]; rows with fewer tokens are padded at the end. Keys of padding are stored after a row's last token. No query of
that row attends to the keys of padding, and the row's next tokens overwrite these keys.

Shapes: B rows, S tokens of each row that are read at once, C capacity in tokens, A query heads, K heads of keys and
values, D elements of a head, T tensor ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from crosscut.config import ConfigError, ModelConfig
from crosscut.launch.heap import return_freed_memory
from crosscut.parallel import ParallelMesh


class KeyValueCache:
    """Cache for `num_rows` texts of up to `capacity` tokens each, in the element type of the activations. `GPT.read`
    fills the cache.
    """

    def __init__(
        self, config: ModelConfig, *, mesh: ParallelMesh, dtype: torch.dtype, num_rows: int, capacity: int
    ) -> None:
        self.num_rows, self.capacity = num_rows, capacity
        self.lengths = [0] * num_rows
        """Number of tokens that each row has read."""
        self._last_place = config.generation_length
        own_heads = max(config.num_kv_heads // mesh.tensor.size, 1)
        # One index more than the capacity: padding that lies beyond the capacity is written there.
        shape = (2, num_rows, own_heads, capacity + 1, config.head_size)
        self._layers = [torch.zeros(shape, dtype=dtype, device=mesh.device) for _ in range(config.num_layers)]

    def shrink(self, capacity: int) -> None:
        """Reduce the capacity of every row to `capacity` tokens, if the current capacity is larger. No row may hold
        more tokens. The memory is not freed.
        """
        self.capacity = min(self.capacity, capacity)

    def set_length(self, row: int, length: int) -> None:
        """Forget the tokens of a row after the first `length` tokens. With `length` 0, the row becomes free."""
        self.lengths[row] = min(length, self.lengths[row])

    def clear(self, row: int) -> None:
        """Forget all tokens of a row and overwrite its keys and values with zeros.

        Attention gives hidden keys the weight 0, but 0 times NaN is NaN. If a row may hold NaN, setting its length to 0
        is therefore not enough.
        """
        self.set_length(row, 0)
        for layer in self._layers:
            layer[:, row] = 0.0

    def grow(self, capacity: int) -> None:
        """Increase the capacity of every row to `capacity` tokens, if the current capacity is smaller. If memory runs
        out, PyTorch's error is raised, and the cache still works with the old capacity.
        """
        if capacity > self.capacity:
            for i, layer in enumerate(self._layers):  # one by one, so that only one layer exists twice
                more = capacity + 1 - layer.shape[3]
                if more > 0:  # an earlier attempt that failed may have enlarged this layer
                    self._layers[i] = F.pad(layer, (0, 0, 0, more))
            self.capacity = capacity
            if self._layers[0].device.type == "cpu":  # the larger layers do not fit into the freed blocks
                return_freed_memory()

    def begin(self, counts: Sequence[int], *, length: int, first_row: int) -> "Reading":
        """Prepare to read `length` tokens in each of the rows from `first_row` on. `counts` gives the number of real
        tokens per row; the other tokens are padding.

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
        return Reading(self, rows, before, length)

    def advance(self, counts: Sequence[int], *, first_row: int) -> None:
        """Add `counts` to the lengths of the rows from `first_row` on. Call this after the model has read the tokens
        for which `begin` was called.
        """
        for row, count in enumerate(counts, start=first_row):
            self.lengths[row] += count

    def layer(self, index: int) -> Tensor:
        """Return keys and values of one layer: [2, B, K/T, C + 1 or more, D]. Index C of the fourth dimension is only
        for padding.
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

    def __init__(self, cache: KeyValueCache, rows: slice, before: Sequence[int], length: int) -> None:
        self._cache, self._rows, self._is_every_row = cache, rows, len(before) == cache.num_rows
        device = cache.layer(0).device
        first = torch.tensor(before, device=device)
        self.places = first.unsqueeze(1) + torch.arange(length, device=device)
        """Positions of the tokens in their texts: [B, S]."""
        self.start = before[0] if len(set(before)) == 1 and before[0] + length <= cache.capacity + 1 else None
        """Position at which all rows continue; None if rows continue at different positions or exceed the capacity."""
        self.end = min(max(before) + length, cache.capacity + 1)
        self.slots = self.places.clamp(max=cache.capacity)
        self.sees: Tensor | None = None
        """Mask of the keys that each query may see, [B, 1, S, keys]. None if no mask is needed, because each query sees
        all keys or all keys up to its own position.
        """
        if self.start is None or (self.start > 0 and length > 1):
            keys = torch.arange(self.end, device=device)
            self.sees = (keys <= self.places.unsqueeze(-1)).unsqueeze(1)

    def layer(self, index: int) -> "LayerCache":
        """Return the cache of the layer at `index`. The layer's attention reads and extends this cache during the
        forward pass.
        """
        kept = self._cache.layer(index)
        return LayerCache(self, kept if self._is_every_row else kept[:, self._rows])


class LayerCache:
    """Keys and values of one layer during a forward pass."""

    def __init__(self, reading: Reading, kept: Tensor) -> None:
        self._reading, self._kept = reading, kept

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the keys `k` and values `v`, each [B, K/T, S, D]. Let each query of `q` [B, A/T, S, D] attend to all
        keys that this query may see.
        """
        reading = self._reading
        self._keep(k, v)
        keys, values = self._kept.narrow(3, 0, reading.end).unbind()
        num_groups = q.shape[1] // k.shape[1]
        if q.shape[2] == 1:  # treat the queries of a group, which see the same keys, like several positions
            grouped = q.reshape(*k.shape[:2], num_groups, -1)
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=reading.sees).reshape(q.shape)
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=reading.sees, is_causal=reading.sees is None, enable_gqa=num_groups > 1
        )

    def _keep(self, k: Tensor, v: Tensor) -> None:
        reading = self._reading
        if reading.start is not None:
            torch.stack((k, v), out=self._kept.narrow(3, reading.start, reading.end - reading.start))
            return
        rows = torch.arange(k.shape[0], device=k.device).unsqueeze(1)
        self._kept[0][rows, :, reading.slots] = k.transpose(1, 2)
        self._kept[1][rows, :, reading.slots] = v.transpose(1, 2)
