"""docs/tables/dry-run.md holds the runs that the tests rehearse, each within 5%, and runs that were measured."""

from pathlib import Path

from tests.rehearsal.cases import LARGE, SMALL

PAGE = Path(__file__).parents[2] / "docs" / "tables" / "dry-run.md"


def rows(mark: str) -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")[2].partition("<!-- end -->")[0]
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return table[1:]


def error(cell: str) -> float:
    return abs(float(cell.rstrip("%"))) / 100


def test_page_holds_every_rehearsed_run_and_no_other() -> None:
    table = rows("rehearsed")
    expected = [[case.name, str(case.run.layout), case.device] for case in (*SMALL, *LARGE)]
    assert [row[:3] for row in table] == expected, "run `python docs/dry_run.py`"
    assert all(error(row[5]) < 0.05 and error(row[7]) < 0.05 for row in table)
    assert {row[8] for row in table} == {"the same", "nothing"}


def test_measured_memory_is_within_what_is_promised() -> None:
    errors = sorted(error(row[5]) for row in rows("measured"))
    assert len(errors) == 20, "run `python benchmarks/planner/planned_memory.py --write`"
    assert errors[10] <= 0.05
    assert errors[-1] <= 0.10
