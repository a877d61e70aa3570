r"""Mixture of experts: a router chooses some of many MLPs for each token (Shazeer et al. 2017, arXiv 1701.06538).

    X --f--> logits --> scores --> chosen experts, weights w ---\
    X --f--> rows sorted by expert --> X G_e, X U_e --> w act(X G_e) * X U_e --> times B_e --> sum of each token --g-->
    X --f--> shared MLP ------------------------------------------------------------------------------------/

Everything is inside one parallel region. Every tensor rank has all tokens and computes the same scores. It has a part
of each expert's columns, so its rows are summands, and g sums them. Weights multiply the activation and not the result,
so that the results of the experts need not be saved. The gradients of the router are partial on each rank.

The terms of the loss are computed inside the region, the same on all ranks. Their gradients count once.

Legend: E experts, K experts of a token, F width of an expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from crosscut.architecture.inputs import LossTerm
from crosscut.architecture.parameters import Cut, Matrix, Parameter, Role
from crosscut.architecture.steps import (
    Enter,
    Message,
    Multiply,
    Operation,
    Passes,
    Pointwise,
    Product,
    Rows,
    Step,
    Value,
    enter,
    leave,
)
from crosscut.architecture.sublayers.gated_mlp import GatedMLP
from crosscut.architecture.sublayers.mlp import MLP, EachToken
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig
from crosscut.config.model import Biases
from crosscut.config.parts.experts import ExpertsConfig, Scores
from crosscut.config.parts.kinds import gated

BALANCE, ROUTER_Z = "balance", "router_z"
"""Names of the terms of the loss."""
LOAD, ENTROPY = "load", "entropy"
"""Names of the figures: the number of rows of each expert, and the sum of the entropies of the tokens' scores."""


