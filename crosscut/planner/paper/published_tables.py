"""Sections of the scaling study about published tables of pipeline stages, of context ranks and of experts."""

from typing import NamedTuple

from crosscut.planner.paper.mixtures import (
    MIXTURE_ROWS,
    NOT_DESCRIBED,
    median_error,
    mixture_attained,
    mixture_errors,
    with_a_row_to_each_expert,
)
from crosscut.planner.paper.narayanan import (
    NARAYANAN_CALIBRATION,
    NARAYANAN_ROWS,
    narayanan_attained,
    narayanan_shares,
)
from crosscut.planner.paper.sections import Section, percent, percent_more, points
from crosscut.planner.paper.torchtitan import (
    CONTEXT_ROWS,
    SCHEDULE_ROWS,
    SMALL_CONTEXT_ROWS,
    TORCHTITAN_PROGRAM,
    TorchtitanRow,
    ratios,
    torchtitan_attained,
    torchtitan_forecast,
)

WITHIN = 0.05
"""Largest error of a forecast that counts as correct, as a share of the peak or of linear scaling."""
RATIO_WITHIN = 0.15
"""Largest relative error of a ratio between two rows that counts as correct."""


class RatioError(NamedTuple):
    """Ratio of a table's row to the previous row, as published and as forecast."""

    published: float
    ours: float

    @property
    def error(self) -> float:
        """Relative error of the forecast."""
        return self.ours / self.published - 1


def ratio_errors(rows: tuple[TorchtitanRow, ...], forecast: list[float]) -> list[RatioError]:
    """Ratio of each row of a table to the previous row, from the second row on, as published and as forecast."""
    published = ratios([row.tokens_per_second for row in rows])
    return [RatioError(*pair) for pair in zip(published, ratios(forecast), strict=True)]


def narayanan() -> Section:
    """Section about Table 1 of Narayanan et al. 2021."""
    shares = narayanan_shares()
    rows, bars = [], []
    for row in NARAYANAN_ROWS:
        published, ours = shares[row.name]
        note = " (calibration)" if row is NARAYANAN_CALIBRATION else ""
        layout = f"{row.tensor} x {row.pipeline} x {row.data}"
        stages = f"{row.stages_per_rank}" if row.pipeline > 1 else ""
        rows.append((f"{row.name}{note}", layout, stages, percent(published), percent(ours), points(ours - published)))
        bars.append((row.name, (published, ours)))
    met = sum(abs(ours - published) <= WITHIN for published, ours in shares.values())
    words = (
        "Table 1 of Narayanan et al. 2021 (arXiv 2104.04473): share of the A100's peak, including recomputed FLOPs. "
        "Layouts are tensor x pipeline x data ranks; the next column has the stages of each pipeline rank. Layouts and "
        "micro-batches are those of the authors' script (`examples/sc21/run_table_1.sh` of Megatron-LM). The forecast "
        f"simulates the schedule of the stages. The calibration, {percent(narayanan_attained())} of the peak for "
        "products, follows the rule of Megatron-Core's table: the smallest model with both tensor and data "
        f"parallelism. {met} of {len(rows)} rows are within 5 points. Two properties of the authors' program are "
        "not counted. The program sends hidden states between stages in parts and gathers them in the receiver's node "
        "(section 4.1), which makes these messages shorter. Its ranks also wait for these messages between two passes, "
        "which makes steps longer."
    )
    header = ("model", "layout", "stages", "published", "ours", "difference")
    return Section("Narayanan et al. on A100", words, header, rows, bars)


def narayanan_choices() -> Section:
    """Section about other rows that could calibrate the forecasts of Narayanan et al."""
    rows = []
    for row in NARAYANAN_ROWS:
        if row.pipeline > 1:
            continue
        errors = [ours - published for published, ours in narayanan_shares(row).values()]
        met = sum(abs(error) <= WITHIN for error in errors)
        share = percent(narayanan_attained(row))
        rows.append((row.name, share, f"{met} of {len(errors)}", points(max(errors, key=abs))))
    words = (
        "The same table for other calibrations, with the share of the peak that products attain, the number of rows "
        "within 5 points, and the largest error of all rows. Only rows without pipeline stages are tried."
    )
    header = ("calibrated by", "products attain", "within 5 points", "largest error")
    return Section("Narayanan et al.: another row as the calibration", words, header, rows)


def schedules() -> Section:
    """Section about torchtitan's table of schedules."""
    forecast = torchtitan_forecast(SCHEDULE_ROWS)
    found = ratio_errors(SCHEDULE_ROWS, forecast)[0]
    names = ("1F1B (calibration)", "interleaved, two stages per rank")
    rows = [
        (name, f"{row.tokens_per_second:g}", f"{ours:.0f}")
        for name, row, ours in zip(names, SCHEDULE_ROWS, forecast, strict=True)
    ]
    rows.append(("interleaved / 1F1B", f"{found.published:.2f}", f"{found.ours:.2f}"))
    words = (
        "torchtitan's Table 5 (`benchmarks/llama3_h100_202412_torchtitan.md`): tokens per second of one GPU for Llama "
        "3.1 405B on 512 H100s in float8, with tensor 8 x pipeline 8 x data 8 ranks, ZeRO-3, whole layers recomputed, "
        "and 32 sequences of 8,192 tokens for each data rank. The source does not give the number of micro-batches. "
        "The forecast uses 8, which was torchtitan's default for 8 pipeline ranks. With 8 micro-batches, the bubble of "
        "1F1B takes nearly half of a step."
    )
    return Section("torchtitan: interleaved stages on H100", words, ("schedule", "published", "ours"), rows)


