"""The fused output projection and loss against `F.cross_entropy` of the full logits."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crosscut.config import ConfigError, Layout, LayoutError, padded_vocab_size
from crosscut.kernels import LossPasses
from crosscut.parallel import (
    IGNORED,
    CollectiveRecorder,
    LossSettings,
    copy_to_tensor_parallel,
    make_mesh,
    vocab_parallel_cross_entropy,
)
from crosscut.parallel.cross_entropy import loss_chunk
from tests.parallel.twins import CLOSE, CPU, each, joined
from tests.ranks import RankPool

N, H, V = 13, 8, 300
SIZES = [1, 2, 4]  # with four ranks one holds real rows and padding, and one only padding


def _example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the vocabulary's rows, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[:4] = torch.tensor([0, 127, 128, V - 1])  # the parts' edges
    targets[5] = targets[12] = IGNORED
    return hidden.to(dtype), weight.to(dtype), targets


def _loss(
    tensor: int, hidden: Tensor, weight: Tensor, targets: Tensor, options: dict[str, Any], padding: float = 0.0
) -> dict[str, Any]:
    """On a rank: loss, gradients, and what was sent. `padding`: what the padded rows hold. `options` are those of
    `LossSettings`: a bias is that of the whole vocabulary, and if `passes` is true, the passes are compiled.
    """
    axis, options = (mesh := make_mesh(Layout(tensor=tensor), CPU)).tensor, dict(options)

    def own(whole: Tensor) -> Tensor:
        missing = [0, 0] * (whole.dim() - 1) + [0, padded_vocab_size(V, tensor) - V]
        return F.pad(whole, missing, value=padding).chunk(tensor)[axis.rank].clone().requires_grad_()

    leaves = {"hidden": hidden.clone().requires_grad_(), "weight": own(weight)}
    if "bias" in options:
        leaves["bias"] = options["bias"] = own(options["bias"])
    if options.get("passes"):
        torch._dynamo.reset()
        options["passes"] = LossPasses(partial(torch.compile, fullgraph=True, backend="aot_eager"))
    with CollectiveRecorder(mesh) as forward:
        loss = vocab_parallel_cross_entropy(
            copy_to_tensor_parallel(leaves["hidden"], axis), leaves["weight"], targets,
            vocab_size=V, axis=axis, settings=LossSettings(**options)
        )  # fmt: skip
    with CollectiveRecorder(mesh) as backward:
        loss.backward()
    sent = [list(recorder.sent) for recorder in (forward, backward)]
    return {"loss": loss.detach(), "sent": sent, **{name: leaf.grad for name, leaf in leaves.items()}}


@pytest.mark.slow  # compiles; the test of the bias compiles the same passes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.parametrize("more", [{}, {"z_loss": 0.05, "soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize(("tensor", "dtype"), [(1, torch.bfloat16), (4, torch.float64)])
def test_compiled_passes_give_and_send_the_same(
    ranks: RankPool, tensor: int, dtype: torch.dtype, more: dict[str, float]
) -> None:
    plain, compiled = (
        ranks.run(tensor, _loss, tensor, *_example(dtype), {"scale": scale, "chunk_tokens": 4, **more, **passes}, 1e6)
        for scale, passes in ((0.3, {}), (torch.tensor(0.3, dtype=torch.float64), {"passes": True}))
    )
    tolerance = CLOSE if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-3}
    for result, expected in zip(compiled, plain, strict=True):
        assert result["sent"] == expected["sent"]
        for name in ("loss", "hidden", "weight"):
            torch.testing.assert_close(result[name], expected[name], **tolerance)


def _serial(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, scale: float = 1.0, bias: Tensor | None = None, **terms: float
) -> dict[str, Tensor]:
    """Loss of the full logits, with the `terms` `z_loss` and `soft_cap`, and its gradients."""
    given = {"hidden": hidden, "weight": weight, **({} if bias is None else {"bias": bias})}
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    logits = F.linear(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    if cap := terms.get("soft_cap"):
        logits = cap * torch.tanh(logits / cap)
    loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    loss = loss + terms.get("z_loss", 0.0) * logits.logsumexp(1)[targets != IGNORED].square().sum()
    (scale * loss).backward()
    return {"loss": scale * loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _assert_loss(results: Sequence[dict[str, Any]], expected: dict[str, Tensor]) -> None:
    """The results of all ranks are these, and padding gets no gradient."""
    for result in results:
        for name in ("loss", "hidden"):
            torch.testing.assert_close(result[name], expected[name], **CLOSE)
    for name in expected.keys() - {"loss", "hidden"}:
        whole = joined([result[name] for result in results], 0)
        torch.testing.assert_close(whole[:V], expected[name], **CLOSE)
        assert torch.count_nonzero(whole[V:]) == 0


@pytest.mark.parametrize("tensor", SIZES)
def test_it_is_the_cross_entropy_of_the_full_logits(ranks: RankPool, tensor: int) -> None:
    """Also where padding would win."""
    cases = [
        (tensor, *_example(), {"scale": 0.3, "chunk_tokens": chunk_tokens}, 1e6)
        for chunk_tokens in (None, 1, 4, 13, 1000)
    ]
    for results in zip(*ranks.run(tensor, each, _loss, cases), strict=True):
        _assert_loss(results, _serial(*_example(), scale=0.3))


BIAS = torch.linspace(-2, 2, V, dtype=torch.float64).sin()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.parametrize(
    ("tensor", "is_compiled"),
    [
        (2, False),
        (2, True),  # the quick test here that compiles
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, False), (4, False), (1, True), (4, True))),
    ],
)
def test_a_bias_is_added_to_the_logits_of_the_rank_that_holds_it(
    ranks: RankPool, tensor: int, is_compiled: bool
) -> None:
    options = {"scale": 0.3, "bias": BIAS, "chunk_tokens": 4, "passes": is_compiled or None}
    results = ranks.run(tensor, _loss, tensor, *_example(), options, 1e6)
    _assert_loss(results, _serial(*_example(), scale=0.3, bias=BIAS))


def test_a_narrow_bias_keeps_its_loss(ranks: RankPool) -> None:
    exact, rough = (
        ranks.run(2, _loss, 2, *_example(dtype), {"bias": BIAS.to(dtype)})[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert float(rough["loss"]) == pytest.approx(float(exact["loss"]), rel=1e-2)
    assert rough["bias"].dtype == torch.bfloat16


Z_LOSS, CAP = 0.05, 2.0


@pytest.mark.parametrize("tensor", SIZES)
def test_z_loss_and_soft_cap_are_those_of_the_full_logits(ranks: RankPool, tensor: int) -> None:
    options = [{"z_loss": Z_LOSS}, {"soft_cap": CAP}, {"z_loss": Z_LOSS, "soft_cap": CAP}]
    cases = [(tensor, *_example(), {"chunk_tokens": 4, **chosen}, 1e6) for chosen in options]
    for chosen, results in zip(options, zip(*ranks.run(tensor, each, _loss, cases), strict=True), strict=True):
        _assert_loss(results, _serial(*_example(), **chosen))
        for result in results:
            assert sum(sent.elements for sent in result["sent"][0]) == 3 * N * (tensor > 1), "no message of their own"


def _assert_near(result: dict[str, Any], expected: dict[str, Tensor], of_loss: float, **of_hidden: float) -> None:
    """In 16 or 32 bits: the loss to `of_loss`, and the gradients of the hidden states to `of_hidden`."""
    torch.testing.assert_close(result["loss"].double(), expected["loss"], rtol=of_loss, atol=0.0)
    torch.testing.assert_close(result["hidden"].double(), expected["hidden"], **of_hidden)


def test_z_loss_and_soft_cap_in_16_bits(ranks: RankPool) -> None:
    hidden, weight, targets = _example()
    options = {"z_loss": Z_LOSS, "soft_cap": CAP}
    for result in ranks.run(2, _loss, 2, hidden.bfloat16(), weight.float(), targets, options):
        _assert_near(result, _serial(hidden, weight, targets, **options), 1e-2, rtol=0.0, atol=0.1)


def test_scale_on_the_device_is_the_scale(ranks: RankPool) -> None:
    """Bit for bit, also one of a wider type."""
    hidden, weight, targets = _example()
    for dtype in (torch.float32, torch.float64):
        given = (hidden.to(dtype), weight.to(dtype), targets)
        number, scalar = (
            ranks.run(2, _loss, 2, *given, {"scale": scale})
            for scale in (1.0 / 3.0, torch.tensor(1.0 / 3.0, dtype=torch.float64))
        )
        for one, other in zip(number, scalar, strict=True):
            assert other["loss"].dtype == dtype
            assert all(torch.equal(one[name], other[name]) for name in ("loss", "hidden", "weight"))


def test_ignored_targets_add_nothing(ranks: RankPool) -> None:
    hidden, weight, _ = _example()
    for result in ranks.run(2, _loss, 2, hidden, weight, torch.full((N,), IGNORED), {}):
        assert result["loss"] == 0.0
        assert torch.count_nonzero(result["hidden"]) == 0
        assert torch.count_nonzero(result["weight"]) == 0


def test_large_logits_are_stable(ranks: RankPool) -> None:
    hidden, weight, targets = _example()
    expected = _serial(1e4 * hidden, weight, targets)
    for result in ranks.run(2, _loss, 2, (1e4 * hidden).float(), weight.float(), targets, {}):
        _assert_near(result, expected, 1e-5, rtol=1e-4, atol=1e-4)


def test_a_float32_weight_beside_bfloat16_hidden_states(ranks: RankPool) -> None:
    hidden, weight, targets = _example()
    expected = _serial(hidden, weight, targets)
    results = ranks.run(2, _loss, 2, hidden.bfloat16(), weight.float(), targets, {"chunk_tokens": 5})
    for result in results:
        assert [result[name].dtype for name in ("loss", "hidden", "weight")] == [
            torch.float32, torch.bfloat16, torch.float32
        ]  # fmt: skip
        _assert_near(result, expected, 1e-2, rtol=0.0, atol=0.1)
    together = joined([r["weight"] for r in results], 0)[:V].double()
    torch.testing.assert_close(together, expected["weight"], rtol=0.0, atol=0.05)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_three_elements_per_token_are_sent_and_none_per_entry(ranks: RankPool, chunk_tokens: int | None) -> None:
    results = ranks.run(2, _loss, 2, *_example(), {"chunk_tokens": chunk_tokens})
    forward, backward = results[0]["sent"]
    assert {(sent.operation, sent.axis) for sent in forward} == {("all_reduce", "tensor")}
    assert sum(sent.elements for sent in forward) == 3 * N
    assert [sent.elements for sent in forward] == ([13, 26] if chunk_tokens is None else [4, 8] * 3 + [1, 2])
    assert backward == [("all_reduce", "tensor", N * H)]  # f's own


class _Allocations(TorchDispatchMode):
    """The largest tensor that an operator inside gives, and how many matrix products there are."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += "mm" in func.name()
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def _loss_within(
    mode: TorchDispatchMode, hidden: Tensor, weight: Tensor, vocab_size: int = V, tensor: int = 2, **settings: Any
) -> Tensor:
    """The loss of these hidden states and rows, computed within a mode. All targets are 0."""
    axis = make_mesh(Layout(tensor=tensor), CPU).tensor
    targets = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with mode:
        return vocab_parallel_cross_entropy(
            *leaves, targets, vocab_size=vocab_size, axis=axis, settings=LossSettings(**settings)
        )