@dataclass(frozen=True)
class Experts(EachToken):
    """Mixture of experts."""

    name: str
    """Name of the part, which is the prefix of all names."""
    sizes: ExpertsConfig
    router: Parameter
    """Weight of the router: a row for each expert."""
    bias: Parameter | None
    """Bias of each expert's score, which balances the loads; None without."""
    expand: tuple[Parameter, ...]
    """First matrices of all experts: gate and up, or one matrix without a gate."""
    contract: Parameter
    """Last matrices of all experts."""
    shared: MLP | GatedMLP | None
    """MLP of all tokens."""
    shared_gate: Parameter | None
    """Weight of the gate of `shared`."""

    @classmethod
    def of(cls, model: ModelConfig, name: str) -> "Experts":
        """Describe the experts of a model in the part `name`."""
        sizes, hidden = model.experts, model.hidden_size
        number = sizes.number

        def stacked(of: str, outputs: int, inputs: int, role: Role, cut: Cut) -> Parameter:
            shape = (number, outputs, inputs)
            return Parameter(name=f"{name}.{of}", shape=shape, role=role, cut=cut, stacked=number)

        router = Parameter(
            name=f"{name}.router.weight", shape=(number, hidden), role=Role.MATRIX, inside=True, is_wide=True
        )
        bias = Parameter(name=f"{name}.router.bias", shape=(number,), role=Role.BALANCE, is_wide=True, is_frozen=True)
        names = ("gate", "up") if gated(sizes.mlp) else ("expand",)
        gate = replace(router, name=f"{name}.shared_gate.weight", shape=(1, hidden))
        return cls(
            name=name,
            sizes=sizes,
            router=router,
            bias=bias if sizes.balance_bias else None,
            expand=tuple(stacked(each, sizes.size, hidden, Role.MATRIX, Cut.COLUMNS) for each in names),
            contract=stacked("contract", hidden, sizes.size, Role.BEFORE_RESIDUAL, Cut.ROWS),
            shared=_shared(model, f"{name}.shared") if sizes.shared_size else None,
            shared_gate=gate if sizes.shared_gate else None,
        )

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """Loss that balances the loads, and loss of the router's logits."""
        coefficients = {BALANCE: self.sizes.balance_loss, ROUTER_Z: self.sizes.router_z_loss}
        return tuple(LossTerm(name, "tokens", factor) for name, factor in coefficients.items() if factor)

    @property
    def figures(self) -> Mapping[str, int]:
        """Loads of the experts, and the entropy of the scores."""
        return {LOAD: self.sizes.number, ENTROPY: 1}

    def steps(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the sublayer's output, and the steps that compute the output from the input `x`."""
        name, sizes = self.name, self.sizes
        entered, _ = enter(x, f"{name} input")
        entering = EnterWhole(reads=(x,), gives=(entered,), name=f"{name} input", overlaps=False)
        logits = Value(f"{name} logits", sizes.number, kind=Kind.WIDE)
        weights = Value(f"{name} weights", 1, Rows.ROUTED, copies=sizes.per_token, kind=Kind.WIDE)
        ends = Value(f"{name} ends of groups", sizes.number, Rows.ONE, kind=Kind.POSITION)
        choose = Choose(
            reads=(logits,),
            gives=(weights, ends),
            parameters=() if self.bias is None else (self.bias,),
            name=f"{name} loads of sequences",
            experts=self,
        )
        rows = replace(weights, name=f"{name} rows", width=x.width, kind=Kind.COMPUTE)
        spread = Move(reads=(entered,), gives=(rows,), keeps=(_index(f"{name} rows of tokens", weights),))
        received, own = (replace(each, name=f"{each.name} received", rows=Rows.RECEIVED) for each in (rows, weights))
        send = Exchange(reads=(rows, weights), gives=(received, own), name=f"{name} rows", counts=sizes.number)
        inner, expanding = self._expanded(received, ends)
        activated = replace(received, name=f"{name} activated", width=sizes.size, cut=True, is_cheap=True)
        weigh = Weigh(reads=(*inner, own), gives=(activated,), keeps=(*inner, own))
        contracted = replace(received, name=f"{name} contracted")
        contract = _multiply_each(activated, self.contract, gives=contracted, ends=ends)
        returned = replace(rows, name=f"{name} returned")
        give_back = Exchange(reads=(contracted,), gives=(returned,), name=f"{name} results")
        mixed = Value(f"{name} mixed", x.width)
        collect = Move(reads=(returned,), gives=(mixed,), keeps=(_index(f"{name} tokens of rows", weights),))
        summed, shared = self._with_shared(entered, mixed)
        left, leaving = leave(summed, f"{name} output")
        routing = [entering, _multiply_wide(entered, self.router, logits), choose, spread, send]
        return left, [*routing, *expanding, weigh, contract, give_back, collect, *shared, leaving]

    def _expanded(self, rows: Value, ends: Value) -> tuple[list[Value], list[Step]]:
        """Return the products of the rows with the first matrices, and the steps."""
        inner = [replace(rows, name=f"{each.name} product", width=self.sizes.size, cut=True) for each in self.expand]
        pairs = zip(self.expand, inner, strict=True)
        return inner, [_multiply_each(rows, weight, gives=each, ends=ends) for weight, each in pairs]

    def _with_shared(self, entered: Value, mixed: Value) -> tuple[Value, list[Step]]:
        """Return the sum of `mixed` and the shared MLP, and the steps that compute it."""
        if self.shared is None:
            return mixed, []
        result, steps = self.shared.inside(entered, keeps=entered)
        if self.shared_gate is not None:
            logit = Value(f"{self.name} gate of shared", 1, kind=Kind.WIDE)
            gate = replace(logit, name=f"{logit.name}, sigmoid")
            multiply = _multiply_wide(entered, self.shared_gate, logit)
            apply = Pointwise(reads=(logit,), gives=(gate,), keeps=(gate,))
            steps = [multiply, apply, *steps]
        total = replace(mixed, name=f"{self.name} mixed and shared")
        return total, [
            *(_without_input(step, entered) for step in steps),
            Pointwise(reads=(mixed, result), gives=(total,)),
        ]


def _shared(model: ModelConfig, name: str) -> MLP | GatedMLP:
    sizes = model.experts
    plain = replace(model, mlp_size=sizes.shared_size, biases=Biases.NONE)
    return (GatedMLP if gated(sizes.mlp) else MLP).of(plain, name, sizes.mlp)


def _without_input(step: Step, entered: Value) -> Step:
    """Return a step that does not save the input of the region, which `EnterWhole` saves."""
    return replace(step, keeps=tuple(value for value in step.keeps if value != entered))


def _index(name: str, like: Value) -> Value:
    return replace(like, name=name, kind=Kind.POSITION)


def _multiply_wide(x: Value, weight: Parameter, gives: Value) -> Step:
    """Describe a product in float32 or wider with a weight that every rank holds whole."""
    return Multiply(reads=(x,), gives=(gives,), parameters=(weight,), matrix=Matrix(weight))


def _multiply_each(x: Value, weight: Parameter, *, gives: Value, ends: Value) -> Step:
    """Describe the products of each expert's rows with its matrix."""
    return MultiplyEach(reads=(x, ends), gives=(gives,), keeps=(x, ends), parameters=(weight,), matrix=Matrix(weight))


@dataclass(frozen=True, kw_only=True)
class EnterWhole(Enter):
    """f, for products that save their input inside the region. If the layout splits the sequence, each rank saves the
    gathered tokens, and gathers them once.
    """

    def on(self, target: Target) -> Step:
        """Return the step with its messages and the value that it saves."""
        kept = replace(self.gives[0], is_cheap=False) if target.split else self.reads[0]
        return replace(super().on(target), keeps=(kept,))


@dataclass(frozen=True, kw_only=True)
class MultiplyEach(Multiply):
    """Matrix product of each expert's rows with its own matrix, in one operator."""

    @property
    def defers(self) -> bool:
        """False: the gradients of all experts' matrices are computed at once, in the backward pass."""
        return False

    def is_in_eight_bits(self, target: Target) -> bool:
        """False: experts multiply in bfloat16 in every run."""
        del target
        return False

    def products(self, target: Target) -> tuple[Product, ...]:
        """The forward product on one rank, in a group for each of the rank's experts that can have a row."""
        (product,) = super().products(target)
        experts, *_ = self.matrix.weight.on(target).shape
        return (product._replace(groups=min(experts, product.m)),)


@dataclass(frozen=True, kw_only=True)
class Choose(Step):
    """Scores of the experts, the choice of each token's experts, and the terms of the loss. If context ranks share the
    sequences, the loss that balances loads needs the loads of whole sequences.
    """

    experts: Experts

    def on(self, target: Target) -> Step:
        """Return the step with the values that it saves, and the message over the context ranks."""
        sizes, of_tokens = self.experts.sizes, replace(self.reads[0], name=f"{self.experts.name} scores")
        of_choices = replace(of_tokens, name=f"{self.experts.name} choices", width=sizes.per_token)
        slots = _index(f"{self.experts.name} places of rows", self.gives[0])
        keeps = [of_tokens, replace(of_choices, kind=Kind.POSITION), slots]
        total = replace(of_tokens, name=f"{self.experts.name} sum of scores", width=1)
        if sizes.renormalise:
            chosen = replace(of_choices, name=f"{self.experts.name} chosen scores")
            keeps += [chosen, replace(total, name=f"{chosen.name}, sum")]
        is_balanced = any(term.name == BALANCE for term in self.experts.terms)
        loads = replace(of_tokens, name=self.name, rows=Rows.SEQUENCES)
        if is_balanced:
            keeps += [loads, *([total] if sizes.scores is Scores.SIGMOID else [])]
        if sizes.router_z_loss:
            keeps += [self.reads[0], replace(total, name=f"{self.reads[0].name}, log-sum-exp")]
        message = Message(Operation.ALL_REDUCE, loads.elements(target), axis="context", kind=Kind.WIDE)
        is_sent = is_balanced and target.context > 1
        return replace(self, gives=(*self.gives, loads), keeps=tuple(keeps), forward=(message,) if is_sent else ())

    def passes(self, target: Target) -> Passes:
        """Bytes of the scores that the step reads and writes: logits, scores, choice, sums and their gradients."""
        scores = self.reads[0].bytes(target)
        return Passes(forward=6 * scores, backward=6 * scores)


@dataclass(frozen=True, kw_only=True)
class Move(Pointwise):
    """Copy of tokens to the rows of their experts, or sum of the rows of each token."""

    def passes(self, target: Target) -> Passes:
        """Bytes that the step reads and writes: each row once on both sides. The sum of rows first copies them."""
        rows = max(value.bytes(target) for value in (self.reads[0], self.gives[0]))
        return Passes(forward=2 * rows, backward=2 * rows)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradients of the rows, and of their copy in the order of the tokens."""
        del inside
        return 2 * max(value.bytes(target) for value in (self.reads[0], self.gives[0]))


@dataclass(frozen=True, kw_only=True)
class Exchange(Step):
    """Exchange of rows between the ranks that share the experts: to the ranks of the experts, or back. Ranks send as
    many rows as they receive only if all loads are even; the sum over the ranks is the same for all loads. All ranks
    wait for the fullest one, so a message counts the rows on that side on which it has more. With one expert rank, the
    step does nothing.
    """

    counts: int = 0
    """Number of experts whose numbers of rows the ranks exchange first; 0 on the way back."""

    def on(self, target: Target) -> Step:
        """Return the step with its messages, and the places of the received rows, which it saves."""
        if target.expert == 1:
            return self
        sent = tuple(_exchanged(value.elements(target), value.kind) for value in self._larger(target))
        if not self.counts:
            return replace(self, forward=sent, backward=sent[::-1])
        places = tuple(_index(f"{self.name}, {of}", self.gives[1]) for of in ("order", "places"))
        return replace(self, forward=(_exchanged(self.counts, Kind.POSITION), *sent), backward=sent[::-1], keeps=places)

    def passes(self, target: Target) -> Passes:
        """Bytes that the step reads and writes: each row once on both sides, to sort the rows."""
        moved = 0 if target.expert == 1 else 2 * sum(value.bytes(target) for value in self._larger(target))
        return Passes(forward=moved, backward=moved)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradients of the rows before and after they are sent; 0 with one expert rank."""
        del inside
        return 0 if target.expert == 1 else 2 * self._larger(target)[0].bytes(target)

    def _larger(self, target: Target) -> tuple[Value, ...]:
        """Values on that side of the exchange on which the fullest rank has more rows."""
        return max(self.reads, self.gives, key=lambda values: values[0].num_rows(target))


def _exchanged(elements: int, kind: Kind) -> Message:
    return Message(Operation.ALL_TO_ALL, elements, axis="expert", kind=kind)


@dataclass(frozen=True, kw_only=True)
class Weigh(Pointwise):
    """Activation inside the experts, times the weight of each row."""

    def passes(self, target: Target) -> Passes:
        """Bytes that the step reads and writes. Compiled, each tensor is read or written once, in the forward pass and
        in the backward pass, with its gradient. Uncompiled, each operator reads and writes tensors of this size.
        """
        row = self.gives[0].bytes(target)
        inputs = len(self.reads) - 1
        if target.compiled:
            return Passes(forward=(inputs + 1) * row, backward=(2 * inputs + 1) * row)
        return Passes(forward=(3 * inputs + 2) * row, backward=(7 * inputs + 5) * row)

    def temporary(self, target: Target, inside: int) -> int:
        """Bytes of the gradients of the result and of the inputs, of the activation, its gradient and a product."""
        del inside
        return (len(self.reads) + 3) * self.gives[0].bytes(target)
