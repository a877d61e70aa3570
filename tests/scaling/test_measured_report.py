"""File and report of a measured study."""

from dataclasses import replace

import pytest

from crosscut.config import load_run, resolve
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.paper.sections import Section, to_html, to_markdown
from crosscut.planner.time import step_time
from crosscut.scaling.cases import DEFAULT_RUNS, STRONG_SCALING, Cases, Devices, study_cases
from crosscut.scaling.measured_report import measured_report
from crosscut.scaling.results import Results, forecast_seconds, row_of

LAPTOP = KNOWN_HARDWARE["laptop"]
CORES = Devices(kind="cpu", count=2, most=4)


def made_up(cases: Cases, devices: Devices, seconds: float, *, forecast: bool = False) -> Results:
    """Every case takes as long: FLOP/s then grow as the work does."""
    return Results(
        machine={"device": "Some processor", "date": "2026-11-22", "torch": "2.13"},
        devices=devices,
        batch_size=8,
        sequence_length=128,
        precision="float32",
        turns=3,
        device_file="a laptop's processor" if forecast else "",
        studies={
            study: [
                row_of(case, (seconds, 2 * seconds, seconds / 2), devices, LAPTOP if forecast else None)
                for case in found
            ]
            for study, found in cases.studies.items()
        },
        left_out=cases.left_out,
    )


CASES = study_cases(resolve(load_run(DEFAULT_RUNS["cpu"]), device="cpu", precision="float32"), CORES)
STUDIES = CASES.studies
RESULTS = made_up(CASES, CORES, 0.5)
FORECAST = made_up(CASES, CORES, 0.5, forecast=True)


def section(title: str, results: Results = RESULTS) -> Section:
    return next(part for part in measured_report(results).sections if part.title == title)


def column(part: Section, name: str) -> list[str]:
    return [row[part.header.index(name)] for row in part.rows]


def test_what_was_found_survives_its_file() -> None:
    assert Results.from_json(FORECAST.to_json()).to_json() == FORECAST.to_json()


def test_a_batch_twice_as_large_in_the_same_time_is_linear() -> None:
    part = section("Weak scaling: tensor x data ranks")
    shares = dict(zip(column(part, "ranks"), column(part, "of linear"), strict=True))
    assert shares["1"] == shares["data 2"] == shares["data 4"] == "100%"


@pytest.mark.parametrize("axis", STRONG_SCALING.values())
def test_the_same_batch_in_the_same_time_is_no_speed_up(axis: str) -> None:
    part = section(f"Strong scaling: {axis} ranks")
    assert column(part, "ranks") == ["1", f"{axis} 2", f"{axis} 4"]
    assert column(part, "speed-up") == ["1.00"] * 3
    assert column(part, "of linear") == ["100%", "50%", "25%"]
    assert column(part, "seconds") == ["0.500"] * 3
    assert column(part, "range") == ["0.250 to 1.000"] * 3
    assert part.bars[2] == (f"{axis} 4, 2 per core", (4.0, 1.0))


def test_rows_tell_the_schedule_of_stages_and_the_way_of_attention() -> None:
    assert column(section("Strong scaling: pipeline ranks"), "setting") == ["", *["1f1b, 8 micro-batches"] * 2]
    assert column(section("Strong scaling: context ranks"), "setting") == ["", *["all_to_all"] * 2]
    assert "setting" not in section("Strong scaling: tensor ranks").header


def test_an_axis_without_several_ranks_has_no_section_but_a_reason() -> None:
    run = load_run(DEFAULT_RUNS["cpu"], ("model.num_layers=1",))
    cases = study_cases(resolve(run, device="cpu", precision="float32"), CORES)
    report = measured_report(made_up(cases, CORES, 0.5))
    titles = [part.title for part in report.sections]
    assert "Strong scaling: context ranks" in titles
    assert "Strong scaling: pipeline ranks" not in titles
    assert cases.left_out[0] in report.words