def _largest_by_default(num_tokens: int, vocab_sizes: list[int]) -> list[int]:
    modes = [_Allocations() for _ in vocab_sizes]
    for mode, size in zip(modes, vocab_sizes, strict=True):
        hidden, weight = (torch.randn(rows, H, device="meta") for rows in (num_tokens, size))
        _loss_within(mode, hidden, weight, size, 1)
    return [mode.largest for mode in modes]


def test_logits_at_once_grow_with_the_vocabulary_to_a_bound_only(ranks: RankPool) -> None:
    small, *large = ranks.run(1, _largest_by_default, 2048, [4096, 16_384, 65_536, 262_144])[0]
    assert small == 2048 * 4096, "all tokens at once"
    assert large == [2**24] * 3


def test_a_compiled_loss_on_a_gpu_has_chunks_of_twice_the_tokens() -> None:
    with FakeTensorMode():
        hidden, weight = (torch.empty(rows, H, device="cuda") for rows in (2**14, 2**17))
        assert [loss_chunk(None, hidden, weight, compiled=compiled) for compiled in (False, True)] == [2**12, 2**13]


def _watch(chunk_tokens: int, grad: bool) -> tuple[int, int]:
    watched = _Allocations()
    with torch.set_grad_enabled(grad):
        loss = _loss_within(watched, torch.randn(64, H), torch.randn(256, H), chunk_tokens=chunk_tokens)
    assert loss.requires_grad == grad
    return watched.largest, watched.products


