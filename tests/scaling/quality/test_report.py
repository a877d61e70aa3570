"""Report and picture of the study of quality."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from crosscut.config.system.records import from_json, to_json
from crosscut.planner.paper.sections import to_html, to_markdown
from crosscut.scaling.quality.figure import draw_quality
from crosscut.scaling.quality.report import quality_report, rate_report
from crosscut.scaling.quality.results import QualityResults, RunFigures, SizeFigures
from tests.scaling.quality.test_rates import results as rates
from tests.scaling.quality.test_rates import size as rates_of


def size_of(name: str, parameters: int, *perplexities: float) -> SizeFigures:
    """A size whose seeds end with these perplexities."""
    runs = tuple(
        RunFigures(
            seed=seed,
            validation=((0, math.log(300)), (20, math.log(perplexity))),
            scores={"wikitext103_perplexity": 10 * perplexity, "lambada_accuracy": 0.01, "lambada_perplexity": 5e4},
            seconds=90.0,
        )
        for seed, perplexity in enumerate(perplexities)
    )
    return SizeFigures(
        name=name, model="1 x 16, 1", parameters=parameters, learning_rate=1e-3, step_flops=10**9, runs=runs
    )


def results_of(*sizes: SizeFigures) -> QualityResults:
    return QualityResults(
        machine={"device": "Some processor", "date": "2026-11-22"}, text=("books.jsonl",), vocab_size=300, steps=20,
        batch_size=8, sequence_length=16, window=16, stride=8, sizes=sizes,
    )  # fmt: skip


RESULTS = results_of(size_of("small", 10_000, 110, 100, 90), size_of("large", 40_000, 80, 70, 60))
UNSCORED = results_of(
    *(replace(size, runs=tuple(replace(run, scores={}) for run in size.runs)) for size in RESULTS.sizes)
)


def test_figures_are_means_with_their_range_beside_the_papers() -> None:
    text = to_markdown(quality_report(RESULTS))
    assert "| small | 10K | 100.00 (90.00 to 110.00) | 1,000 (900.00 to 1,100) |" in text
    assert "| the paper's | 355M |  | 19.31 |  | 45.18% |" in text
    assert "| the paper's | 8.3B | 9.27 | 10.81 |  | 66.51% |" in text
    assert "| small | 1 x 16, 1 | 10,000 | 0.001 | 2.56K | 0.0 | 1.5 |" in text
    assert "| 20 | 99.7 | 69.5 |" in text  # the exponential of the mean loss


def test_only_figures_in_which_every_run_of_a_size_is_better_are_called_so() -> None:
    ordered = "Every run of a size is better than all runs of the next smaller size in: "
    flat = " ".join(to_markdown(quality_report(RESULTS)).split())
    assert f"{ordered}validation perplexity; WikiText-103, perplexity per word. " in flat
    mixed = results_of(size_of("small", 10_000, 110, 75), size_of("large", 40_000, 80, 70))
    assert ordered not in " ".join(to_markdown(quality_report(mixed)).split())


def test_a_task_that_was_not_scored_has_no_column() -> None:
    text = to_markdown(quality_report(UNSCORED))
    assert "LAMBADA," not in text and "9.27" in text


def test_results_are_the_same_after_a_round_trip_through_json() -> None:
    assert from_json(QualityResults, json.loads(json.dumps(to_json(RESULTS)))) == RESULTS


@pytest.mark.parametrize("results", [RESULTS, UNSCORED], ids=["scored", "unscored"])
def test_the_picture_is_part_of_the_page(tmp_path: Path, results: QualityResults) -> None:
    picture = draw_quality(results, tmp_path / "quality.png")
    assert picture.png == (tmp_path / "quality.png").read_bytes()
    report = quality_report(results, picture)
    assert f"![{picture.alt}](quality.png)" in to_markdown(report)
    assert 'src="data:image/png;base64,iVBOR' in to_html(report)


def test_rates_have_a_row_each_and_the_sizes_whose_best_they_are() -> None:
    text = to_markdown(rate_report(rates(rates_of(3.0, 2.0), rates_of(None, 1.0, name="large"))))
    assert "| 0.001 | 20.09 | diverged |  |" in text
    assert "| 0.002 | 7.39 | 2.72 | small, large |" in text
