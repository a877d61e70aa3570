r"""Latent attention, with its heads divided over the tensor ranks (multi-head latent attention; DeepSeek-AI 2024, arXiv
2405.04434, section 2.1).

    X --> latent of the queries, norm --\           /--> queries Q_i of a rank's heads ---------------\
    X --> latent, norm -----------------+--> f -----+--> keys K_i without positions, and values V_i --+--> attend
    X --> shared part of the keys ------/           \--> shared part of the keys, rotated ------------/     |
                                                                                                   Z_i O_i --g--> sum

Every rank holds the down projections and the norms of the latents whole, and applies them outside of the parallel
region, to its part of the residual stream. The latents enter the region together (f), and the backward pass of f sums
the gradients of all ranks' heads, also those of the part of the keys that all heads share. Latents are narrower than
the stream, so f sends less than in other attention. If queries have no latent, the stream enters the region as well.

If context ranks gather, they gather the latents, and every rank computes the keys and values of whole sequences.
"""

from dataclasses import dataclass, replace

from crosscut.architecture.needs import PerToken, Share
from crosscut.architecture.parameters import ONES, Matrix, Parameter, Role, columns, rows, whole
from crosscut.architecture.steps import (
    Enter,
    Message,
    Multiply,
    Operation,
    Passes,
    Pointwise,
    Rows,
    Step,
    Value,
    enter,
    leave,
    multiply_columns,
    multiply_rows,
    multiply_whole,
)
from crosscut.architecture.sublayers.attention import Attend, Core
from crosscut.architecture.sublayers.norm import Norm
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig
from crosscut.config.model import NormKind
from crosscut.config.parts.latent_attention import LatentAttentionConfig


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention."""

    core: Core
    sizes: LatentAttentionConfig
    is_rotary: bool
    """Whether parts of queries and keys are rotated by their positions."""
    query_down: Matrix | None
    """Projection to the latent of the queries; None if queries are computed from the hidden states."""
    latent_down: Matrix
    """Projection to the latent of keys and values."""
    key: Matrix
    """Projection to the part of the keys that all heads share."""
    query_norm: Norm | None
    latent_norm: Norm
    query: Matrix
    key_value: Matrix
    """Projection from the latent. The rows are grouped by head: first the rows of a head's key, then of its value."""
    output: Matrix

    @classmethod
    def of(cls, model: ModelConfig, name: str) -> "LatentAttention":
        """Describe the latent attention of a model in the part `name`."""
        sizes, hidden, heads = model.latent_attention, model.hidden_size, model.num_heads
        rank, has_bias = sizes.query_rank, model.biases != "none"
        core = Core(
            name=name,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=sizes.head_size,
            value_size=sizes.value_size,
            dropout=model.dropout,
            is_causal=model.is_causal,
            score_factor=sizes.score_factor(model.rotary_factor, model.attention_multiplier),
            gathers=False,
        )
        expanded = heads * (sizes.nope_size + sizes.value_size)
        return cls(
            core=core,
            sizes=sizes,
            is_rotary=model.positions == "rotary",
            query_down=whole(f"{name}.down.query", hidden, rank, bias=has_bias) if rank else None,
            latent_down=whole(f"{name}.down.latent", hidden, sizes.key_value_rank, bias=has_bias),
            key=whole(f"{name}.down.key", hidden, sizes.rope_size, bias=has_bias),
            query_norm=_norm(f"{name}.query_norm", rank) if rank else None,
            latent_norm=_norm(f"{name}.latent_norm", sizes.key_value_rank),
            query=columns(f"{name}.query", rank or hidden, heads * sizes.head_size, bias=False),
            key_value=columns(f"{name}.key_value", sizes.key_value_rank, expanded, bias=False),
            output=rows(f"{name}.output", heads * sizes.value_size, hidden, bias=model.biases == "all"),
        )

    @property
    def name(self) -> str:
        """Name of the part, which is the prefix of all names."""
        return self.core.name

    def steps(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the sublayer's output, and the steps that compute the output from the input `x`."""
        name, heads = self.name, self.core.num_heads
        if self.query_down is None:
            entered, entering = enter(x, f"{name} input")
            query, by_query = multiply_columns(entered, self.query, name=f"{name} query", keeps=x)
            before: list[Step] = [entering, by_query]
            latents, down = self._latents(x)
        else:
            latents, down = self._latents(x)
            own = replace(latents, name=f"{name} entered query latent", width=self.sizes.query_rank)
            query, by_query = multiply_columns(own, self.query, name=f"{name} query", keeps=latents)
            before, down = [*down, by_query], []
        gathered = Value(f"{name} gathered latents", self.sizes.kept_size, Rows.KEYS)
        gather = GatherLatents(reads=(latents,), gives=(gathered,), name=f"{name} over context")
        expanded = Value(f"{name} key_value", self.key_value.out_features, Rows.KEYS, cut=True)
        expand = Expand(
            reads=(replace(gathered, name=f"{name} latent of keys", width=self.sizes.key_value_rank),),
            gives=(expanded,),
            parameters=self.key_value.parameters,
            matrix=self.key_value,
            latents=(latents, gathered),
        )
        widths = {"query": self.core.head_size, "key": self.core.head_size, "value": self.core.value_size}
        placed = tuple(
            Value(f"{name} placed {each}", heads * width, Rows.TOKENS if each == "query" else Rows.KEYS, cut=True)
            for each, width in widths.items()
        )
        place = PlaceHeads(reads=(query, gathered, expanded), gives=placed, attention=self)
        attended = Value(f"{name} attended", heads * self.core.value_size, cut=True)
        attend = Attend(reads=placed, gives=(attended,), name=f"{name} over context", attention=self.core)
        projected, project = multiply_rows(attended, self.output, name=f"{name} projected")
        left, leaving = leave(projected, f"{name} output", bias=self.output.bias)
        return left, [*before, *down, gather, expand, place, attend, project, leaving]

    def _latents(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the latents and the shared part of the keys inside the parallel region, and the steps that compute
        them.
        """
        parts, steps = [], []
        pairs = (("query", self.query_down, self.query_norm), ("latent", self.latent_down, self.latent_norm))
        for each, matrix, norm in (*pairs, ("key", self.key, None)):
            if matrix is None:
                continue
            y, multiply = multiply_whole(x, matrix, name=f"{self.name} down {each}")
            steps.append(multiply)
            if norm is not None:
                y, normalise = norm.step(f"{self.name} {each} norm", y)
                steps.append(normalise)
            parts.append(y)
        name = f"{self.name} latents"
        latents = Value(name, sum(part.width for part in parts))
        return latents, [*steps, Enter(reads=tuple(parts), gives=(latents,), name=name, overlaps=False)]

    @property
    def shares(self) -> frozenset[Share]:
        """The mask and, for queries and keys that are rotated, the rotation."""
        return frozenset({Share.MASK, Share.ROTATION} if self.is_rotary else {Share.MASK})

    def memory(self, target: Target) -> tuple[PerToken, ...]:
        """Return the latent and the shared part of the keys, which every rank keeps."""
        del target
        return (PerToken("latents", 1, self.sizes.kept_size),)


def _norm(name: str, size: int) -> Norm:
    weight = Parameter(name=f"{name}.weight", shape=(size,), role=Role.NORM, start=ONES)
    return Norm(size, NormKind.RMS, (weight,), inside=False)


@dataclass(frozen=True, kw_only=True)
class GatherLatents(Step):
    """Rotation of the shared part of the keys and, if context ranks gather, the gather of the latents."""

    def on(self, target: Target) -> Step:
        """Return the step with its messages."""
        if not target.gathers:
            return self
        elements = self.gives[0].elements(target)
        return replace(
            self,
            forward=(Message(Operation.ALL_GATHER, elements, axis="context"),),
            backward=(Message(Operation.REDUCE_SCATTER, elements, axis="context"),),
        )


@dataclass(frozen=True, kw_only=True)
class Expand(Multiply):
    """Product of the latents of keys and values with a column-parallel matrix."""

    latents: tuple[Value, Value]
    """The latents of this rank's tokens, and those that context ranks may gather."""

    def on(self, target: Target) -> Step:
        """Return the step with the latents that it saves for the backward pass."""
        (own, gathered), (expanded,) = self.latents, self.gives
        low: tuple[Value, ...] = ()
        if (adapter := self.matrix.adapter) is not None:
            low = (Value(f"{expanded.name}, low rank", adapter.down.shape[0], expanded.rows),)
        return replace(self, keeps=(gathered if target.gathers else own, *low))


@dataclass(frozen=True, kw_only=True)
class PlaceHeads(Pointwise):
    """Rotation of the queries, and queries, keys and values as attention reads them: keys get the shared part, and
    values a tensor of their own.
    """

    attention: LatentAttention

    def passes(self, target: Target) -> Passes:
        """Bytes that the step reads and writes. Each result is written once and what it is made of is read once.
        Uncompiled, the rotation reads and writes the rotated part of the queries three times more.
        """
        results = sum(value.bytes(target) for value in self.gives)
        rotated = self.gives[0].bytes(target) * self.attention.sizes.rope_size // self.attention.core.head_size
        again = 0 if target.compiled or not self.attention.is_rotary else 6 * rotated
        return Passes(forward=2 * results + again, backward=2 * results + again)