def test_only_a_chunk_of_logits_is_there_at_once(ranks: RankPool) -> None:
    largest, products = ranks.run(2, _watch, 16, True)[0]
    assert largest == 16 * 256
    assert products == 4 * 3  # logits and two gradients, never the logits again


class _Live(TorchDispatchMode):
    """The most bytes that lived at once of the storages made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known | given:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result

    def _forget(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.live -= size


def _most_at_once(dtype: torch.dtype, passes: bool) -> list[float]:
    """For one chunk and for three, the peak of what is as large as a chunk, in chunks of 16-bit logits."""
    peaks = []
    for num_chunks in (1, 3):
        watched, own = _Live(), LossPasses(lambda function: function) if passes else None
        hidden, weight = torch.randn(256 * num_chunks, 4).to(dtype), torch.randn(8192, 4)
        _loss_within(watched, hidden, weight, 8192, 1, chunk_tokens=256, passes=own)
        peaks.append(watched.peak / (2 * 256 * 8192))
    return peaks


@pytest.mark.parametrize(("dtype", "passes", "most"), [
    (torch.float32, False, 2.1), (torch.bfloat16, False, 3.1), (torch.bfloat16, True, 7.0), (torch.float32, True, 8.1)
], ids=str)  # fmt: skip
def test_a_chunk_leaves_nothing_as_large_as_itself_to_the_next(
    ranks: RankPool, dtype: torch.dtype, passes: bool, most: float
) -> None:
    one, three = ranks.run(1, _most_at_once, dtype, passes)[0]
    assert three == pytest.approx(one, abs=0.05)
    assert most - 0.1 <= three <= most + 0.2


class _InPlace(TorchDispatchMode):
    """Mode that notes for each log-softmax whether it is written to the memory of the logits, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "log_softmax" in func.name():
            self.told.append(result.data_ptr() == args[0].data_ptr() and args[0].dtype == torch.float32)
        return result


