"""The additional work of the paper's program, and the sizes of all terms."""

import pytest

from crosscut.planner.compute import flops_per_step
from crosscut.planner.paper.account import MEASURED, STATE_BYTES, TERMS, V100, CopyRates, account, copy_seconds
from crosscut.planner.paper.account_report import IDEAS, besides, terms
from crosscut.planner.paper.runs import PAPER_FLOPS_PER_SECOND, paper_run, paper_scaling, paper_seconds
from crosscut.planner.paper.sections import Section
from crosscut.planner.program import PAPER_PROGRAM
from crosscut.planner.time import step_time

ONE, EIGHT = paper_run("megatron-1.2b", 1), paper_run("megatron-1.2b", 8)


def test_copies_and_waits_do_not_shrink_with_the_ranks_and_the_rest_does() -> None:
    one, eight = (list(account(run).values()) for run in (ONE, EIGHT))
    assert eight[:2] == one[:2]
    assert all(few < many / 7 for few, many in zip(eight[2:], one[2:], strict=True))


def test_terms_are_what_their_formulas_say() -> None:
    copies, waits, _, scores, apart = account(ONE).values()
    memory, stream = V100.memory_bandwidth * V100.memory_attained, 8 * 1024 * 1536 * 2
    assert STATE_BYTES == 200 * 4120 + 16
    assert copies == pytest.approx(40 * 6 * 824_016 * (1 / MEASURED.to_host + 1 / MEASURED.to_device))
    assert waits == pytest.approx((36 * 40 + 8) * 20e-6)
    assert scores == pytest.approx(40 * 6 * 8 * 16 * 1024**2 * 2 / memory)
    assert apart == pytest.approx(40 * 24 * stream / memory)


def test_copies_go_at_the_rates_that_were_measured_elsewhere() -> None:
    """dask-cuda pull request 98: a GiB to the host in 0.5479 s; 5 to 6 GB/s without pinned memory."""
    assert MEASURED.to_host * 0.5479 == 2**30
    assert 5e9 < MEASURED.to_device < 6e9
    assert copy_seconds(ONE, CopyRates(4e9, 4e9)) == pytest.approx(40 * 12 * 824_016 / 4e9)


def test_the_account_is_in_the_forecast_of_the_papers_program_and_only_there() -> None:
    program = step_time(ONE, V100, program=PAPER_PROGRAM).total
    assert paper_seconds(ONE) == program + sum(account(ONE).values())
    assert flops_per_step(ONE, recompute=True) / paper_seconds(ONE) == pytest.approx(PAPER_FLOPS_PER_SECOND, rel=0.005)
    run = paper_run("megatron-8.3b", 8)
    work = flops_per_step(run, recompute=True) / flops_per_step(ONE, recompute=True) / 8
    assert paper_scaling(run) == pytest.approx(work * paper_seconds(ONE) / paper_seconds(run))


@pytest.fixture(scope="module")
def sizes() -> Section:
    return terms()


def test_the_sections_tell_every_term(sizes: Section) -> None:
    seconds = besides()
    assert [row[0] for row in seconds.rows] == [term.name for term in TERMS]
    assert "is 0.27 s per step longer than Table 2 and Figure 6 imply" in seconds.words
    assert [row[0] for row in sizes.rows[1:]] == [each.name for each in (*TERMS, *IDEAS)]
    assert all(len(row) == len(part.header) for part in (seconds, sizes) for row in part.rows)


def test_every_term_that_is_left_out_has_a_size_and_a_reason(sizes: Section) -> None:
    left_out = sizes.rows[1 + len(TERMS) :]
    assert all(row[-1].startswith("no: ") for row in left_out)
    assert all(any(cell not in ("", "+0.0 points") for cell in row[1:-1]) for row in left_out)


def test_the_copies_are_the_largest_term(sizes: Section) -> None:
    changes = {row[0]: float(row[1].split()[0]) for row in sizes.rows[1 : 1 + len(TERMS)]}
    assert min(changes, key=changes.__getitem__) == TERMS[0].name
    assert changes[TERMS[0].name] < -4.0
