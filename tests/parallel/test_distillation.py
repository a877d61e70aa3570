"""The teacher's part of the loss, against the full logits of both models: `F.kl_div`, and TRL's formula."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import IGNORED, Layout, padded_vocab_size
from crosscut.kernels.divergences import divergence, divergence_error_, partial_divergences
from crosscut.parallel import (
    CollectiveRecorder,
    Distillation,
    LossSettings,
    Mixture,
    TopLogits,
    copy_to_tensor_parallel,
    make_mesh,
    top_logits,
    vocab_parallel_cross_entropy,
)
from crosscut.parallel.distillation import VocabularyPart
from tests.parallel.twins import CLOSE, CPU, each, joined
from tests.ranks import RankPool

N, H, V = 13, 8, 300
FORWARD, JSD, REVERSE = 0.0, 0.3, 1.0


def _example() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the vocabulary's rows, the teacher's logits, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(7)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    hidden, weight, teacher = torch.randn(N, H, **draw), torch.randn(V, H, **draw), 2 * torch.randn(N, V, **draw)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[5] = targets[12] = IGNORED
    return hidden, weight, teacher, targets


def trl_loss(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of each token by TRL's formula (`GKDTrainer.generalized_jsd_loss`), which
    is a forward KL at 0 and a reverse KL at 1 as special cases, and has no factor for the temperature.
    """
    log_s, log_t = (F.log_softmax(logits / temperature, dim=-1) for logits in (student, teacher))
    if beta == 0:
        return F.kl_div(log_s, log_t, reduction="none", log_target=True).sum(-1)
    if beta == 1:
        return F.kl_div(log_t, log_s, reduction="none", log_target=True).sum(-1)
    weights = torch.tensor([1 - beta, beta], dtype=log_s.dtype).log()
    log_m = torch.logsumexp(torch.stack([log_s + weights[0], log_t + weights[1]]), dim=0)
    of_teacher, of_student = (F.kl_div(log_m, each, reduction="none", log_target=True) for each in (log_t, log_s))
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1)