def test_rates_are_the_models_flops() -> None:
    part = section("Weak scaling: tensor ranks")
    flops = [row.flops for row in RESULTS.studies["tensor"]]
    assert column(part, "GFLOP/s") == [f"{number / 0.5 / 1e9:.3g}" for number in flops]


def test_ranks_that_share_a_core_are_marked() -> None:
    parts = [part for part in measured_report(RESULTS).sections if "per core" in part.header]
    assert len(parts) == 2 + len(STRONG_SCALING)
    for part in parts:
        for ranks, sharing in zip(column(part, "ranks"), column(part, "per core"), strict=True):
            is_shared = "4" in ranks or ranks == "tensor 2 x data 2"
            assert sharing == ("2 (oversubscribed)" if is_shared else "1")


def test_one_process_is_compared_with_ranks_that_do_the_same_step() -> None:
    part = section("Comparison with one process on all cores")
    assert [(row[0], row[1], row[4], row[7]) for row in part.rows] == [
        *(("4 x 256, 16", "strong", f"{axis} 2", "1.00") for axis in STRONG_SCALING.values()),
        ("5 x 320, 20", "weak", "tensor 2", "1.00"),
    ]


def test_forecasts_stand_beside_only_where_a_device_is_given() -> None:
    with_forecast = section("Strong scaling: pipeline ranks", FORECAST)
    assert "forecast, s" not in section("Strong scaling: pipeline ranks").header
    row = FORECAST.studies["pipeline"][1]
    assert row.forecast is not None
    assert column(with_forecast, "forecast, s")[1] == f"{row.forecast:.3f}"
    assert column(with_forecast, "off")[1] == f"{row.forecast / 0.5 - 1:+.0%}"
    assert with_forecast.legend == ("linear", "measured", "forecast")


def test_one_thread_is_forecast_a_cores_share_of_the_processor() -> None:
    one, two, four = (case.run.config for case in STUDIES["strong"])
    both = STUDIES["process"][0]
    whole = forecast_seconds(both, CORES, LAPTOP)
    assert whole == step_time(one, LAPTOP).total
    assert forecast_seconds(STUDIES["strong"][0], CORES, LAPTOP) == pytest.approx(2 * whole, rel=0.1)
    assert forecast_seconds(STUDIES["strong"][1], CORES, LAPTOP) == step_time(two, LAPTOP).total
    assert forecast_seconds(STUDIES["strong"][2], CORES, LAPTOP) == step_time(four, LAPTOP).total


def test_ranks_that_share_a_core_wait_for_each_others_host_work() -> None:
    slow = replace(LAPTOP, layer_host=(0.25, 0.5), tensor_host=0.125)
    slower = replace(LAPTOP, layer_host=(0.5, 1.0), tensor_host=0.25)
    _, two, four = STUDIES["strong"]
    assert forecast_seconds(two, CORES, slow) == step_time(two.run.config, slow).total
    assert forecast_seconds(four, CORES, slow) == step_time(four.run.config, slower).total


def test_gpus_have_no_process_with_all_cores_and_larger_units() -> None:
    gpus = Devices(kind="cuda", count=4, most=4)
    run = resolve(load_run(DEFAULT_RUNS["cuda"]), device="cuda", precision="bfloat16")
    report = measured_report(made_up(study_cases(run, gpus), gpus, 0.1))
    assert [part.title for part in report.sections][-1] == "Strong scaling: context ranks"
    assert "TFLOP/s" in report.sections[0].header
    assert "per GPU" in report.sections[0].header
    assert "thread" not in report.words


def test_both_forms_are_written() -> None:
    report = measured_report(FORECAST)
    assert "| 2 (oversubscribed) |" in to_markdown(report)
    assert to_html(report).count("<svg") == 2 + len(STRONG_SCALING)
    assert all(len(row) == len(part.header) for part in report.sections for row in part.rows)
