"""Embeddings of tokens (sharded along the vocabulary), of learned positions (paper, sections 2.2 and 3) and of token
types (Devlin et al. 2018, arXiv 1810.04805, Figure 2). The sum of these embeddings may pass through a norm.

E_i are the embeddings that rank i looks up, with zeros for tokens whose rows other ranks hold. g sums E_i over all
ranks:

    E_i = rows that rank i holds, zero for tokens of other ranks
    x = g(E_i) + positions + types, then norm and dropout
"""

from dataclasses import dataclass, replace

from crosscut.architecture import needs
from crosscut.architecture.inputs import Read
from crosscut.architecture.parameters import Cut, Parameter, Role
from crosscut.architecture.steps import Message, Operation, Pointwise, Rows, Step, Value, leave
from crosscut.architecture.sublayers.norm import Norm, stream_norm
from crosscut.architecture.sublayers.residual import Draw, Drop, dropout_mask
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig
from crosscut.config.layout import ContextAttention


@dataclass(frozen=True)
class Embedding:
    """Embedding of token ids and, if the model has them, of learned positions and of token types. Some models then
    apply a norm. Dropout comes last.
    """

    tokens: Parameter
    positions: Parameter | None
    token_types: Parameter | None
    norm: Norm | None
    dropout: float
    multiplier: float
    """Factor of the tokens' rows."""
    rotated: int
    """Elements of a head that rotary positions rotate; 0 if the model learns positions."""
    window: int
    """Number of tokens to which a token attends in layers with a sliding window."""
    is_causal: bool
    """Whether attention is causal."""
    hides_padding: bool
    """Whether attention has a mask of padding, as bidirectional attention has, and causal attention for some heads."""
    shares: frozenset[needs.Share]
    """Shared tensors that the layers read."""

    @classmethod
    def of(cls, model: ModelConfig, shares: frozenset[needs.Share]) -> "Embedding":
        """Describe the embedding of a model whose layers read the shared tensors `shares`."""
        hidden = model.hidden_size
        tokens = Parameter(
            name="tokens.weight",
            shape=(model.vocab_size, hidden),
            role=Role.EMBEDDING,
            cut=Cut.VOCABULARY,
            padded_to=model.vocab_multiple,
            num_inputs=hidden if model.tied else 1,
        )
        learns, num_inputs = model.positions == "learned", tokens.num_inputs
        return cls(
            tokens=tokens,
            positions=_whole("positions", (model.max_sequence_length, hidden), num_inputs) if learns else None,
            token_types=_whole("token_types", (model.token_types, hidden), num_inputs) if model.token_types else None,
            norm=stream_norm(model, "embedding_norm") if model.norms_embedding else None,
            dropout=model.dropout,
            multiplier=model.embedding_multiplier,
            rotated=0 if learns else model.rotary_size,
            window=model.sliding_attention.window,
            is_causal=model.is_causal,
            hides_padding=not model.is_causal,
            shares=shares,
        )

    def reads(self, *, document_mask: bool) -> dict[str, Read]:
        """Fields of a batch, by name, from which the embedding and the tensors that all layers share are computed.
        Documents are fields only with `document_mask`. A model with a single token type reads no types.
        """
        num_types = 0 if self.token_types is None else self.token_types.shape[0]
        found = [Read("tokens", num_values=self.tokens.shape[0])]
        if document_mask:
            found += [Read("positions"), Read("documents")]
        if num_types > 1:
            found.append(Read("segments", num_values=num_types))
        if self.hides_padding:
            found.append(Read("mask"))
        return {read.name: read for read in found}

    def steps(self) -> tuple[Value, list[Step]]:
        """Return the first layer's input, and the steps that compute it from the token ids."""
        hidden = self.tokens.shape[1]
        index = Value("index of the embedding", 1, kind=Kind.INDEX)
        looked_up = Value("looked-up rows", hidden)
        look_up = LookUp(reads=(index,), gives=(looked_up,), keeps=(index,), parameters=(self.tokens,))
        x, leaving = leave(looked_up, "embedding", overlaps=False, is_frozen=self.tokens.is_frozen)
        steps: list[Step] = [look_up, leaving]
        if self.positions is not None:
            placed = replace(x, name="embedding with positions")
            steps.append(AddPositions(reads=(x,), gives=(placed,), parameters=(self.positions,)))
            x = placed
        if self.token_types is not None:
            typed = replace(x, name="embedding with token types")
            steps.append(AddTokenTypes(reads=(x,), gives=(typed,), keeps=(_INDEX,), parameters=(self.token_types,)))
            x = typed
        if self.norm is not None:
            normed, normalise = self.norm.step("embedding_norm", replace(x, rows=Rows.STREAM))
            steps.append(normalise)
            x = replace(normed, is_cheap=False)
        if self.dropout:
            mask = dropout_mask("embedding dropout mask", hidden)
            out = replace(x, name="input", rows=Rows.STREAM)
            steps += [Draw(gives=(mask,)), Drop(reads=(x, mask), gives=(out,), keeps=(mask,))]
            x = out
        share = Share(
            gives=(),
            name="documents",
            rotated=self.rotated,
            window=self.window,
            is_causal=self.is_causal,
            hides_padding=self.hides_padding,
            shares=self.shares,
        )
        return x, [*steps, share]


