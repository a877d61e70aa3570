"""Learning rates: how a trial differs from the run, and how the best rate is chosen."""

import json
import sys
from pathlib import Path

import pytest

from crosscut.config import ConfigError, load_run, write_json
from crosscut.scaling.quality import rates
from crosscut.scaling.quality.rates import chosen_rates, describe_choice, rate_study, trial, with_rate
from crosscut.scaling.quality.results import RateResults, SizeRates, Trial, read_rates
from crosscut.scaling.quality.sizes import Size
from tests.refusals import refusal

MODEL = ("model.num_layers=1", "model.hidden_size=16", "model.num_heads=1")
RUN = load_run({}, [*MODEL, "recipe=modern", "training.steps=1000", "evaluation.lambada=l.jsonl"])


def size(*losses: float | None, name: str = "small") -> SizeRates:
    trials = tuple(Trial(rate=1e-3 * 2**i, loss=loss) for i, loss in enumerate(losses))
    return SizeRates(name=name, model="1 x 16, 1", parameters=1000, trials=trials)


def results(*sizes: SizeRates) -> RateResults:
    return RateResults(
        machine={"device": "Some processor", "date": "2026-11-22"}, text=("books.jsonl",), vocab_size=300, steps=20,
        share=0.2, batch_size=8, sequence_length=16, sizes=sizes,
    )  # fmt: skip


def test_all_rates_keep_their_proportions() -> None:
    run = with_rate(RUN, 2 * RUN.optimizer.learning_rate)
    for name in ("learning_rate", "embedding_learning_rate", "matrix_learning_rate", "head_learning_rate"):
        assert getattr(run.optimizer, name) == pytest.approx(2 * getattr(RUN.optimizer, name))
    assert run.optimizer.beta2 == RUN.optimizer.beta2


def test_a_trial_is_a_shorter_run_of_the_same_form() -> None:
    run = load_run({}, [*MODEL, "training.steps=1000", "optimizer.warmup_steps=50", "optimizer.schedule=wsd",
                        "optimizer.decay_steps=200", "checkpoint.every=100", "evaluation.lambada=l.jsonl"])  # fmt: skip
    short = trial(run, 5e-3, 0.2)
    assert (short.training.steps, short.optimizer.warmup_steps, short.optimizer.decay_steps) == (200, 10, 40)
    assert (short.training.validate_every, short.checkpoint.every) == (0, 20)
    assert not short.evaluation.has_tasks
    assert short.training.seed == run.training.seed and short.model == run.model


def test_the_share_of_an_earlier_start_is_named_and_a_trial_never_makes_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trial(RUN, 5e-3, 0.0199).training.steps == 19
    monkeypatch.setattr(rates, "train_all", lambda *_, **__: sys.exit("trained"))
    (file := tmp_path / "small.toml").write_text('recipe = "modern"\n')
    settings = (str(file), *MODEL, "training.steps=100", "data.text=builtin:tales", "data.vocab_size=300")
    options = {"rates": [1e-3, 2e-3], "at_once": 1, "output": tmp_path}
    with pytest.raises(SystemExit, match="trained"):
        rate_study(settings, share=0.2, **options)
    assert refusal(ConfigError, rate_study, settings, share=0.5, **options) == (
        f"`--share` must be 0.2, as in an earlier start in `{tmp_path}`, but is 0.5. Choose another `--output` for "
        "another share."
    )
    message = refusal(ConfigError, rate_study, settings, share=0.005, **options)
    assert message.startswith("`--share` must be at least 0.02, which makes 2 of `training.steps` (100), but is")


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ((3.0, 2.0, 4.0), "best learning rate of `small` is 0.002."),
        ((3.0, 2.0, 1.0), "is 0.004, the largest that was tried. Try larger rates, too: --rates 0.004,0.008"),
        ((1.0, 2.0, None), "is 0.001, the smallest that was tried. Try smaller rates, too: --rates 0.0005,0.001"),
        ((None, None), "All runs of `small` diverged. Try smaller rates: --rates 0.00025,0.0005"),
    ],
)
def test_a_best_rate_at_an_end_of_the_grid_is_told(losses: tuple[float | None, ...], message: str) -> None:
    assert describe_choice(size(*losses)).endswith(message)


def test_the_rates_of_a_file_are_those_of_the_sizes(tmp_path: Path) -> None:
    write_json(file := tmp_path / "rates.json", results(size(3.0, 2.0, 4.0), size(1.0, None, name="large")))
    assert read_rates(file) == results(size(3.0, 2.0, 4.0), size(1.0, None, name="large"))
    sizes = [Size("large", RUN), Size("small", RUN)]
    assert chosen_rates(file, sizes, [1000, 1000]) == [1e-3, 2e-3]
    assert refusal(ConfigError, chosen_rates, file, sizes, [1000, 1001]) == (
        f"`--rates` must be of the same models, but in `{file}`, `small` has 1,000 parameters instead of 1,001. Run "
        "`crosscut study rate` with the same sizes."
    )
    assert refusal(ConfigError, chosen_rates, file, [Size("huge", RUN)], [1]) == (
        f"`--rates` must have a learning rate for each size, but `{file}` has none for `huge` (it has: small, large). "
        "Run `crosscut study rate` with the same sizes."
    )


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", json.dumps({"sizes": [{"name": 1}]})])
def test_a_file_that_holds_no_rates_is_refused(tmp_path: Path, content: str) -> None:
    (file := tmp_path / "rates.json").write_text(content)
    message = refusal(ConfigError, read_rates, file)
    assert f"`{file}`" in message and message.endswith("in the output of `crosscut study rate`.")