def contexts() -> Section:
    """Section about torchtitan's tables of context ranks."""
    rows: list[tuple[str, ...]] = []
    missed = []
    for table in (CONTEXT_ROWS, SMALL_CONTEXT_ROWS):
        forecast = torchtitan_forecast(table)
        errors = ratio_errors(table, forecast)
        missed.append(sum(abs(found.error) > RATIO_WITHIN for found in errors))
        changes = [("", "", ""), *((f"{e.published:.2f}", f"{e.ours:.2f}", percent_more(e.error)) for e in errors)]
        for row, ours, change in zip(table, forecast, changes, strict=True):
            note = " (calibration)" if row is table[0] else ""
            name = f"{row.model}, {row.sequence_length:,}{note}"
            rows.append((name, f"{row.context}", f"{row.tokens_per_second:,g}", f"{ours:,.0f}", *change))
    share = percent(torchtitan_attained(CONTEXT_ROWS[0]))
    words = (
        "torchtitan's Tables 6 and 2: tokens per second of one GPU as sequences and context ranks double together, for "
        "Llama 3.1 405B on 512 H100s (tensor 8 x pipeline 8, 1F1B) and for 8B on 8 H100s. Each row is also compared "
        f"with the row before it. Products attain {share} of the float8 peak in the first row of the 405B table. As in "
        "torchtitan, keys and values are repeated for every query head before they are sent, and compiled layers wait "
        "for these messages. If the messages overlapped with attention, as the planner assumes for Crosscut, the error "
        f"of the first ratio of the 405B model would be {percent_more(_overlapped().error)}. Of the 3 ratios of each "
        f"model, {missed[0]} (405B) and {missed[1]} (8B) are off by more than 15%. The published rate of the 8B model "
        "falls to 0.42 when the sequence doubles from 65,536 tokens. Attention then does twice the work per token, "
        "which explains a fall to 0.5 at most. The cause of the rest is unknown."
    )
    header = ("model and tokens", "context", "published", "ours", "ratio", "ours", "error")
    return Section("torchtitan: context ranks on H100", words, header, rows)


def _overlapped() -> RatioError:
    """Ratio of the 405B model's first two rows: the published one, and the forecast if the messages of attention
    overlapped with attention.
    """
    program = TORCHTITAN_PROGRAM._replace(overlaps_context=True)
    rows = CONTEXT_ROWS[:2]
    return ratio_errors(rows, torchtitan_forecast(rows, program))[0]


def mixtures() -> Section:
    """Section about published rates of mixtures of experts."""
    errors = mixture_errors()
    rows, bars = [], []
    for row, error in zip(MIXTURE_ROWS, errors, strict=True):
        layout, ours = row.layout, row.tokens_per_second * (1 + error)
        note = " (calibration)" if row is MIXTURE_ROWS[0] else ""
        name = f"{row.model} on {layout.world_size:,}"
        sizes = f"{layout.pipeline} x {layout.data}, {layout.expert}"
        rates = (f"{row.tokens_per_second:,.0f}", f"{ours:,.0f}")
        rows.append((f"{name}{note}", sizes, f"{layout.stages_per_rank}", *rates, f"{100 * error:+.1f}%"))
        bars.append((name, (row.tokens_per_second, ours)))
    without = "; ".join(f"{name} ({reason})" for name, reason in NOT_DESCRIBED.items())
    too_low = mixture_errors(plain := with_a_row_to_each_expert())[1:]
    words = (
        "Tokens per second of one H100, in bfloat16, with sequences of 4,096 tokens and forced even loads. The first "
        "four rows are from NeMo Automodel (`docs/performance-summary.md`), and the last one from Megatron-Bridge "
        "(`scripts/performance/configs/qwen`). Layouts are pipeline x data ranks, and the ranks that share experts. "
        f"Products attain {percent(mixture_attained())} of the peak in the first row, and nothing else is fitted. "
        f"The median error of the other rows is {percent(median_error(errors))}, the largest "
        f"{percent(max(map(abs, errors)))}. Programs and routing are those of the sources: Automodel recomputes whole "
        "layers, runs a batch in parts, and gives a token experts with adjacent numbers; Megatron-Bridge draws them at "
        "random. Both send a token only once to each rank and node. With a row to each expert, as in Crosscut, "
        f"products would have to attain {percent(mixture_attained(plain))} of the peak, and the other rows would be "
        f"{percent(-max(too_low))} to {percent(-min(too_low))} too low. The row of "
        "1,024 GPUs does more work at once than the row of 256, and has a lower published rate; the forecast does not "
        "know why. Rows that the planner cannot "
        f"describe: {without}."
    )
    header = ("model and GPUs", "layout", "stages", "published", "ours", "error")
    return Section("Mixtures of experts on H100", words, header, rows, bars)