def _softmax_in_place(dtype: torch.dtype) -> list[bool]:
    watched = _InPlace()
    _loss_within(watched, torch.randn(64, H).to(dtype), torch.randn(256, H), chunk_tokens=16)
    return watched.told


def test_softmax_takes_no_memory_of_its_own_in_any_precision(ranks: RankPool) -> None:
    cases = [(torch.float32,), (torch.bfloat16,), (torch.float16,)]
    assert ranks.run(2, each, _softmax_in_place, cases) == [[[True] * 4] * 3] * 2


def test_evaluation_computes_no_gradients(ranks: RankPool) -> None:
    assert ranks.run(2, _watch, 16, False)[0] == (16 * 256, 4)


def _twice() -> None:
    loss = _loss_within(_InPlace(), torch.ones(3, H), torch.zeros(256, H))
    loss.backward(retain_graph=True)
    loss.backward()


def test_going_backward_twice_is_refused(ranks: RankPool) -> None:
    message = (
        "^The loss of `vocab_parallel_cross_entropy` allows one backward pass, but a second backward pass has begun. "
        "Call `backward` once per loss.$"
    )
    with pytest.raises(RuntimeError, match=message):
        ranks.run(2, _twice)


def _call(num_targets: int, num_rows: int, target: int, options: dict[str, Any]) -> None:
    axis = make_mesh(Layout(tensor=2), CPU).tensor
    targets = torch.full((num_targets,), target)
    vocab_parallel_cross_entropy(
        torch.ones(4, H), torch.ones(num_rows, H), targets, vocab_size=V, axis=axis, settings=LossSettings(**options)
    )


NO_CHUNK = "^`chunk_tokens` must be at least 1, but is {}.$"
TOO_MANY_TARGETS = (
    r"^`targets` must hold one target for each row of `hidden` \(4\), but holds 8. Under sequence parallelism, "
    r"gather `hidden` first \(`enter_tensor_parallel`\).$"
)
TOO_FEW_ROWS = (
    r"^`weight` must hold at least 300 rows \(`vocab_size`\) on all ranks of the tensor axis together, but holds 128 "
    r"rows on each of 2 ranks. Pad the vocabulary \(`VocabParallelEmbedding` does\).$"
)
NO_TARGET = (
    "^Targets must be token ids from 0 to 299, or -100 for tokens that add nothing to the loss, but a target is "
    "another number. Tokenize with this model's tokenizer.$"
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((4, 256, 0, {"chunk_tokens": 0}), ConfigError, NO_CHUNK.format(0)),
        ((4, 256, 0, {"chunk_tokens": -4}), ConfigError, NO_CHUNK.format(-4)),
        ((8, 256, 0, {"chunk_tokens": 4}), LayoutError, TOO_MANY_TARGETS),
        ((4, 128, 0, {}), LayoutError, TOO_FEW_ROWS),
        ((4, 256, V, {}), RuntimeError, NO_TARGET),
        ((4, 256, -1, {}), RuntimeError, NO_TARGET),
    ],
)
def test_what_does_not_fit_is_refused(
    ranks: RankPool, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ranks.run(2, _call, *arguments)
