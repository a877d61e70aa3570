"""Report of a measured study, in the same form as the report of the paper's published study (`planner.paper.study`)."""

from collections.abc import Sequence

from crosscut.config.axes import OPTIONS
from crosscut.planner.paper.sections import Report, Section
from crosscut.scaling.cases import STRONG_SCALING
from crosscut.scaling.results import MeasuredCase, Results

_MARK = "Written by `crosscut study measure`; in docs/ by `python docs/generate.py`, from scaling-measured.json."
_SECONDS = ("seconds", "range")
_LEGEND = ("linear", "measured", "forecast")


def measured_report(results: Results) -> Report:
    """Build the report of a measured study. If the results contain forecasts, the report shows them next to the
    measurements.
    """
    tensor, data = results.studies["tensor"], results.studies["data"]
    grown = (
        "The model grows with the tensor ranks as in Figure 6, in width and depth, so that the parameters per rank "
        "stay about the same. The batch is constant."
    )
    both = "The same models, with a batch that grows with the data ranks: the paper's tensor x data parallelism."
    sections = [
        _weak(results, "Weak scaling: tensor ranks", grown, tensor),
        _weak(results, "Weak scaling: tensor x data ranks", both, [tensor[0], *data]),
    ]
    for study, axis in STRONG_SCALING.items():
        if len(rows := results.studies.get(study, ())) > 1:
            sections.append(_strong(results, axis, rows))
    if "process" in results.studies:
        sections.append(_process(results))
    return Report(_MARK, "Scaling measured", _words(results), sections)


def _words(results: Results) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in results.machine.items() if name != "device")
    threads = ""
    if results.devices.kind == "cpu":
        threads = (
            "A rank computes with one thread. Rows with more ranks than cores are marked as oversubscribed: they "
            "cannot scale linearly. "
        )
    forecasts = f"Forecasts are the planner's for {results.device_file}. " if results.device_file else ""
    return (
        "The paper's scaling study (section 5.1: Figure 6 and Table 3), and strong scaling over other axes, trained on "
        f"{results.machine['device']}, {results.devices.count} "
        f"{_device(results)}s ({facts}), with {results.batch_size} sequences of {results.sequence_length} tokens per "
        f"data rank in {results.precision}. All cases take turns, {results.turns} times each, so that other work "
        "on the machine affects all of them equally. In a turn, a case takes two steps; the second is measured. "
        "The seconds are the median over the turns, with their minimum and maximum as the range. The "
        "ranks of a case are given for each axis that has more than one rank. A model is given as layers x hidden "
        "size, and its number of heads. "
        f"{threads}Linear scaling is one rank's model FLOP/s times the number of ranks. {forecasts}"
        f"{''.join(f'{sentence} ' for sentence in results.left_out)}`crosscut study measure` writes this report."
    )


def _weak(results: Results, title: str, words: str, rows: Sequence[MeasuredCase]) -> Section:
    one = results.studies["tensor"][0]
    scale, unit = (1e9, "GFLOP/s") if one.flops_per_second < 1e12 else (1e12, "TFLOP/s")
    linear = [one.flops_per_second * row.num_ranks for row in rows]
    cells = [
        (
            _ranks(row),
            _sharing(row),
            row.model,
            f"{row.parameters_per_rank / 1e6:.1f}M",
            *_seconds(row),
            f"{row.flops_per_second / scale:.3g}",
            f"{row.flops_per_second / best:.0%}",
            *_forecast(row),
        )
        for row, best in zip(rows, linear, strict=True)
    ]
    figures = [
        (best / scale, row.flops_per_second / scale, *(row.flops / forecast / scale for forecast in _forecasts(row)))
        for row, best in zip(rows, linear, strict=True)
    ]
    header = ("ranks", f"per {_device(results)}", "model", "parameters per rank")
    return Section(
        title,
        words,
        (*header, *_SECONDS, unit, "of linear", *_forecast_header(one)),
        cells,
        [(_name(row), bars) for row, bars in zip(rows, figures, strict=True)],
        _LEGEND[: len(figures[0])],
        unit,
    )