_INDEX = Value("token types", 1, Rows.STREAM, kind=Kind.POSITION)
"""Type of each token, an integer."""


def _whole(name: str, shape: tuple[int, int], num_inputs: int) -> Parameter:
    """Describe an embedding that every rank holds whole."""
    return Parameter(name=f"{name}.weight", shape=shape, role=Role.EMBEDDING, num_inputs=num_inputs)


@dataclass(frozen=True, kw_only=True)
class LookUp(Pointwise):
    """Look up the embedding rows that this rank holds."""


@dataclass(frozen=True, kw_only=True)
class AddPositions(Pointwise):
    """Add the learned position embeddings."""

    def on(self, target: Target) -> Step:
        """Return the step for a target. If positions restart at each document, each sequence has its own positions, and
        the step saves these positions for the backward pass. Otherwise, all sequences have the same positions, and the
        step saves nothing.
        """
        if not target.document_mask:
            return self
        return replace(self, keeps=(Value("positions", 1, Rows.STREAM, kind=Kind.POSITION),))


@dataclass(frozen=True, kw_only=True)
class AddTokenTypes(Pointwise):
    """Add the embeddings of the tokens' types. The step saves the types for its backward pass."""


@dataclass(frozen=True, kw_only=True)
class Share(Step):
    """Compute the tensors that all layers share: the mask of attention, and cosines and sines of rotary positions."""

    rotated: int
    window: int
    is_causal: bool
    hides_padding: bool
    shares: frozenset[needs.Share]

    def on(self, target: Target) -> Step:
        """Return this step with the tensors that the layers share. A rank holds these tensors until the backward pass
        of the first layer ends.

        If context ranks share the sequences, the ranks gather the document numbers. Without documents, the cosines and
        sines of one sequence serve all sequences.
        """
        masks = [mask for share in self._masked(target) for mask in self._masks(target, share)]
        if not target.document_mask:
            return replace(self, keeps=tuple(masks))
        numbers = Message(Operation.ALL_GATHER, target.shared_tokens, axis="context", kind=Kind.POSITION)
        readers = self.shares & {needs.Share.MASK, needs.Share.WINDOW_MASK, needs.Share.DOCUMENTS}
        rotations = [
            Value(share.value, 2 * self.rotated)
            for share in (needs.Share.ROTATION, needs.Share.WINDOW_ROTATION)
            if share in self.shares
        ]
        return replace(self, keeps=(*masks, *rotations), forward=(numbers,) if readers and target.way else ())

    def _masked(self, target: Target) -> list[needs.Share]:
        """Masks that layers read. A window of at least the sequence shares the mask of other layers."""
        plain, windowed = needs.Share.MASK, needs.Share.WINDOW_MASK
        if self.window >= target.length:
            return [plain] if self.shares & {plain, windowed} else []
        return [mask for mask in (plain, windowed) if mask in self.shares]

    def _masks(self, target: Target, share: needs.Share) -> tuple[Value, ...]:
        """The mask of attention, which is a value or nothing.

        Causal attention needs a mask only if the documents of a sequence are hidden from each other, or if padding is
        hidden. Bidirectional attention always has a mask, which hides padding: one row for all queries of a sequence,
        or, with documents, a row for each query. If context ranks share the sequences, the mask has one row for each
        query whose attention the rank computes. If the ranks also gather the keys, causal attention needs a mask even
        without documents, and so does attention with a window.
        """
        if share is needs.Share.WINDOW_MASK:
            return (self._of_window(target),)
        if target.document_mask:
            rows = Rows.SHARED if target.way is ContextAttention.ALL_TO_ALL else Rows.TOKENS
            return (Value("document mask", target.length, rows),)
        if self.is_causal and target.way is ContextAttention.GATHER:
            return (Value("mask of later keys", target.length, Rows.SEQUENCE),)
        return (Value("padding mask", target.length if self.is_causal else 1),) if self.hides_padding else ()

    def _of_window(self, target: Target) -> Value:
        """The mask of layers with a sliding window: a row for each query, or, if all sequences have the same rows, for
        each query of one sequence.
        """
        has_all_queries = target.way is ContextAttention.ALL_TO_ALL
        if target.document_mask or self.hides_padding:
            return Value("window mask", target.length, Rows.SHARED if has_all_queries else Rows.TOKENS)
        return Value("window mask", target.length * (target.context if has_all_queries else 1), Rows.SEQUENCE)
