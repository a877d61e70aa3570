"""From what a user asks for to what is measured, without measuring it."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import crosscut.scaling.study
from crosscut.config import ConfigError
from crosscut.scaling.cases import STRONG_SCALING, Case, Devices
from crosscut.scaling.results import Results
from crosscut.scaling.study import measured_study


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases that would have been measured; the first takes one second, the next two, and so on."""
    seen: list[Case] = []

    def measure(cases: Sequence[Case], devices: Devices, *, turns: int) -> list[list[float]]:
        seen.extend(cases)
        return [[float(number)] * turns for number in range(1, len(cases) + 1)]

    monkeypatch.setattr(crosscut.scaling.study, "measure", measure)
    monkeypatch.setattr(crosscut.scaling.study, "available_cores", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return seen


def study(*arguments: str) -> Results:
    return measured_study(arguments, gpu=None, ranks=None, turns=3)


def test_a_case_of_several_studies_is_measured_once(measured: list[Case]) -> None:
    results = study()
    assert len(measured) == 3 + 3 + 3 * 2 + 2  # one rank is in all studies but one
    assert len({results.studies[study][0].seconds for study in ("tensor", *STRONG_SCALING)}) == 1
    assert [row.seconds for row in results.studies["strong"]] == [(1.0,) * 3, (7.0,) * 3, (8.0,) * 3]
    assert (results.turns, results.batch_size, results.sequence_length) == (3, 8, 128)


def test_a_runs_file_may_leave_its_vocabulary_to_the_tokenizer(measured: list[Case], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\nnum_layers = 2\nhidden_size = 64\nnum_heads = 4\n[data]\nvocab_size = 700\n"
        "[training]\nbatch_size = 6\nsequence_length = 32\n[layout]\ndata = 2\n"
    )
    results = study(str(path), "training.precision=bfloat16")
    assert {case.run.model.vocab_size for case in measured} == {700}
    assert (results.batch_size, results.precision) == (3, "bfloat16")


def test_what_a_run_does_not_allow_is_printed_and_kept(
    measured: list[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    results = study("model.num_layers=1")
    assert [row.axes.get("pipeline", 1) for row in results.studies["pipeline"]] == [1]
    (sentence,) = results.left_out
    assert sentence.startswith("Strong scaling has no row with 2 or more pipeline ranks: `layout.pipeline` must")
    assert capsys.readouterr().out == f"{sentence}\n"
    assert measured


def test_a_key_changes_the_default_run(measured: list[Case]) -> None:
    assert study("training.sequence_length=64", "training.device=cpu").sequence_length == 64


def test_a_device_without_the_runs_precision_is_refused_before_anything_is_measured(
    measured: list[Case], tmp_path: Path
) -> None:
    path = tmp_path / "here.toml"
    source = 'source = "this test"'
    path.write_text(
        f'name = "here"\ndevice = "cpu"\n[memory]\ngigabytes = 8\ngigabytes_per_second = 10\n{source}\n'
        f"[products]\nteraflops = {{ float32 = 0.1 }}\nattained = 1\n{source}\n"
        f"[node]\nranks = 2\ngigabytes_per_second = 1\n{source}\n"
    )
    message = "`training.precision` must be a precision of here, but is 'bfloat16'. Choose \"float32\"."
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        measured_study(("training.precision=bfloat16",), gpu=str(path), ranks=None, turns=1)
    assert measured == []
    assert measured_study((), gpu=str(path), ranks=None, turns=1).studies["tensor"][0].forecast