def _strong(results: Results, axis: str, rows: Sequence[MeasuredCase]) -> Section:
    one, has_settings = rows[0], any(row.setting for row in rows)
    speed_ups = [one.median / row.median for row in rows]
    cells = [
        (
            _ranks(row),
            _sharing(row),
            *([row.setting] if has_settings else []),
            *_seconds(row),
            f"{speed_up:.2f}",
            f"{speed_up / row.num_ranks:.0%}",
            *_forecast(row),
        )
        for row, speed_up in zip(rows, speed_ups, strict=True)
    ]
    forecasts = [[one.forecast / seconds for seconds in _forecasts(row) if one.forecast] for row in rows]
    bars = [
        (_name(row), (float(row.num_ranks), speed_up, *forecast))
        for row, speed_up, forecast in zip(rows, speed_ups, forecasts, strict=True)
    ]
    words = f"One model and one batch on more {axis} ranks. These ranks share {OPTIONS[axis][0].shares}."
    header = ["ranks", f"per {_device(results)}", *(["setting"] if has_settings else []), *_SECONDS, "speed-up"]
    header += ["of linear", *_forecast_header(one)]
    legend = _LEGEND[: len(bars[0][1])]
    return Section(f"Strong scaling: {axis} ranks", words, tuple(header), cells, bars, legend, "speed-up over one rank")


def _process(results: Results) -> Section:
    strong = [row for study in STRONG_SCALING for row in results.studies.get(study, ())]
    cells = [
        (row.model, scaling, *_seconds(row), _ranks(other), *_seconds(other), f"{row.median / other.median:.2f}")
        for row in results.studies["process"]
        for scaling, rows in (("strong", strong), ("weak", results.studies["tensor"]))
        for other in rows
        if other.num_ranks > 1 and other.sharing == 1 and _same_model(row, other)
    ]
    words = (
        "The same step in one process and on several ranks. The one process uses all cores, as PyTorch does by "
        "default. The ranks' speed is the seconds of the one process divided by the seconds of the ranks: above 1, the "
        "ranks are faster."
    )
    header = ("model", "scaling", "process", "range", "ranks", "seconds", "range", "ranks' speed")
    return Section("Comparison with one process on all cores", words, header, cells)


def _same_model(one: MeasuredCase, other: MeasuredCase) -> bool:
    return (one.model, one.flops) == (other.model, other.flops)


def _device(results: Results) -> str:
    return "core" if results.devices.kind == "cpu" else "GPU"


def _name(row: MeasuredCase) -> str:
    return f"{_ranks(row)}{'' if row.sharing == 1 else f', {row.sharing} per core'}"


def _ranks(row: MeasuredCase) -> str:
    axes = reversed([*row.axes.items()])
    return " x ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "1"


def _sharing(row: MeasuredCase) -> str:
    return f"{row.sharing}" if row.sharing == 1 else f"{row.sharing} (oversubscribed)"


def _seconds(row: MeasuredCase) -> tuple[str, str]:
    return f"{row.median:.3f}", f"{min(row.seconds):.3f} to {max(row.seconds):.3f}"


def _forecasts(row: MeasuredCase) -> list[float]:
    """Return the forecast of a row as a list. If the user has named no device to forecast, the list is empty, and the
    table has no forecast column.
    """
    return [] if row.forecast is None else [row.forecast]


def _forecast(row: MeasuredCase) -> list[str]:
    return [cell for seconds in _forecasts(row) for cell in (f"{seconds:.3f}", f"{seconds / row.median - 1:+.0%}")]


def _forecast_header(row: MeasuredCase) -> list[str]:
    return ["forecast, s", "off"] if row.forecast is not None else []
