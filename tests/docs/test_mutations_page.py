"""docs/tables/mutations.md lists the faults that the tests plant, each with the module that they hold it to."""

from pathlib import Path

from tests.verification.mutations import MUTATIONS

PAGE = Path(__file__).parents[2] / "docs" / "tables" / "mutations.md"


def test_page_holds_every_planted_fault_and_no_other():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert f"**{len(MUTATIONS)} of {len(MUTATIONS)} found, with the right module named.**" in lines
    rows = [line.split(" | ") for line in lines if line.startswith("| ")][1:]
    table = [[fault, layout, named.partition(", in micro-batch ")[0]] for fault, layout, named, *_ in rows]
    expected = [[f"| {m.fault}", str(m.layout), f"`{m.module}`"] for m in MUTATIONS]
    assert table == expected, "run `python docs/mutations.py`"
