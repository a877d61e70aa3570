"""Self-attention, causal or bidirectional, with its heads divided over the tensor ranks (paper, section 3, Figure 3b).

    X --f--> queries, keys and values of a rank's heads --> norm and rotation --> attend --> Z_i O_i --g--> sum + bias

f is the entry into the parallel region, and g is the exit, which sums the results of all ranks. Z_i is the attention
result of rank i, which may pass through a gate, and O_i are the rank's rows of the output matrix.

If there are fewer key-value heads than query heads, adjacent query heads share a key-value head. If there are more
tensor ranks than key-value heads, several ranks hold the same head.

Legend: A query heads, K heads of keys and values, D elements of a head, S tokens of a sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from crosscut.architecture.blocks import BlockMask
from crosscut.architecture.needs import PerToken, Share
from crosscut.architecture.parameters import Matrix, columns, columns_by_heads, rows
from crosscut.architecture.steps import (
    Message,
    Operation,
    Passes,
    Pointwise,
    Product,
    Rows,
    Step,
    Value,
    enter,
    leave,
    multiply_columns,
    multiply_rows,
)
from crosscut.architecture.sublayers.context import context_messages, exchanged_heads
from crosscut.architecture.sublayers.norm import Norm, head_norm
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig
from crosscut.config.conventions import takes_shared_heads
from crosscut.config.layout import ContextAttention
from crosscut.config.parts.kinds import Mixer


@dataclass(frozen=True)
class Core:
    """Sizes of the core of attention: queries and keys of `head_size` elements per head, and values of `value_size`."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    dropout: float
    is_causal: bool
    window: int = 0
    """Number of tokens to which a token attends: itself and the tokens before it. 0 means all."""
    blocks: BlockMask | None = None
    """Blocks of tokens to which each block attends. None means that no block is left out."""
    score_factor: float | None = None
    """Factor by which products of queries and keys are multiplied. None means 1 / sqrt(`head_size`)."""
    gathers: bool = True
    """Whether the core itself gathers keys and values, if context ranks do (`context_attention`)."""

    @property
    def padded_size(self) -> int:
        """Width to which queries, keys and values are padded with zeros if they must have the same width."""
        return max(self.head_size, self.value_size)

    def is_fused(self, target: Target) -> bool:
        """Whether attention saves no scores. Attention with a block mask computes them again in the backward pass."""
        return self.blocks is not None or (target.fuses_attention and (target.device == "cuda" or not self.dropout))

    def scores(self, target: Target) -> Iterator[tuple[int, int, int]]:
        """Sizes of the products of a rank and a sequence: numbers of queries, of keys that each of them meets, and of
        heads. If context ranks exchange heads, a rank has all queries of a part of its heads.
        """
        heads = target.own_heads(self.num_heads)
        if self.blocks is None:
            yield target.own_length, target.length, heads
            return
        size, heads = self.blocks.block_size, heads // target.context
        for group in self.blocks.groups(target.length):
            yield len(group.queries) * size, group.num_keys * size, heads

    def widths(self, target: Target) -> tuple[int, int]:
        """Width of a head's queries and keys, and of its values, in the kernel. The ring, and the CPU's fused kernel,
        need the same width.
        """
        if target.way is ContextAttention.RING or (target.device == "cpu" and self.is_fused(target)):
            return self.padded_size, self.padded_size
        return self.head_size, self.value_size

    def has_mask(self, target: Target) -> bool:
        """Whether the kernel reads a mask from memory: the mask of documents, or, in bidirectional attention, the mask
        of padding. If context ranks gather the keys, causal attention needs a mask even without documents. So does
        attention with a window that is shorter than the sequences, and attention with a block mask.
        """
        hides_more = 0 < self.window < target.length or self.blocks is not None
        return target.document_mask or not self.is_causal or target.gathers or hides_more


