"""Rehearses the runs of `tests/rehearsal/cases.py` and writes the table of `docs/tables/dry-run.md`.

    python docs/dry_run.py

takes about five minutes on two cores; the larger models are most of it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from crosscut.rehearsal import ComparedFigure, compare, rehearse  # noqa: E402 - the tests are no package
from tests.rehearsal.cases import LARGE, SMALL, Case  # noqa: E402

PAGE = ROOT / "docs" / "tables" / "dry-run.md"
TABLE = re.compile(r"(?<=<!-- rehearsed -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADER = """\
| run | layout | as on | peak MiB: program | formulas | apart | GFLOP: program | apart | sent |
|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Put the table into the page."""
    lines = []
    for case in (*SMALL, *LARGE):
        lines.append(row(case))
        print(lines[-1], flush=True)
    text = HEADER + "\n".join(lines) + "\n"
    PAGE.write_text(TABLE.sub(lambda _: text, PAGE.read_text(encoding="utf-8"), count=1), encoding="utf-8")


def row(case: Case) -> str:
    """A run's figures, in Markdown."""
    rehearsal = rehearse(case.run, device=case.device)
    memory, flops, *sent = compare(rehearsal)
    return (
        f"| {case.name} | {case.run.layout} | {case.device} | {memory.counted / 2**20:,.1f} "
        f"| {memory.planned / 2**20:,.1f} | {memory.error:+.1%} | {flops.counted / 1e9:,.1f} | {flops.error:+.1%} "
        f"| {told(sent)} |"
    )


def told(sent: list[ComparedFigure]) -> str:
    """Whether the same is sent along every axis."""
    if not sent:
        return "nothing"
    return "the same" if all(r.planned == r.counted for r in sent) else "not the same"


if __name__ == "__main__":
    main()
