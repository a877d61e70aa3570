"""Every number of `docs/alive.html` against its source: plain PyTorch, the planner, and the recorded runs."""

import json
import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from crosscut.planner.memory import forecast_memory
from crosscut.planner.paper.runs import PAPER_SCALING, paper_run
from docs.alive_ranks import INPUTS, RECORDED, TARGET, recorded
from tests.docs.conftest import DOCS, load_program
from tests.ranks import RankPool

alive = load_program("alive")
CUT = json.loads(RECORDED.read_text())
PAGE = DOCS / "alive.html"
X, A, B, GRAD_Z = (torch.tensor(INPUTS[name], dtype=torch.float64) for name in ("x", "a", "b", "grad_z"))


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return alive.figures()


def held(name: str) -> list[torch.Tensor]:
    """A recorded matrix of each rank."""
    return [torch.tensor(rank[name], dtype=torch.float64) for rank in CUT["ranks"]]


def assert_held(name: str, *expected: torch.Tensor) -> None:
    """A recorded matrix is the expected one: a matrix for each rank, or one for both."""
    for own, matrix in zip(held(name), expected * (2 // len(expected)), strict=True):
        torch.testing.assert_close(own, matrix, rtol=0, atol=1e-6)


def test_two_ranks_repeat_the_recording(ranks: RankPool) -> None:
    again = ranks.run(2, recorded)
    assert json.loads(json.dumps({"inputs": INPUTS, "target": TARGET, "ranks": again})) == CUT


def test_the_paper_cut_holds_the_numbers_of_plain_matrices() -> None:
    x = X.clone().requires_grad_()
    xa = x @ A
    y = F.gelu(xa)
    for between in (xa, y):
        between.retain_grad()
    z = y @ B
    z.backward(GRAD_Z)
    assert_held("a", *A.chunk(2, 1))
    assert_held("b", *B.chunk(2, 0))
    assert_held("xa", *xa.chunk(2, 1))
    assert_held("y", *y.chunk(2, 1))
    assert_held("yb", *(own @ rows for own, rows in zip(y.chunk(2, 1), B.chunk(2, 0), strict=True)))
    assert_held("z", z)
    assert_held("grad_y", *y.grad.chunk(2, 1))
    assert_held("grad_xa", *xa.grad.chunk(2, 1))
    assert_held("grad_x_part", *(own @ a.T for own, a in zip(xa.grad.chunk(2, 1), A.chunk(2, 1), strict=True)))
    assert_held("grad_x", x.grad)
    assert {name: CUT["ranks"][1][name] for name in ("sent_forward", "sent_backward")} == {
        "sent_forward": [["all_reduce", "tensor", z.numel()]],
        "sent_backward": [["all_reduce", "tensor", x.numel()]],
    }


def test_rows_first_needs_a_sum_before_the_activation() -> None:
    parts = [own @ rows for own, rows in zip(X.chunk(2, 1), A.chunk(2, 0), strict=True)]
    assert_held("rows_x", *X.chunk(2, 1))
    assert_held("rows_a", *A.chunk(2, 0))
    assert_held("rows_part", *parts)
    assert_held("rows_sum", X @ A)
    assert_held("rows_y", F.gelu(X @ A))
    assert_held("rows_gelu_part", *map(F.gelu, parts))
    assert_held("rows_wrong", F.gelu(parts[0]) + F.gelu(parts[1]))
    assert not torch.equal(held("rows_wrong")[0], held("rows_y")[0])


def test_the_loss_of_a_token_is_the_cross_entropy_of_all_words() -> None:
    hidden, words = (torch.tensor(INPUTS[name], dtype=torch.float64) for name in ("hidden", "words"))
    logits = hidden @ words.T
    assert_held("logits", *logits.chunk(2, 1))
    assert_held("largest", *(own.max().reshape(1, 1) for own in logits.chunk(2, 1)))
    assert_held("most", logits.max().reshape(1, 1))
    assert_held("sum", (logits - logits.max()).exp().sum().reshape(1, 1))
    assert sum(held("sum_part")).item() == pytest.approx(held("sum")[0].item(), abs=2e-6)
    assert_held("target", logits[:, TARGET : TARGET + 1])
    torch.testing.assert_close(sum(held("target_part")), logits[:, TARGET : TARGET + 1])
    assert_held("loss", F.cross_entropy(logits, torch.tensor([TARGET])).reshape(1, 1))
    assert [elements for *_, elements in CUT["ranks"][0]["loss_sent"]] == [1, 2]


def test_a_layer_sends_its_hidden_states_four_times(figures: dict[str, Any]) -> None:
    layer = figures["layer"]
    messages = [(each["phase"], each["purpose"]) for each in layer["messages"]]
    assert messages == [
        *(("forward", f"{name} output") for name in ("attention", "mlp")),
        *(("backward", f"{name} input") for name in ("mlp", "attention")),
    ]
    elements, ranks = layer["batch"] * layer["length"] * layer["hidden"], layer["ranks"]
    for each in layer["messages"]:
        assert (each["operation"], each["elements"]) == ("all_reduce", elements)
        assert each["bytes"] == 2 * (ranks - 1) / ranks * elements * 2  # a ring, float16


def test_the_loss_sends_three_numbers_for_each_token(figures: dict[str, Any]) -> None:
    loss = figures["loss"]
    vocabularies = [int(re.sub(r".*: |,", "", name)) for name in loss["controls"]["vocabulary V"]]
    for key, (all_logits, all_bytes, paper, _, ours, our_bytes) in loss["grid"].items():
        v, b, s, t = map(int, key.split())
        tokens, ranks = alive.SEQUENCES[b] * alive.LENGTHS[s], alive.RANKS[t]
        padding = all_logits // tokens - vocabularies[v]
        assert (paper, ours) == (tokens, 3 * tokens)
        assert all_logits % tokens == 0
        assert 0 <= padding < 128 * ranks
        assert all_bytes == round((ranks - 1) / ranks * all_logits * 2)
        assert our_bytes == round(2 * (ranks - 1) / ranks * ours * 4)
    assert len(loss["grid"]) == len(vocabularies) * len(alive.SEQUENCES) * len(alive.LENGTHS) * len(alive.RANKS)


def test_the_fewest_ranks_that_hold_a_model_are_those_of_the_paper(figures: dict[str, Any]) -> None:
    memory = figures["memory"]
    for (preset, ranks), model in zip(PAPER_SCALING.items(), memory["models"], strict=True):
        assert model["name"] == preset.removeprefix("megatron-").upper()
        fits = [row["tensor"] for row in model["rows"] if sum(row["parts"]) <= memory["limit"]]
        assert fits[0] == model["paper"] == ranks
        for row in model["rows"]:
            total = forecast_memory(paper_run(preset, row["tensor"]), capability=(7, 0)).total
            assert sum(row["parts"]) == pytest.approx(total / 1e6, abs=len(row["parts"]))


def test_the_curves_of_the_norms_are_those_that_were_recorded(figures: dict[str, Any]) -> None:
    measured, norms = json.loads((DOCS / "depth-measured.json").read_text()), figures["norms"]
    drawn = sum(len(runs) for runs in norms["losses"].values())
    assert drawn == len(measured["runs"])
    for name, run in measured["runs"].items():
        depth, place, rate = re.match(r"(\d+) layers, norm (\w+), rate ([\d.]+)", name).groups()
        median, low, high = norms["scores"][f"{place} {depth} {rate}"]
        assert run["losses"] in norms["losses"][f"{place} {depth} {rate}"]
        assert low <= run["validation_loss"] <= high
        assert low <= median <= high


def test_the_shares_of_scaling_are_those_of_the_study(figures: dict[str, Any]) -> None:
    page = (DOCS / "scaling.md").read_text()
    origin = re.search(r"## Origin of 76.*?(?=\n## )", page, re.DOTALL)[0]
    shares = [(f"{one['paper']:.1%}", f"{one['ours']:.1%}") for one in figures["scaling"]]
    assert shares == re.findall(r"\| ([\d.]+%) \| ([\d.]+%) \| \S+ points \|$", origin, re.MULTILINE)
    forecasts = re.findall(r"^\| megatron-8.3b \| 8 x \d+ \| [\d.]+% \| ([\d.]+%) \|", page, re.MULTILINE)
    assert [f"{one['ours']:.1%}" for one in figures["scaling"] if "Figure 6" in one["place"]] == forecasts


def test_quality_by_size_is_that_of_the_measured_runs(figures: dict[str, Any]) -> None:
    measured, quality = json.loads((DOCS / "quality-measured.json").read_text()), figures["quality"]
    ends = []
    for size, drawn in zip(measured["sizes"], quality["sizes"], strict=True):
        curves = [[(step, round(math.exp(loss), 2)) for step, loss in run["validation"]] for run in size["runs"]]
        assert [list(map(tuple, curve)) for curve in drawn["curves"]] == curves
        ends.append([curve[-1][1] for curve in curves])
    assert all(max(larger) < min(smaller) for smaller, larger in pairwise(ends))  # what the page says
    for figure, name in zip(quality["figures"][1:], ("wikitext103_perplexity", "lambada_perplexity"), strict=False):
        for (mean, low, high), size in zip(figure["values"], measured["sizes"], strict=True):
            scores = [run["scores"][name] for run in size["runs"]]
            assert (mean, low, high) == (pytest.approx(sum(scores) / len(scores)), min(scores), max(scores))
    assert [figure["paper"][-1] for figure in quality["figures"]] == ["9.27", "10.81", "", "66.51%"]


def test_the_page_holds_the_figures_and_asks_for_nothing(figures: dict[str, Any]) -> None:
    text = PAGE.read_text()
    stored = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(stored) == json.loads(json.dumps(figures))
    assert len(text) < 200_000
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", text)
    assert "default-src 'none'" in text
