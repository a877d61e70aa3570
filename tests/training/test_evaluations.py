"""Scores while the model trains."""

from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from crosscut.checkpoint import list_checkpoints
from crosscut.config import ConfigError, DataError
from crosscut.data import TokenFolder
from crosscut.evaluation import evaluate
from crosscut.launch import Stopped
from crosscut.training.evaluations import Evaluations, last_figures
from crosscut.training.job import run_training
from crosscut.training.loop import Loop
from tests.training.jobs import parts, rows_of

FIGURES = {
    "wikitext103_perplexity", "wikitext103_perplexity_per_token", "wikitext103_bits_per_byte",
    "wikitext103_loss_per_token",
    "lambada_accuracy", "lambada_last_token_accuracy", "lambada_perplexity",
}  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, ...]:
    """The overrides that name them."""
    (tmp_path / "wiki.tokens").write_text(
        " The Congress of the United @-@ States met , and the people were glad . \n" * 8
    )
    (tmp_path / "lambada.txt").write_text("the people of the United States\nI have the honor to report\n")
    return (
        f"evaluation.wikitext103={tmp_path / 'wiki.tokens'}",
        f"evaluation.lambada={tmp_path / 'lambada.txt'}",
        "evaluation.overlap=8",
        "evaluation.batch_size=3",
    )


def trained(run) -> dict:
    """Rows of the metrics, and the figures of the model that came out, scored once more."""
    trainer, batches = parts(run)
    evaluations = Evaluations(run, TokenFolder.open(Path(run.tokens_folder), verify=False))
    Loop(trainer, batches, evaluations=evaluations).train()
    again = evaluate(trainer.model, evaluations.tasks, batch_size=5)
    return {f"{result.task}_{name}": value for result in again for name, value in result.found.figures.items()}


def scores_of(run) -> list[dict]:
    return [row for row in rows_of(run) if "lambada_accuracy" in row]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "layout", [("layout.tensor=2",), ("layout.tensor=2", "layout.data=2", "layout.sharding=zero3")], ids=["two", "four"]
)
def test_scores_are_noted_every_so_many_steps_and_at_the_end(ranks, run_with, texts, layout):
    run = run_with(*texts, *layout, "evaluation.every=3", "training.steps=5", "model.dropout=0.0")
    again = ranks.run(run.layout.world_size, trained, run)[0]
    rows = scores_of(run)
    assert [row["step"] for row in rows] == [3, 5]
    assert set(rows[0]) == {"step", *FIGURES}
    assert rows[1]["wikitext103_perplexity"] < rows[0]["wikitext103_perplexity"], "nothing was learned"
    assert {name: rows[1][name] for name in FIGURES} == pytest.approx(again, rel=1e-5)
    assert last_figures(rows) == pytest.approx(again, rel=1e-5)


def test_without_an_interval_only_the_last_model_is_scored_also_for_tensorboard(ranks, run_with, texts):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_with(*texts, "training.steps=3")
    ranks.run(1, trained, run)
    (row,) = scores_of(run)
    assert row["step"] == 3
    events = EventAccumulator(str(Path(run.output.folder) / "tensorboard"))
    events.Reload()
    noted = [event.value for event in events.Scalars("wikitext103_perplexity")]
    assert noted == pytest.approx([row["wikitext103_perplexity"]])


def trained_again(run) -> int:
    """Train, or resume at the end of the run. Number of its scores."""
    trainer, batches = parts(run)
    evaluations = Evaluations(run, TokenFolder.open(Path(run.tokens_folder), verify=False))
    Loop(trainer, batches, evaluations=evaluations).train(*list_checkpoints(run.checkpoints_folder)[-1:])
    return len(scores_of(run))


def test_a_run_that_was_stopped_before_its_scores_gets_them_when_it_is_resumed(ranks, run_with, texts):
    run = run_with(*texts, "training.steps=3")
    ranks.run(1, trained_again, run)
    metrics = Path(run.output.folder) / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if "lambada_accuracy" not in line))
    assert [ranks.run(1, trained_again, run)[0] for _ in range(2)] == [1, 1]


def shown_while_training(run) -> list:
    """Which tasks show on this rank how far they are, and when the bar of the training gives way."""
    told = []

    @contextmanager
    def noted(bar, _num_tokens):
        assert not bar.size, "the command prints a forecast, not the run"
        told.append((bar.name, bar.shown))
        yield lambda _: None

    @contextmanager
    def aside(_self):
        told.append("aside")
        yield
        told.append("back")

    where = ("crosscut.evaluation.progress.progress", "crosscut.training.tracking.metrics._TrainingDisplay.aside")
    with mock.patch(where[0], noted), mock.patch(where[1], aside):
        trained(run)
    return told[:-2]  # without what scored the model once more


def test_the_first_rank_shows_how_far_an_evaluation_is(ranks, run_with, texts):
    run = run_with(*texts, "training.steps=3", "layout.tensor=2")
    first, second = ranks.run(2, shown_while_training, run)
    assert first == ["aside", ("wikitext103", True), ("lambada", True), "back"]
    assert second == [("wikitext103", False), ("lambada", False)]


class _AskedAfterOneBatch:
    """A request to stop, as `StopRequest` gives it."""

    def checked(self, rounds):
        for number, group in enumerate(rounds):
            if number == 1:
                raise Stopped
            yield group


def stopped_in_between(run) -> bool:
    trainer, _ = parts(run)
    evaluations = Evaluations(run, TokenFolder.open(Path(run.tokens_folder), verify=False))
    with pytest.raises(Stopped):
        evaluations.figures(trainer.model, _AskedAfterOneBatch())
    return trainer.model.training


def test_a_request_to_stop_is_heard_between_two_batches(ranks, run_with, texts):
    assert ranks.run(1, stopped_in_between, run_with(*texts))[0], "the model must be left in training mode"


def test_a_text_that_cannot_be_scored_is_told_before_the_run(run_with, texts):
    with pytest.raises(DataError, match=r"^`evaluation.lambada` must be a readable file, but `nowhere.txt` is not"):
        run_training(run_with(*texts, "evaluation.lambada=nowhere.txt"))
    with pytest.raises(ConfigError, match=r"^`evaluation.window` must be at most the model's maximum of 32 tokens"):
        run_with(*texts, "evaluation.window=64")
    with pytest.raises(ConfigError, match=r"^`evaluation.overlap` must be at most the window's 32 tokens, but is 64"):
        run_with(*texts, "evaluation.overlap=64")


def test_a_run_that_scores_nothing_needs_no_window(run_with):
    run_with("training.sequence_length=16")


def test_a_run_that_scores_only_lambada_needs_no_overlap(run_with):
    run_with("training.sequence_length=16", "evaluation.lambada=lambada.jsonl")


def test_the_last_figures_are_those_of_the_last_evaluation():
    rows = [
        {"step": 1, "loss": 2.0},
        {"step": 1, "text_perplexity": 9.0},
        {"step": 2, "text_perplexity": 8.0},
        {"step": 2},
    ]
    assert last_figures(rows) == {"text_perplexity": 8.0}
    assert last_figures(rows[:1]) == {}