@dataclass(frozen=True)
class Attention:
    """Self-attention."""

    name: str
    """Name of the part, which is the prefix of all names."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    dropout: float
    is_causal: bool
    """Whether a token attends only to itself and to earlier tokens."""
    rotation: Share | None
    """Shared cosines and sines that rotate queries and keys by their positions; None if nothing is rotated."""
    window: int
    """Number of tokens to which a token attends: itself and the tokens before it. 0 means all."""
    blocks: BlockMask | None
    """Blocks of tokens to which each block attends. None means that no block is left out."""
    has_gate: bool
    """Whether the result of each head is multiplied by the sigmoid of a gate."""
    score_factor: float | None
    """Factor by which products of queries and keys are multiplied. None means 1 / sqrt(`head_size`)."""
    query: Matrix
    """Projection to queries and, if attention has a gate, to gates. The rows are then grouped by head: first a head's
    query rows, then its gate rows."""
    key_value: Matrix
    """Projection to keys and values. The rows are grouped by head: first a head's key rows, then its value rows."""
    output: Matrix
    query_norm: Norm | None
    key_norm: Norm | None

    @classmethod
    def of(cls, model: ModelConfig, name: str, kind: Mixer = Mixer.ATTENTION) -> "Attention":
        """Describe the attention of a model in the part `name`, of one of the kinds `ATTENTIONS`."""
        hidden, bias = model.hidden_size, model.biases != "none"
        query = {"heads": model.num_heads, "num_matrices": 2} if model.attention_gate else {}
        make = columns_by_heads if model.attention_gate else columns
        return cls(
            name=name,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            dropout=0.0 if kind is Mixer.SPARSE_ATTENTION else model.dropout,
            is_causal=model.is_causal,
            rotation=_rotation(model, kind),
            window=model.sliding_attention.window if kind is Mixer.SLIDING_ATTENTION else 0,
            blocks=_blocks(model) if kind is Mixer.SPARSE_ATTENTION else None,
            has_gate=model.attention_gate,
            score_factor=model.attention_multiplier or None,
            query=make(f"{name}.qkv.query", hidden, model.query_size * (1 + model.attention_gate), bias=bias, **query),
            key_value=columns_by_heads(
                f"{name}.qkv.key_value",
                hidden,
                model.key_value_size,
                heads=model.num_kv_heads,
                bias=bias,
                num_matrices=2,
            ),
            output=rows(f"{name}.output", model.query_size, hidden, bias=model.biases == "all"),
            query_norm=head_norm(model, f"{name}.query_norm", heads=model.num_heads),
            key_norm=head_norm(model, f"{name}.key_norm", heads=model.num_kv_heads),
        )

    def steps(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the sublayer's output, and the steps that compute the output from the input `x`."""
        name = self.name
        entered, entering = enter(x, f"{name} input")
        query, multiply_query = multiply_columns(
            entered, self.query, name=f"{name} query", keeps=x, heads=self.num_heads
        )
        key_value, multiply_key_value = multiply_columns(
            entered, self.key_value, name=f"{name} key_value", keeps=x, heads=self.num_kv_heads
        )
        operands, placing = self._placed(query, key_value)
        attended = Value(f"{name} attended", self.num_heads * self.head_size, cut=True)
        attend = Attend(reads=operands, gives=(attended,), name=f"{name} over context", attention=self.core)
        result, gating = self._gated(attended, query)
        projected, project = multiply_rows(result, self.output, name=f"{name} projected")
        left, leaving = leave(projected, f"{name} output", bias=self.output.bias)
        return left, [entering, multiply_query, multiply_key_value, *placing, attend, *gating, project, leaving]

    @property
    def shares(self) -> frozenset[Share]:
        """The mask or, with a block mask, the tokens that are not padding, and, for queries and keys that are rotated,
        the rotation.
        """
        mask = Share.WINDOW_MASK if self.window else Share.MASK
        mask = mask if self.blocks is None else Share.REAL_TOKENS
        return frozenset({mask} if self.rotation is None else {mask, self.rotation})

    def memory(self, target: Target) -> tuple[PerToken, ...]:
        """Return the keys and the values of a rank's heads."""
        own_heads = target.own_heads(self.num_kv_heads)
        return tuple(PerToken(name, own_heads, self.head_size) for name in ("keys", "values"))

    @property
    def core(self) -> Core:
        """Sizes of the core."""
        return Core(
            name=self.name,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            value_size=self.head_size,
            dropout=self.dropout,
            is_causal=self.is_causal,
            window=self.window,
            blocks=self.blocks,
            score_factor=self.score_factor,
        )

    def _placed(self, query: Value, key_value: Value) -> tuple[tuple[Value, ...], list[Step]]:
        """Return the operands of attention after the norm of heads and the rotation, and the steps to compute them.

        The operands are queries, keys, and `key_value`, which holds the values.
        """
        if self.query_norm is None and self.rotation is None:
            return (query, key_value), []
        q = replace(query, name=f"{self.name} placed query", width=self.num_heads * self.head_size)
        k = replace(key_value, name=f"{self.name} placed key", width=key_value.width // 2)
        norms = [norm for norm in (self.query_norm, self.key_norm) if norm is not None]
        parameters = tuple(parameter for norm in norms for parameter in norm.parameters)
        placing = Place(
            reads=(query, key_value),
            gives=(q, k),
            parameters=parameters,
            name=f"{self.name} norm",
            attention=self,
        )
        return (q, k, key_value), [placing]

    def _gated(self, attended: Value, query: Value) -> tuple[Value, list[Step]]:
        """Return the result of attention after the gate, if there is one, and the step. `query` holds the gates."""
        if not self.has_gate:
            return attended, []
        gated = replace(attended, name=f"{self.name} gated", is_cheap=True)
        return gated, [Gate(reads=(attended, query), gives=(gated,), keeps=(attended, query))]


def _rotation(model: ModelConfig, kind: Mixer) -> Share | None:
    """Return the shared rotation that attention of a kind reads. Layers with a window read that of all layers, unless
    their frequencies differ.
    """
    if model.positions != "rotary" or kind is Mixer.NOPE_ATTENTION:
        return None
    is_own = kind is Mixer.SLIDING_ATTENTION and model.in_windows != model
    return Share.WINDOW_ROTATION if is_own else Share.ROTATION


def _blocks(model: ModelConfig) -> BlockMask:
    section = model.sparse_attention
    return BlockMask(section.block_size, section.window, section.global_blocks, section.stride, model.is_causal)


@dataclass(frozen=True, kw_only=True)
class Place(Pointwise):
    """Normalise queries and keys, each head or all heads together, then rotate queries and keys by their positions.

    A model may have only the norm or only the rotation. The rotation saves nothing for its backward pass.
    """

    attention: Attention

    def on(self, target: Target) -> Step:
        """Return the step with the values that the norm saves for the backward pass, and with its messages.

        The norm saves its input, and the statistics of each head on the rank, or one number for all queries and one for
        all keys. In the latter case, tensor ranks sum these numbers.
        """
        norm = self.attention.query_norm
        if norm is None:
            return self
        width, kind = norm.statistics
        own = target.own_heads(self.attention.num_heads) + target.own_heads(self.attention.num_kv_heads)
        own = 2 if norm.heads else own
        statistics = Value(f"{self.attention.name} head statistics", own * width, kind=kind)
        kept = replace(self, keeps=(*self.reads, statistics))
        if not norm.heads or not target.share_heads(1):
            return kept
        message = Message(Operation.ALL_REDUCE, own * target.tokens, kind=Kind.WIDE)
        return replace(kept, forward=(message,), backward=(message,))

    def passes(self, target: Target) -> Passes:
        """Bytes that the norm and the rotation read and write.

        If compiled, the norm and the rotation each read and write all queries and keys once. Uncompiled, each of them
        reads and writes all queries and keys three times.
        """
        times = (self.attention.query_norm is not None) + (self.attention.rotation is not None)
        heads = self.attention.num_heads + self.attention.num_kv_heads
        placed = target.own(target.tokens * heads * self.attention.head_size) * target.compute_bytes
        moved = (2 if target.compiled else 6) * times * placed
        return Passes(forward=moved, backward=moved)


@dataclass(frozen=True, kw_only=True)
class Gate(Pointwise):
    """Multiply the result of attention by the sigmoid of the gates."""

    def passes(self, target: Target) -> Passes:
        """Bytes that the gate reads and writes.

        If compiled, the forward pass reads two tensors and writes one, and the backward pass reads three and writes
        two. Uncompiled, the forward pass reads and writes five tensors in total, and the backward pass eleven.
        """
        inner = self.gives[0].bytes(target)
        forward, backward = (3, 5) if target.compiled else (5, 11)
        return Passes(forward=forward * inner, backward=backward * inner)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the sigmoid, and of three gradients: of the result, of the heads and of the gates."""
        del inside
        return 4 * self.gives[0].bytes(target)


@dataclass(frozen=True, kw_only=True)
class Attend(Step):
    """Core of attention: scores, softmax, dropout and the weighted sum of values."""

    attention: Core

    def on(self, target: Target) -> Step:
        """Return the step with the values that the target's kernel saves for the backward pass.

        A fused kernel saves its inputs, its result, and the log-sum-exps of the scores. If no fused kernel of the GPU
        can share key-value heads, keys and values are repeated for each query head, and the repeated tensors are saved.

        Without a fused kernel, scores, softmax and mask are saved in float32 or wider, and so are copies of queries,
        keys and values. The CPU has no fused kernel with dropout.

        If context ranks share the sequences, the step sends messages. With `gather`, the keys and values of the whole
        sequence are saved. With `all_to_all`, the queries, keys and values of all tokens are saved, but only for a part
        of the heads.
        """
        forward, backward = context_messages(self.attention, target) if target.way else ((), ())
        padded = replace(self, reads=self._operands(target), forward=forward, backward=backward)
        if forward:
            return replace(padded, keeps=padded._kept_with_context(target))
        if not self.is_fused(target):
            return replace(padded, keeps=(*padded.reads, *padded._results(target), *self._unfused(target)))
        sums = Value(f"{self.attention.name} log-sum-exp", self.attention.num_heads, cut=True, kind=Kind.WIDE)
        operands = padded.reads
        if self._repeats_heads(target):
            repeated = Value(
                f"{self.attention.name} repeated keys and values",
                2 * self.attention.num_heads * self.attention.head_size,
                cut=True,
            )
            operands = (padded.reads[0], repeated)
        return replace(padded, keeps=(*operands, *padded._results(target), sums))

    def _operands(self, target: Target) -> tuple[Value, ...]:
        """The values that the step reads. If keys and values of different sizes must have the same width, they are
        padded before the step.
        """
        attention = self.attention
        exchanges = target.way is ContextAttention.ALL_TO_ALL
        if attention.head_size == attention.value_size or not (exchanges or len(set(attention.widths(target))) == 1):
            return self.reads
        return tuple(replace(value, width=attention.num_heads * attention.padded_size) for value in self.reads)

    def _results(self, target: Target) -> tuple[Value, ...]:
        """The result of the kernel and, if the kernel's result is wider, the result of the step."""
        _, width = self.attention.widths(target)
        if width == self.attention.value_size:
            return self.gives
        padded = replace(self.gives[0], name=f"{self.gives[0].name}, padded", width=self.attention.num_heads * width)
        return padded, *self.gives

    def _kept_with_context(self, target: Target) -> tuple[Value, ...]:
        """Values that attention over shared sequences saves for the backward pass."""
        attention = self.attention
        sums = Value(f"{attention.name} log-sum-exp", attention.num_heads, cut=True, kind=Kind.WIDE)
        inner = () if self.is_fused(target) else self._unfused(target)
        if target.way is ContextAttention.RING:
            return (*self.reads, *self._results(target), sums)
        if target.way is ContextAttention.ALL_TO_ALL:
            heads = sum(exchanged_heads(attention, target))
            if self._repeats_heads(target):
                heads = 3 * target.own_heads(attention.num_heads)
            exchanged = Value(f"{attention.name} exchanged heads", heads * attention.padded_size)
            before = replace(self._results(target)[0], name=f"{attention.name} attended heads")
            return (exchanged, before, *self.gives, sums, *inner)
        kv_heads = attention.num_heads if self._repeats_heads(target) else attention.num_kv_heads
        width = 2 * kv_heads * attention.head_size
        gathered = Value(f"{attention.name} gathered keys and values", width, Rows.SHARED, cut=True, heads=kv_heads)
        return (self.reads[0], gathered, *self.gives, sums, *inner)

    def repeats_of_keys(self, target: Target) -> int:
        """Number of query heads on one rank that share a key-value head."""
        return target.own_heads(self.attention.num_heads) // target.own_heads(self.attention.num_kv_heads)

    @property
    def is_core(self) -> bool:
        """True: `training.recompute = "selective"` runs the attention core again in the backward pass."""
        return True

    @property
    def repeated(self) -> tuple[Message, ...]:
        """Messages that recomputation of the attention core repeats: only the first message of the forward pass.

        With all-to-all attention, the forward pass has a second message. It sends the results of attention back, and
        the backward pass does not need these results again.
        """
        return self.forward[:1]

    def is_fused(self, target: Target) -> bool:
        """Whether one kernel computes attention without storing the scores."""
        return self.attention.is_fused(target)

    def skips_half(self, target: Target) -> bool:
        """Whether a fused kernel computes only half of the scores. A kernel cannot skip parts of a mask that it reads
        from memory.
        """
        return self.attention.is_causal and not self.attention.has_mask(target)

    def inner_products(self, target: Target) -> tuple[Product, ...]:
        """Products of one rank in one micro-batch: scores, [S, D] x [D, S], and weighted values, [S, S] x [S, V], for S
        tokens and heads of D elements, with values of V elements.

        Each product runs once per sequence and head. If context ranks share the sequences, a rank computes the rows of
        its own tokens. With `all_to_all`, a rank computes all rows of a part of its heads instead, which takes the same
        number of FLOPs. With a block mask, each group of blocks has products of its own.
        """
        size, of_values = self.attention.widths(target)
        return tuple(
            product
            for queries, keys, heads in self.attention.scores(target)
            for product in (
                Product(queries, size, keys, target.sequences * heads),
                Product(queries, keys, of_values, target.sequences * heads),
            )
        )

    def passes(self, target: Target) -> Passes:
        """Bytes of the mask that fused attention reads, or of the scores that unfused attention reads and writes.

        Fused attention reads the mask once in each pass, because all heads of a sequence share the mask. The mask of
        documents has a row for each query, and the mask of padding has one row for all queries. Without a mask, the
        result is 0. With a block mask, keys and values of the blocks are read and written before each group's kernel,
        in the backward pass with their gradients.

        Unfused attention reads or writes all scores eight times in the forward pass: it writes the scores, applies the
        mask with a product and a sum, applies softmax, and reads the result. The backward pass reads or writes all
        scores nine times, four of these in matrix products. In each pass, dropout reads and writes the scores once
        more, and reads or writes the dropout mask once.
        """
        if self.attention.blocks is not None:
            copied = self._gathered(target, self.attention.blocks.num_pairs(target.length)) * target.compute_bytes
            return Passes(forward=2 * copied, backward=5 * copied)
        if self.is_fused(target):
            rows = target.length if target.document_mask or self.attention.is_causal else 1
            mask = target.tokens * rows * target.compute_bytes * self.attention.has_mask(target)
            return Passes(forward=mask, backward=mask)
        elements = target.tokens * target.own_heads(self.attention.num_heads) * target.length
        scores = elements * target.compute_bytes
        dropout = 2 * scores + elements if self.attention.dropout else 0
        return Passes(forward=8 * scores + dropout, backward=9 * scores + dropout)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradients that the backward pass of attention holds at the same time.

        A fused kernel holds the gradients of queries, keys, values and the result, `inside` bytes in total. Separate
        operators hold half as many bytes, plus the gradients of the scores. With a block mask, keys and values of the
        largest group and their gradients are held, too, and on GPUs four tensors of the size of its scores.
        """
        if (blocks := self.attention.blocks) is not None:
            pairs = max(len(group.keys) for group in blocks.groups(target.length))
            gathered = 2 * self._gathered(target, pairs) * target.compute_bytes
            heads = target.own_heads(self.attention.num_heads) // target.context
            scores = target.sequences * heads * pairs * blocks.block_size**2 * target.bytes_of(Kind.WIDE)
            return inside + gathered + (4 * scores if target.device == "cuda" else 0)
        if self.is_fused(target):
            return inside
        scores = target.tokens * target.own_heads(self.attention.num_heads) * target.length
        return inside // 2 + scores * target.bytes_of(Kind.WIDE)

    def _repeats_heads(self, target: Target) -> bool:
        """Whether keys and values are repeated for each query head before the kernel."""
        attention = self.attention
        heads, kv_heads = target.own_heads(attention.num_heads), target.own_heads(attention.num_kv_heads)
        if target.device != "cuda" or heads == kv_heads or attention.blocks is not None:
            return False
        return not takes_shared_heads(
            target.compute,
            head_size=attention.head_size,
            dropout=attention.dropout,
            capability=target.capability,
            masked=attention.has_mask(target),
        )

    def _gathered(self, target: Target, num_blocks: int) -> int:
        """Elements of the keys and values of `num_blocks` blocks of each sequence, on one rank."""
        attention = self.attention
        assert attention.blocks is not None
        heads = max(target.own_heads(attention.num_kv_heads) // target.context, 1)
        return 2 * target.sequences * heads * num_blocks * attention.blocks.block_size * attention.head_size

    def _unfused(self, target: Target) -> tuple[Value, ...]:
        attention = self.attention
        scores = Value(
            f"{attention.name} scores, softmax and mask",
            3 * attention.num_heads * target.length,
            cut=True,
            kind=Kind.WIDE,
        )
        queries, keys = target.own_heads(attention.num_heads), target.own_heads(attention.num_kv_heads)
        size, of_values = attention.widths(target)
        widened = Value(
            f"{attention.name} wide operands", (queries + keys) * size + keys * of_values, kind=Kind.WIDENING
        )
        return scores, widened