def _outcomes(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log probabilities of the tokens `ids` [N, k] and of all others together, from full logits: [N, k + 1]."""
    log_p = F.log_softmax(logits / temperature, 1)
    rest = log_p.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_p.gather(1, ids), rest], 1)


def _serial(
    mixture: Mixture, *, z_loss: float = 0.0, soft_cap: float = 0.0, bias: Tensor | None = None, k: int = 0
) -> Any:
    """Loss of the full logits and its gradients, with TRL's formula divided by beta (1 - beta) between its ends. With
    `k`, the divergence is that of the teacher's k likeliest tokens and of all others together.
    """
    hidden, weight, teacher, targets = _example()
    leaves = {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_()}
    logits = F.linear(hidden, weight, bias)
    logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    kept = targets != IGNORED
    data = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    regular = z_loss * logits.logsumexp(1)[kept].square().sum()
    beta, heat = mixture.beta, mixture.temperature
    size = beta * (1 - beta) or 1.0
    if k:
        ids = teacher.topk(k).indices
        distances = trl_loss(_outcomes(logits, ids, heat), _outcomes(teacher, ids, heat), beta, 1.0)
    else:
        distances = trl_loss(logits, teacher, beta, heat)
    teacher_loss = heat**2 * distances[kept].sum() / size
    loss = (1 - mixture.alpha) * data + mixture.alpha * teacher_loss + regular
    loss.backward()
    parts = torch.stack([data, teacher_loss]).detach()
    return {"loss": loss.detach(), "parts": parts, **{name: leaf.grad for name, leaf in leaves.items()}}


def _loss(tensor: int, mixture: Mixture, options: dict[str, Any]) -> dict[str, Any]:
    """On a rank: the loss, its parts, its gradients, and what was sent. Padded rows would have the largest logits."""
    hidden, weight, teacher, targets = _example()
    axis, options = (mesh := make_mesh(Layout(tensor=tensor), CPU)).tensor, dict(options)

    def own(whole: Tensor) -> Tensor:
        missing = [0, 0] * (whole.dim() - 1) + [0, padded_vocab_size(V, tensor) - V]
        return F.pad(whole, missing, value=1e3).chunk(tensor)[axis.rank].clone()

    teacher[targets == IGNORED] += options.pop("hole", 0.0)
    teacher = own(teacher.t()).t()
    if "bias" in options:
        options["bias"] = own(options["bias"])
    leaves = {"hidden": hidden.requires_grad_(), "weight": own(weight).requires_grad_()}
    if k := options.pop("k", 0):
        part = VocabularyPart.of(axis, teacher.shape[1], V)
        top = top_logits(teacher, part, k, mixture.temperature)
        ids = top.ids.sort(1, descending=True).indices  # the order of the ids is of no meaning
        top = TopLogits(top.ids.gather(1, ids), torch.cat([top.logits.gather(1, ids), top.logits[:, -1:]], 1))
        distillation = Distillation(mixture=mixture, logits=lambda piece: TopLogits(*(each[piece] for each in top)))
    else:
        distillation = Distillation(mixture=mixture, logits=lambda piece: teacher[piece].clone())
    settings = LossSettings(distillation=distillation, chunk_tokens=4, **options)
    with CollectiveRecorder(mesh) as recorder:
        loss = vocab_parallel_cross_entropy(
            copy_to_tensor_parallel(leaves["hidden"], axis), leaves["weight"], targets,
            vocab_size=V, axis=axis, settings=settings
        )  # fmt: skip
    loss.backward()
    (parts,) = distillation.sums
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return {"loss": loss.detach(), "parts": parts, "sent": list(recorder.sent), **gradients}


CASES: list[tuple[Mixture, dict[str, Any]]] = [
    (Mixture(1.0, FORWARD), {}),
    (Mixture(1.0, FORWARD), {"z_loss": 0.05}),
    (Mixture(0.7, FORWARD, 3.0), {"z_loss": 0.05, "soft_cap": 2.0}),
    (Mixture(0.7, JSD, 2.0), {"soft_cap": 2.0}),
    (Mixture(0.4, 0.5), {"bias": torch.linspace(-2, 2, V, dtype=torch.float64).sin()}),
    (Mixture(0.7, REVERSE, 0.5), {"z_loss": 0.05}),
    (Mixture(1.0, FORWARD), {"k": 1}),
    (Mixture(0.7, FORWARD, 3.0), {"k": 7, "z_loss": 0.05, "soft_cap": 2.0}),
    (Mixture(0.7, JSD, 2.0), {"k": 200, "soft_cap": 2.0}),
    (Mixture(0.4, 0.5), {"k": 5, "bias": torch.linspace(-2, 2, V, dtype=torch.float64).sin()}),
    (Mixture(0.7, REVERSE, 0.5), {"k": V - 1, "z_loss": 0.05}),
]


# With four ranks, one holds real rows and padding, and one only padding.
@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_it_is_the_divergence_of_the_full_logits(ranks: RankPool, tensor: int) -> None:
    results = zip(*ranks.run(tensor, each, _loss, [(tensor, *case) for case in CASES]), strict=True)
    for (mixture, options), of_ranks in zip(CASES, results, strict=True):
        expected = _serial(mixture, **options)
        for result in of_ranks:
            for name in ("loss", "parts", "hidden"):
                torch.testing.assert_close(result[name], expected[name], **CLOSE)
        whole = joined([result["weight"] for result in of_ranks], 0)
        torch.testing.assert_close(whole[:V], expected["weight"], **CLOSE)
        assert torch.count_nonzero(whole[V:]) == 0


@pytest.mark.parametrize("beta", [FORWARD, JSD, REVERSE])
def test_likeliest_logits_give_a_lower_bound_and_those_of_all_tokens_the_divergence(
    ranks: RankPool, beta: float
) -> None:
    mixture = Mixture(0.7, beta, 2.0)
    cases = [(2, mixture, {"k": k} if k else {}) for k in (0, 1, 5, 50, V)]
    whole, *others = ranks.run(2, each, _loss, cases)[0]
    losses = [float(result["parts"][1]) for result in others]
    assert losses == sorted(losses)
    assert losses[-2] < losses[-1]
    for name in ("loss", "parts", "hidden", "weight"):
        torch.testing.assert_close(others[-1][name], whole[name], rtol=1e-12, atol=1e-12)


def test_nine_elements_per_token_are_sent_and_none_per_entry(ranks: RankPool) -> None:
    """Three of them are those of the cross entropy."""
    for result in [*ranks.run(2, _loss, 2, *CASES[0]), *ranks.run(2, _loss, 2, Mixture(1.0, FORWARD), {"k": 7})]:
        assert {(sent.operation, sent.axis) for sent in result["sent"]} == {("all_reduce", "tensor")}
        assert [sent.elements for sent in result["sent"]] == [4, 8, 8, 8, 8] * 3 + [1, 2, 2, 2, 2]


def test_a_teacher_that_is_not_finite_without_a_target_changes_nothing(ranks: RankPool) -> None:
    for mixture, options in CASES[2:4]:
        expected, found = (ranks.run(1, _loss, 1, mixture, {**options, "hole": hole})[0] for hole in (0.0, math.nan))
        for name in ("loss", "parts", "hidden", "weight"):
            torch.testing.assert_close(found[name], expected[name], **CLOSE)


def test_without_a_teachers_share_it_is_the_cross_entropy(ranks: RankPool) -> None:
    hidden, weight, _, targets = _example()
    (result,) = ranks.run(1, _loss, 1, Mixture(0.0, JSD, 2.0), {})
    expected = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum", ignore_index=IGNORED)
    torch.testing.assert_close(result["loss"], expected, **CLOSE)


def _divergences(beta: float, dtype: torch.dtype = torch.float64, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Divergences of random distributions, and their gradients."""
    hidden, weight, teacher, _ = _example()
    log_s, log_t = (F.log_softmax(factor * x.to(dtype), 1) for x in (F.linear(hidden, weight), teacher))
    sums = partial_divergences(log_s, log_t, beta)
    return divergence(sums, beta), divergence_error_(log_s, log_t, sums, beta)


@pytest.mark.parametrize("end", [FORWARD, REVERSE])
def test_the_ends_are_limits(end: float) -> None:
    """TRL's divergence is 0 in the limit, and jumps to a KL at the end."""
    hidden, weight, teacher, _ = _example()
    near = abs(end - 1e-9)
    for one, other in zip(_divergences(end, factor=0.3), _divergences(near, factor=0.3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    at_end, before = (trl_loss(F.linear(hidden, weight), teacher, beta, 1.0) for beta in (end, near))
    assert (before < 1e-2 * at_end).all()


@pytest.mark.parametrize("beta", [FORWARD, 1e-6, JSD, 1 - 1e-6, REVERSE])
def test_it_is_finite_where_a_probability_underflows(beta: float) -> None:
    """With logits that differ by hundreds, in float32."""
    values, error = _divergences(beta, torch.float32, 50.0)
    assert values.isfinite().all()
    assert error.isfinite().all()
    exact, _ = _divergences(beta, torch.float64, 50.0)
    torch.testing.assert_close(values.double(), exact, rtol=1e-3, atol=1e-4)


def test_equal_distributions_have_no_divergence_and_close_ones_one_of_no_direction() -> None:
    log_s = F.log_softmax(_example()[2], 1)
    log_t = F.log_softmax(_example()[2] + 1e-4 * _example()[0].sum(1, keepdim=True) * torch.arange(V) / V, 1)
    every = [divergence(partial_divergences(log_s, log_t, beta), beta) for beta in (FORWARD, JSD, REVERSE)]
    for values in every:
        torch.testing.assert_close(values, every[0], rtol=1e-3, atol=1e-15)
    assert divergence(partial_divergences(log_s, log_s, JSD), JSD).abs().max() < math.ulp(1.0)


def test_only_the_rest_may_be_nothing() -> None:
    inf, nan = math.inf, math.nan
    rows = [[1.0, 2.0], [1.0, -inf], [1.0, inf], [1.0, nan], [nan, 1.0], [-inf, 1.0]]
    top = TopLogits(torch.zeros(len(rows), 1), torch.tensor(rows))
    assert top.known.tolist() == [True, True, False, False, False, False]
